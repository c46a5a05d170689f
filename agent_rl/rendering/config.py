"""The settings of a renderer: `renderer=NAME`, `renderer.KEY=VALUE`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from agent_rl.config import Section


class RendererConfig(Section):
    """How messages become token ids, and replies messages."""

    name: str | None = None
    """`chatml`, `template` (the model's own chat template), `template-fork` (one that rewrites the past), `plain` (for
    a model without one), a family such as `qwen3`, or a registered name; null for what fits the tokenizer."""
    missing: Literal["system", "refuse"] = "system"
    """What becomes of tools, calls and results that a chat template leaves out: `system` writes them into the system
    message, the replies' text and user messages, as Hermes does; `refuse` is an error before anything is sampled."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Of the chat template, such as `renderer.options.enable_thinking=false`; of a family, the fields of its config in
    the package `renderers`."""
