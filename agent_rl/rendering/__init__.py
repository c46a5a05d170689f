"""Rendering: messages to token ids that are appended and never rewritten, sampled ids back to messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.rendering.base import Bridge, Renderer
from agent_rl.rendering.chatml import ChatMLRenderer
from agent_rl.rendering.families import FamilyRenderer, families, family_of
from agent_rl.rendering.template import OnBreak, TemplateRenderer
from agent_rl.rendering.tokenizer import train_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
    "train_tokenizer",
]


def load_renderer(
    tokenizer: PreTrainedTokenizerBase, name: str | None = None, on_break: OnBreak = "refuse"
) -> Renderer:
    """Choose the renderer of a tokenizer: ours for ours, a family's if it is known, else its chat template, proven.

    Args:
        tokenizer: the model's tokenizer.
        name: "chatml", "template", or one of `families()`, for a fine-tune whose name says nothing; None chooses.
        on_break: what to do if a chat template rewrites the past; see `TemplateRenderer`.

    Raises:
        ConfigError: if there is no renderer of that name.
        RenderError: if the tokenizer does not fit the renderer.
    """
    name = name or tokenizer.init_kwargs.get("agent_rl_renderer") or family_of(tokenizer.name_or_path) or "template"
    if name == "chatml":
        return ChatMLRenderer(tokenizer)
    if name == "template":
        return TemplateRenderer(tokenizer, on_break=on_break)
    if name in families():
        return FamilyRenderer(tokenizer, name)
    known = ("chatml", "template", *families())
    raise ConfigError(f"no renderer is called {name!r}.{did_you_mean(name, known)} There are: {', '.join(known)}")
