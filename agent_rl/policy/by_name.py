"""Policies by name: `policy=NAME policy.key=value`, and `@register_policy` for a user's own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, create_model

from agent_rl.config import Section
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.model_files import is_gguf, is_hub_id
from agent_rl.errors import CheckpointError, ConfigError, did_you_mean
from agent_rl.gym.env import Env
from agent_rl.gym.mixture import members_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.policy.base import AnyPolicy
from agent_rl.registries import Registry

PolicyFactory: TypeAlias = Callable[..., AnyPolicy | AbstractContextManager[AnyPolicy]]
F = TypeVar("F", bound=PolicyFactory)

POLICIES: Registry[PolicyFactory] = Registry(
    "policy",
    builtin={
        "oracle": "agent_rl.policy.scripted",
        "demonstrator": "agent_rl.policy.scripted",
        "random": "agent_rl.policy.baselines",
        "constant": "agent_rl.policy.baselines",
        "empty": "agent_rl.policy.baselines",
        "nothing": "agent_rl.policy.baselines",
        "checkpoint": "agent_rl.policy.checkpoint",
        "vllm": "agent_rl.policy.vllm",
        "openai": "agent_rl.policy.openai",
    },
)
SCRIPTS = {"oracle", "demonstrator"}
"""Those that play what an environment defines."""
_GIVEN = ("params", "env")
"""The parameters that a caller fills in; all others of a factory are settings."""


def register_policy(name: str) -> Callable[[F], F]:
    """Register a policy's factory under a name.

    `policy=name` calls it with `policy.key=value` as its arguments, checked against its annotations. A parameter
    `params` gets the `SamplingParams`, `env` the `EnvSpec`. It returns a policy, or a context manager that yields one.

    Example::

        @ar.register_policy("first-tool")
        def first_tool(say: str = "hm") -> Policy: ...
    """

    def add(factory: F) -> F:
        POLICIES.add(name, factory, factory)
        return factory

    return add


class PolicyConfig(Section):
    """The policy to run; every further key is a setting of its factory."""

    model_config = ConfigDict(extra="allow")

    name: str = "oracle"
    """A registered name, or a model: the folder of a checkpoint or run, a name on Hugging Face's hub, a .gguf file."""

    @property
    def folder(self) -> str:
        """The model's folder, if it has one; otherwise any text."""
        settings = self.model_extra or {}
        return str(settings.get("folder") or settings.get("model") or self.name)


class SamplingSettings(Section):
    """A policy by name, and how a model samples as one."""

    policy: PolicyConfig = PolicyConfig()
    temperature: float = Field(1.0, ge=0)
    """Of a model; 0 is greedy."""
    max_tokens: int | None = Field(None, ge=1)
    """Of one reply; null for what a checkpoint says (`generation_config.json`), otherwise 1024."""


class _Settings(Section):
    model_config = ConfigDict(arbitrary_types_allowed=True)


def sampling_params(policy: PolicyConfig, temperature: float = 1.0, max_tokens: int | None = None) -> SamplingParams:
    """Return how to sample a policy that is chosen by name; a checkpoint may say how long its replies are.

    Raises:
        CheckpointError: if the checkpoint's own settings are damaged.
    """
    file = model_folder(policy.folder) / "generation_config.json"
    try:
        own = json.loads(file.read_text(encoding="utf-8")).get("max_new_tokens") if file.is_file() else None
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged: it is no JSON object; remove it, or take another folder") from error
    return SamplingParams(temperature=temperature, max_tokens=max_tokens or own or 1024)


def ignored_sampling(settings: SamplingSettings) -> str:
    """Return a note on how to sample that the policy has no use for; an empty string if there is nothing to say."""
    name, temperature = settings.policy.name, settings.temperature
    if name not in POLICIES or "params" in inspect.signature(POLICIES[name]).parameters:
        return ""
    asked = {"temperature": temperature if temperature != 1.0 else None, "max_tokens": settings.max_tokens}
    names = " ".join(f"{key}={value:g}" for key, value in asked.items() if value is not None)
    return f"{names}: policy={name} does not sample, so that it changes nothing" if names else ""


def model_folder(folder: str) -> Path:
    """Return a model's folder: of a run's folder, its checkpoint."""
    checkpoint = Path(folder) / "checkpoint"
    return checkpoint if checkpoint.is_dir() else Path(folder)


@contextmanager
def open_policy(config: PolicyConfig, params: SamplingParams, env: EnvSpec) -> Iterator[AnyPolicy]:
    """Yield the policy that a config names.

    Args:
        config: its name and settings.
        params: how a model samples; scripts have no use for it.
        env: the environment to play in.

    Raises:
        ConfigError: if there is no such policy, it has no such setting, or it can't be had.
        CheckpointError: if the folder holds no checkpoint.
    """
    name, settings = config.name, dict(config.model_extra or {})
    if not name:
        raise ConfigError("policy= has no name: give one, such as oracle, or a checkpoint's folder")
    if name not in POLICIES and (Path(name).is_dir() or is_gguf(name) or is_hub_id(name)):
        name, settings = "checkpoint", {"folder": str(model_folder(name)), **settings}
    if name not in POLICIES:
        known = ", ".join(POLICIES)
        raise ConfigError(
            f"policy={name} is neither {known} nor a model's folder, file or name.{did_you_mean(name, POLICIES)} "
            "--import FILE loads your own."
        )
    factory = POLICIES[name]
    given = {"params": params, "env": env}
    asked = {key: given[key] for key in _GIVEN if key in inspect.signature(factory).parameters}
    checked = _checked(name, factory, settings)
    for member in members_of(env, {}):
        _require_script(name, member.spec)
    made = factory(**checked, **asked)
    with made if isinstance(made, AbstractContextManager) else nullcontext(made) as policy:
        yield require_policy(policy)


def require_policy(policy: AnyPolicy) -> AnyPolicy:
    """Return a policy.

    Raises:
        ConfigError: if it is none.
    """
    if not (callable(getattr(policy, "start", None)) or callable(getattr(policy, "start_in", None))):
        raise ConfigError(
            f"policy={policy!r} is no policy: give a name such as 'oracle', a checkpoint's folder, or an object with "
            "start(tools, seed)"
        )
    return policy


def _require_script(name: str, env: EnvSpec) -> None:
    """Refuse a script that the environment does not have, before every episode fails of it."""
    has_oracle = env.cls.oracle is not Env.oracle
    has = {"oracle": has_oracle, "demonstrator": has_oracle or env.cls.demonstrate is not Env.demonstrate}
    if not has.get(name, True):
        method = "oracle(self)" if name == "oracle" else "demonstrate(self, rng)"
        others = "policy=demonstrator, " if has["demonstrator"] else ""
        raise ConfigError(
            f"policy={name}: {env.id} has none; define {env.cls.__name__}.{method}, or choose {others}"
            "policy=FOLDER of a checkpoint"
        )


def _checked(name: str, factory: PolicyFactory, settings: Mapping[str, JsonValue]) -> dict[str, object]:
    """Check settings against a factory's annotations; return those that were given."""
    schema = _schema_of(factory)
    known = schema.model_fields
    for key in settings:
        if key not in known:
            takes = ", ".join(known) or "none"
            raise ConfigError(f"policy={name} has no setting '{key}'.{did_you_mean(key, known)} It takes: {takes}.")
    try:
        checked = schema.model_validate(settings)
    except ValidationError as error:
        problems = (f"policy.{'.'.join(map(str, e['loc']))}: {e['msg'].lower()}" for e in error.errors())
        raise ConfigError(f"policy={name}: {'; '.join(problems)}") from error
    return {key: getattr(checked, key) for key in settings}


def _schema_of(factory: PolicyFactory) -> type[BaseModel]:
    hints = get_type_hints(factory, include_extras=True)
    fields = {
        name: (hints.get(name, JsonValue), ... if p.default is p.empty else p.default)
        for name, p in inspect.signature(factory).parameters.items()
        if name not in _GIVEN and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    schema: type[BaseModel] = create_model("settings", __base__=_Settings, **fields)  # type: ignore[call-overload]
    return schema
