"""Renderers by name, and `@register_renderer` for a user's own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from agent_rl.errors import ConfigError
from agent_rl.registries import Registry
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.config import RendererConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RendererFactory: TypeAlias = Callable[..., Renderer]
"""Takes the model's tokenizer; with parameters `missing` and `options`, these settings, too."""
F = TypeVar("F", bound=RendererFactory)

RENDERERS: Registry[RendererFactory] = Registry(
    "renderer",
    builtin={
        "chatml": "agent_rl.rendering.chatml",
        "template": "agent_rl.rendering.template",
        "template-fork": "agent_rl.rendering.template",
        "plain": "agent_rl.rendering.template",
    },
)
_REMEMBERED = "agent_rl_renderer"
"""A key of `tokenizer_config.json`: a renderer's name, or its settings."""


def register_renderer(name: str) -> Callable[[F], F]:
    """Register what makes a renderer of a tokenizer; `renderer=name` or `policy.renderer=name` then chooses it.

    Example::

        @ar.register_renderer("qwen3-keeps-thoughts")
        def keeps_thoughts(tokenizer):
            return FamilyRenderer(tokenizer, "qwen3", {"thinking_retention": "all"})
    """

    def add(factory: F) -> F:
        RENDERERS.add(name, factory, factory)
        return factory

    return add


def load_renderer(tokenizer: PreTrainedTokenizerBase, renderer: RendererConfig | str | None = None) -> Renderer:
    """Return the renderer that fits a tokenizer, or the one that is asked for.

    What fits is, in this order: what `remember_renderer` left in its files, the family of its name on Hugging Face's
    hub, the family that renders as its chat template does, and the chat template itself, proven. A family that leaves
    tools out is passed over.

    Args:
        tokenizer: the model's.
        renderer: a `RendererConfig`, or only its name.

    Raises:
        ConfigError: if there is no renderer of that name, or it has no such option.
        RenderError: if the tokenizer does not fit the renderer.
    """
    config = _with_remembered(tokenizer, RendererConfig(name=renderer) if isinstance(renderer, str) else renderer)
    if config.name is None and (family := _fitting_family(tokenizer, config)) is not None:
        return family
    name = config.name or "template"
    factory = _factory(name)
    takes = inspect.signature(factory).parameters
    if config.options and "options" not in takes:
        raise ConfigError(f"renderer={name} has no options, got {config.options}: leave out renderer.options")
    settings = {"missing": config.missing, "options": config.options}
    return factory(tokenizer, **{key: value for key, value in settings.items() if key in takes})


def _fitting_family(tokenizer: PreTrainedTokenizerBase, config: RendererConfig) -> Renderer | None:
    """Return the renderer of a tokenizer's family; None if it has none, or one that leaves tools out."""
    from agent_rl.rendering.families import FamilyRenderer, family_of, matching_family

    name = family_of(tokenizer.name_or_path) or matching_family(tokenizer)
    if name is None:
        return None
    renderer = FamilyRenderer(tokenizer, name, config.options)
    return renderer if renderer.shows_tools else None


def require_renderer(name: str | None) -> None:
    """Check that there is a renderer of a name, without a tokenizer; None is what fits one.

    Raises:
        ConfigError: if there is none.
    """
    if name is not None and name not in RENDERERS.names() and find_spec("renderers") is not None:
        _factory(name)


def _factory(name: str) -> RendererFactory:
    if name not in RENDERERS:
        from agent_rl.rendering.families import FamilyRenderer, families

        for family in families():  # not sooner: their package takes 0.4 s to import
            RENDERERS.add(family, partial(FamilyRenderer, family=family), FamilyRenderer)
    return RENDERERS[name]


def remember_renderer(tokenizer: PreTrainedTokenizerBase, renderer: RendererConfig) -> None:
    """Leave what was asked for with a tokenizer, so that its saved files lead `load_renderer` to it."""
    if asked := renderer.model_dump(exclude_defaults=True):
        tokenizer.init_kwargs[_REMEMBERED] = asked


def remember_in_files(folder: Path, renderer: RendererConfig) -> None:
    """Leave what was asked for in a folder's tokenizer files, as `remember_renderer` and saving do."""
    if asked := renderer.model_dump(exclude_defaults=True):
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {_REMEMBERED: asked}, indent=2), "utf-8")


def _with_remembered(tokenizer: PreTrainedTokenizerBase, config: RendererConfig | None) -> RendererConfig:
    """Return what was asked for now, or else what was remembered."""
    remembered = tokenizer.init_kwargs.get(_REMEMBERED)
    if remembered is None or (config is not None and config != RendererConfig()):
        return config or RendererConfig()
    return RendererConfig.model_validate({"name": remembered} if isinstance(remembered, str) else remembered)
