"""Renderers by name, and `@register_renderer` for a user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from agent_rl.registries import Registry
from agent_rl.rendering.base import Renderer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RendererFactory: TypeAlias = Callable[[Any], Renderer]
"""Takes the model's tokenizer."""
F = TypeVar("F", bound=RendererFactory)

RENDERERS: Registry[RendererFactory] = Registry(
    "renderer",
    builtin={
        "chatml": "agent_rl.rendering.chatml",
        "template": "agent_rl.rendering.template",
        "template-fork": "agent_rl.rendering.template",
    },
)


def register_renderer(name: str) -> Callable[[F], F]:
    """Register what makes a renderer of a tokenizer; `policy.renderer=name` then chooses it.

    Example::

        @ar.register_renderer("qwen3-keeps-thoughts")
        def keeps_thoughts(tokenizer):
            return FamilyRenderer(tokenizer, "qwen3", {"thinking_retention": "all"})
    """

    def add(factory: F) -> F:
        RENDERERS.add(name, factory, factory)
        return factory

    return add


def load_renderer(tokenizer: PreTrainedTokenizerBase, name: str | None = None) -> Renderer:
    """Choose the renderer of a tokenizer: ours for ours, a family's if it is known, else its chat template, proven.

    Args:
        tokenizer: the model's tokenizer.
        name: "chatml", "template", "template-fork", a registered name, or one of `families()`, for a fine-tune whose
            name says nothing; None chooses.

    Raises:
        ConfigError: if there is no renderer of that name.
        RenderError: if the tokenizer does not fit the renderer.
    """
    from agent_rl.rendering.families import FamilyRenderer, families, family_of

    name = name or tokenizer.init_kwargs.get("agent_rl_renderer") or family_of(tokenizer.name_or_path) or "template"
    if name not in RENDERERS:
        for family in families():  # not sooner: their package takes 0.4 s to import
            RENDERERS.add(family, partial(FamilyRenderer, family=family), FamilyRenderer)
    return RENDERERS[name](tokenizer)
