"""Rendering: messages to token ids that are appended and never rewritten, sampled ids back to messages."""

from __future__ import annotations

from agent_rl.rendering.base import Bridge, Renderer
from agent_rl.rendering.by_name import load_renderer, register_renderer
from agent_rl.rendering.chatml import ChatMLRenderer
from agent_rl.rendering.families import FamilyRenderer, families, family_of
from agent_rl.rendering.template import OnBreak, TemplateRenderer
from agent_rl.rendering.tokenizer import train_tokenizer

__all__ = [
    "Bridge",
    "ChatMLRenderer",
    "FamilyRenderer",
    "OnBreak",
    "Renderer",
    "TemplateRenderer",
    "families",
    "family_of",
    "load_renderer",
    "register_renderer",
    "train_tokenizer",
]
