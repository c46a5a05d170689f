"""Choosing a policy by its name, as `agent-rl rollout policy=...` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, JsonValue, model_validator

from agent_rl.config import Section
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.policy.base import AnyPolicy
from agent_rl.policy.scripted import demonstrator, oracle
from agent_rl.policy.vllm import vllm_policy

_SCRIPTS = {"oracle": oracle, "demonstrator": demonstrator}


class PolicyConfig(Section):
    """Who plays. All but the name is for vllm."""

    name: str = "oracle"
    """oracle, demonstrator, vllm, or the folder of a checkpoint."""
    model: str | None = None
    url: str | None = None
    tokenizer: str | None = None
    """A folder or name; null for the model's."""
    renderer: str | None = None
    """As in `agent_rl.rendering.load_renderer`; null for the one that fits the tokenizer."""
    context: int | None = Field(None, ge=2)
    """The longest sequence, in tokens; null for the model's or server's."""
    concurrency: int = Field(64, ge=1)
    """Requests under way at a server."""
    engine: dict[str, JsonValue] = Field(default_factory=dict)
    """More of vLLM's engine arguments."""

    @model_validator(mode="after")
    def _read(self) -> PolicyConfig:
        given = sorted(self.model_dump(exclude_defaults=True).keys() - {"name"})
        if given and self.name != "vllm":
            raise ValueError(f"{given[0]}={getattr(self, given[0])} is for policy=vllm, not policy={self.name}")
        return self


@contextmanager
def open_policy(config: PolicyConfig, params: SamplingParams, tokens: int | None) -> Iterator[AnyPolicy]:
    """Yield the policy that a config names.

    Args:
        config: which.
        params: how a model samples; scripts have no use for it.
        tokens: the environment's budget, if it has one: what an engine of ours makes room for.

    Raises:
        ConfigError: if there is no such policy, or it can't be had.
        CheckpointError: if the folder holds none.
    """
    if config.name in _SCRIPTS:
        yield _SCRIPTS[config.name]()
    elif config.name == "vllm":
        with vllm_policy(
            config.model,
            url=config.url,
            tokenizer=config.tokenizer,
            renderer=config.renderer,
            params=params,
            context=config.context,
            concurrency=config.concurrency,
            engine=config.engine,
        ) as policy:
            yield policy
    elif Path(config.name).is_dir():
        yield _checkpoint(config.name, params, tokens or 1024)
    else:
        names = (*_SCRIPTS, "vllm")
        raise ConfigError(
            f"policy={config.name} is neither {', '.join(names)} nor a checkpoint's folder."
            f"{did_you_mean(config.name, names)}"
        )


def _checkpoint(folder: str, params: SamplingParams, context: int) -> AnyPolicy:
    try:
        from agent_rl.backends.embedded.actor import load_actor
    except ImportError as error:
        raise ConfigError(f"a checkpoint's policy needs {error.name}: pip install 'agent-rl[train]'") from error
    return load_actor(folder, context=context).policy(params)
