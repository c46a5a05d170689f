"""Configs: YAML from `agent_rl.configs`, composed by Hydra and checked by a pydantic model: no key goes unread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from agent_rl.errors import ConfigError, did_you_mean

M = TypeVar("M", bound=BaseModel)

FREE = ("env_args", "verl", "policy.engine")
"""Keys below which anything goes: the environment's constructor, verl or vLLM checks them."""


class Section(BaseModel):
    """A part of a config: it can't be changed, and a key that it doesn't know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def load_config(name: str, schema: type[M], overrides: Sequence[str]) -> M:
    """Compose `configs/<name>.yaml` with overrides such as `steps=20`, `algorithm=grpo`, `rollout.groups=8`.

    Raises:
        ConfigError: naming the key or value that is wrong, and the nearest right one.
    """
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    known = dict(_keys(schema))
    prepared = [_prepare(override, known) for override in overrides]
    try:
        with initialize_config_module("agent_rl.configs", version_base=None):
            composed = OmegaConf.to_container(compose(name, prepared), resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"{' '.join(overrides)}: {error}") from error
    try:
        return schema.model_validate(composed)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e["loc"], e["msg"], e["input"]) for e in error.errors())) from error


def choices(group: str) -> list[str]:
    """Return the names of a config group's files; none if there is no such group."""
    folder = resources.files("agent_rl.configs") / group
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml")) if folder.is_dir() else []


def _prepare(override: str, known: dict[str, bool]) -> str:
    """Check an override's key; let it set keys that only the schema knows, or choose from a group."""
    key, equals, value = override.partition("=")
    if not equals:
        raise ConfigError(f"'{override}' is no override: write key=value, such as steps=20")
    if any(key.startswith(f"{free}.") for free in FREE):
        return f"++{override.replace('.+', '.', 1)}"  # a `+`, with which Hydra adds a key, is not needed
    if known.get(key) and f"{key}.name" in known and not choices(key) and not value.startswith("{"):
        return f"++{key}.name={value}"  # a section that has a name is chosen by it
    names = choices(key) if known.get(key, True) and not value.startswith("{") else []
    if key not in known and not names:
        raise ConfigError(f"no setting '{key}'.{did_you_mean(key, known)} --help lists them.")
    if not names:
        return f"++{override}"
    if value not in names:
        raise ConfigError(f"no {key} '{value}'.{did_you_mean(value, names)} There are: {', '.join(names)}.")
    return override


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every settable key, and whether it is a section."""
    for attribute, field in schema.model_fields.items():
        name = field.alias or attribute
        section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        yield prefix + name, section
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        for choices in (m for m in field.metadata if hasattr(m, "settings")):  # agent_rl.algorithms.components.Choices
            yield from ((f"{prefix}{name}.{key}", False) for key in choices.settings())


def _explain(where: tuple[int | str, ...], message: str, value: object) -> str:
    message = message[0].lower() + message[1:]
    if isinstance(value, dict):  # about settings that don't go together: the message names them
        message = message.removeprefix("value error, ")
        return f"{'.'.join(map(str, where))}: {message}" if where else message
    return f"{'.'.join(map(str, where))}={value!r}: {message}"
