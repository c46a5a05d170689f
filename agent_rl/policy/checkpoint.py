"""A policy that the embedded engine samples from a checkpoint, or any other model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field

from agent_rl.engines.base import SamplingParams
from agent_rl.errors import ConfigError
from agent_rl.gym.registry import EnvSpec
from agent_rl.policy.by_name import register_policy
from agent_rl.policy.delegation import Delegation
from agent_rl.policy.shortening import Shortening
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering import load_renderer
from agent_rl.rendering.config import RendererConfig


@register_policy("checkpoint")
@contextmanager
def checkpoint_policy(
    folder: str,
    *,
    params: SamplingParams,
    env: EnvSpec,
    renderer: RendererConfig | str | None = None,
    context: Annotated[int, Field(ge=2)] | None = None,
    slots: Annotated[int, Field(ge=1)] = 64,
    device: str = "cpu",
    shorten: Shortening | None = None,
    delegate: Delegation | None = None,
) -> Iterator[TokenPolicy]:
    """Yield a policy over a model's folder in Hugging Face's format; until it is closed, torch's threads fit the model.

    Args:
        folder: such as runs/latest/checkpoint.
        params: how to sample.
        env: its token budget is the context, if it has one.
        renderer: as in `load_renderer`.
        context: the longest sequence, in tokens, instead.
        slots: sequences that are sampled at a time.
        device: as in `device_of`.
        shorten: what becomes of a context that has grown too long.
        delegate: how often parts of the task may be given to sub-agents.

    Raises:
        CheckpointError: if the folder holds no model.
        ConfigError: if torch or transformers are missing, or the device.
    """
    try:
        from agent_rl.engines.embedded.model_folder import load_model, make_engine
        from agent_rl.engines.embedded.parts import usual_context
        from agent_rl.engines.embedded.threads import threads_restored, use_threads
    except ImportError as error:
        raise ConfigError(f"a checkpoint's policy needs {error.name}: pip install -e '.[train]'") from error
    model, tokenizer = load_model(folder, device)
    context = context or env.budget.tokens or usual_context(model)
    with threads_restored():
        use_threads(model)
        engine = make_engine(model, tokenizer, slots=slots, context=context)
        yield TokenPolicy(engine, load_renderer(tokenizer, renderer), params, shorten=shorten, delegate=delegate)
