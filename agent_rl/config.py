"""Configs: YAML from `agent_rl.configs`, composed by Hydra and checked by a pydantic model: no key goes unread."""

from __future__ import annotations

import re
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from importlib import resources
from types import MappingProxyType, UnionType
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar, Union, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agent_rl.config_mistakes import explain, place, relevant
from agent_rl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from pydantic.fields import FieldInfo

M = TypeVar("M", bound=BaseModel)
MOST = 10_000_000
"""Tasks, or episodes of each: they are planned before the first begins, and more is a slip that plans for hours."""
Count: TypeAlias = Annotated[int, Field(ge=1, le=MOST)]
"""How many tasks, or episodes of each."""
Retries: TypeAlias = Annotated[int, Field(ge=0)]
"""How often an episode is run again."""

FREE = ("env_args.", "engine_args.", "verl.", "policy.", "retries.", "renderer.options.")
"""Keys below which anything goes: the environment's constructor, vLLM, verl, the policy's factory, the names of
endings, a chat template's variables."""
_NUMBER, _WORD = re.compile(r"-?(0|[1-9]\d*)", re.ASCII), re.compile(r"[^\W\d_][\w./-]*")
_GRAMMAR = re.compile(r"""[][{},'"]|\$\{""")
"""What has a meaning in Hydra's grammar, wherever it is in a value."""
_CONSTANTS = ("null", "true", "false", "nan", "inf")
ELSEWHERE = {
    "num_generations": "rollout.samples",
    "group_size": "rollout.samples",
    "n_samples_per_prompt": "rollout.samples",
    "rollouts_per_example": "rollout.samples",
    "per_device_train_batch_size": "rollout.groups",
    "train_batch_size": "rollout.groups",
    "max_completion_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_prompt_length": "budget.tokens",
    "max_turns": "budget.turns",
    "max_tool_calling_iterations": "budget.turns",
    "learning_rate": "optimizer.lr",
    "max_steps": "steps",
    "total_training_steps": "steps",
    "num_train_epochs": "steps",
    "num_iterations": "updates.epochs",
    "ppo_epochs": "updates.epochs",
    "num_mini_batches": "updates.minibatches",
    "ppo_mini_batch_size": "updates.minibatches",
    "steps_per_generation": "updates.minibatches",
    "updates_per_batch": "updates.epochs",
    "beta": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "epsilon": "algorithm.objective.clip_low_eps",
    "epsilon_high": "algorithm.objective.clip_high_eps",
    "loss_type": "algorithm",
    "output_dir": "runs_dir",
    "save_steps": "checkpoint_every",
    "eval_steps": "eval.every",
    "load_best_model_at_end": "eval.keep_best",
    "model_name_or_path": "start_from",
    "max_concurrent": "concurrency",
    "logger": "report_to",
    "loggers": "report_to",
}
"""What TRL, verl and verifiers call a setting, and its name here."""
_NONE: Mapping[str, object] = MappingProxyType({})


class Section(BaseModel):
    """A part of a config: it can't be changed; an unknown key, and a number that is not finite, are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True, allow_inf_nan=False)


def filled_in(given: Mapping[str, object], defaults: Mapping[str, object]) -> dict[str, object]:
    """Return settings with defaults where they say nothing, section by section.

    What is given for a section, and is none, stays as it is, for the schema to refuse.
    """
    found = {**defaults, **given}
    for name, default in defaults.items():
        value = found[name]
        if isinstance(value, Section):
            value = value.model_dump(exclude_unset=True)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            found[name] = filled_in(value, default)
    return found


def load_config(
    name: str | None, schema: type[M], overrides: Sequence[str] = (), settings: Mapping[str, object] = _NONE
) -> M:
    """Compose `configs/<name>.yaml` with settings and check it.

    Args:
        name: of the file; None for a config that has no presets.
        schema: what it must fit; all defaults are there.
        overrides: settings as text, such as `steps=20`, `algorithm=grpo`, `rollout.groups=8`.
        settings: settings as values, such as `{"steps": 20, "rollout": {"groups": 8}}` or `{"rollout.groups": 8}`.

    Raises:
        ConfigError: naming the key or value that is wrong, and the nearest right one.
    """
    known = dict(_keys(schema))
    presets, values = dict[str, str](), list[tuple[str, object]]()
    for key, value in [*map(parse_setting, overrides), *settings.items()]:
        for leaf, found in _leaves(key, value, known):
            if _presets(leaf, known):
                presets[leaf] = str(found)
            else:
                values.append((leaf, found))
    if name is None and not presets:
        return check_config(schema, _nested(values))
    _refuse_mistyped(schema, values)
    from hydra.errors import HydraException  # not above: a wrong key shows before they are imported
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    try:
        composed = deepcopy(_composed(name, tuple(presets.items())))
        with open_dict(composed):
            for key, value in values:
                # a component with its name replaces another, whose settings are not its own
                named = isinstance(value, Mapping) and "name" in value and known.get(key) is False
                OmegaConf.update(composed, key, value, merge=not named, force_add=True)
        container = OmegaConf.to_container(composed, resolve=True)
    except HydraException as error:  # a preset of a group that this config has not
        foreign = [group for group in presets if f"'{group}'" in str(error)]
        raise ConfigError(f"no setting '{foreign[0]}'.{_hint(foreign[0], {})} --config lists them.") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"{' '.join(overrides) or name}: {error}") from error
    return check_config(schema, container)


_composing = threading.Lock()


@cache
def _composed(name: str | None, presets: tuple[tuple[str, str], ...]) -> DictConfig:
    """Return `configs/<name>.yaml` with presets, for its callers to copy: Hydra takes 20 times as long as the copy."""
    from hydra import compose, initialize_config_module

    with _composing, _own_hydra(), initialize_config_module("agent_rl.configs", version_base=None):
        return cast("DictConfig", compose(name, [f"{group}={preset}" for group, preset in presets]))


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Put aside the Hydra of a program that is an app of it: there is one in a process."""
    from hydra.core.global_hydra import GlobalHydra

    theirs, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = theirs


def _refuse_mistyped(schema: type[BaseModel], values: Sequence[tuple[str, object]]) -> None:
    """Refuse a value of another type than its setting's before Hydra is imported, which takes 0.2 s."""
    given = {key for key, _ in values}
    try:
        schema.model_validate(_nested(values))
    except ValidationError as error:
        wrong = [e for e in error.errors() if e["type"].endswith(("_type", "_parsing")) and place(e["loc"]) in given]
        if wrong:
            raise ConfigError("; ".join(explain(e, schema) for e in wrong)) from error


def parse_setting(text: str) -> tuple[str, object]:
    """Return the key and the value of `key=value`, whose value is read as Hydra reads it; as text if it is none of it.

    Raises:
        ConfigError: if it is not of that form.
    """
    key, equals, value = text.partition("=")
    if not equals:
        raise ConfigError(f"'{text}' is no setting: write key=value, such as steps=20")
    if key.endswith(".where"):  # a condition, which Hydra's grammar has not
        return key, value
    if _NUMBER.fullmatch(value):
        return key, int(value)
    if _WORD.fullmatch(value) and value.lower() not in _CONSTANTS:
        return key, value
    from hydra.core.override_parser.overrides_parser import OverridesParser  # for what is neither; it takes 0.1 s
    from hydra.errors import HydraException

    way_out = f"if it is text, write {shlex.quote(write_setting(key, value))}"
    try:
        parsed = OverridesParser.create().parse_override(f"value={value}")
    except HydraException as error:
        if not _GRAMMAR.search(value):
            return key, value
        raise ConfigError(f"{text}: {str(error).splitlines()[0]}; {way_out}") from error
    if parsed.is_sweep_override():
        raise ConfigError(f"{text} gives several values: a list is written [a,b]; {way_out}")
    return key, parsed.value()


def write_setting(key: str, text: str) -> str:
    """Return `key=value` as `parse_setting` reads it, with the value in quotes where it would not be this text."""
    is_text = not (_GRAMMAR.search(text) or _NUMBER.fullmatch(text) or text.lower() in (*_CONSTANTS, ""))
    if is_text and text == text.strip() and "\\" not in text:
        return f"{key}={text}"
    mark = '"' if "'" in text else "'"
    # a backslash means itself, but before a quote
    inner = re.sub(rf"(\\*)({mark}|$)", lambda m: m[1] * 2 + (f"\\{mark}" if m[2] else ""), text)
    return f"{key}={mark}{inner}{mark}"


def choices(group: str) -> list[str]:
    """Return the names of a config group's files; none if there is no such group."""
    folder = resources.files("agent_rl.configs") / group
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml")) if folder.is_dir() else []


def setting_names(schema: type[BaseModel]) -> list[str]:
    """Return the names of all settings of a config, those of sections in full."""
    return [key for key, _ in _keys(schema)]


def with_settings(config: M, settings: Mapping[str, object]) -> M:
    """Return a config with other values of settings, by their full names.

    Raises:
        ConfigError: naming every value that is wrong.
    """
    values = config.model_dump(mode="json", by_alias=True)
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place[section]
        place[last] = value
    return check_config(type(config), values)


def _leaves(key: str, value: object, known: Mapping[str, bool]) -> Iterator[tuple[str, object]]:
    """Yield the settings that a setting stands for, of sections the values in them.

    Raises:
        ConfigError: if there is no such key or preset.
    """
    if key in known and _presets(group := key.removesuffix(".name"), known):  # as `algorithm`: with all of its parts
        key = group
    if key.startswith(FREE):
        yield key.replace(".+", ".", 1), value  # a `+`, with which Hydra adds a key, is not needed
    elif isinstance(value, Mapping) and known.get(key):
        for inner, found in value.items():
            yield from _leaves(f"{key}.{inner}", found, known)
    elif names := _presets(key, known):
        if value not in names:
            raise ConfigError(f"no {key} '{value}'.{did_you_mean(str(value), names)} There are: {', '.join(names)}.")
        yield key, value
    elif key not in known:
        raise ConfigError(f"no setting '{key}'.{_hint(key, known)} --config lists them.")
    else:  # a section that has a name is chosen by it
        yield f"{key}.name" if known[key] and f"{key}.name" in known else key, value


def _nested(values: Sequence[tuple[str, object]]) -> dict[str, object]:
    """Return settings by their full names as a config: a dictionary of sections."""
    config: dict[str, object] = {}
    for key, value in values:
        *sections, last = key.split(".")
        place = config
        for section in sections:
            inner = place.setdefault(section, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"{key}={value!r}: '{section}' is {inner!r}, which has no settings")
            place = inner
        place[last] = value
    return config


def _hint(key: str, known: Mapping[str, bool]) -> str:
    """Return what a wrong key may have meant: `lr` is the last part of `optimizer.lr`."""
    if (ours := ELSEWHERE.get(key.rpartition(".")[2], "")) and (ours in known or choices(ours)):
        return f" Did you mean '{ours}'?"
    if choices(key):
        return f" It is of agent-rl train{' backend=verl' if key == 'hardware' else ''}."
    ends = sorted((name for name in known if name.endswith(f".{key}")), key=len)
    return f" Did you mean '{ends[0]}'?" if ends else did_you_mean(key, known)


def _presets(key: str, known: Mapping[str, bool]) -> list[str]:
    """Return the presets of a section; none for any other key."""
    return choices(key) if known.get(key, True) and not key.startswith(FREE) else []


def _keys(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield every settable key, and whether it is a section."""
    for attribute, field in schema.model_fields.items():
        key, section = prefix + (field.alias or attribute), section_of(field)
        yield key, section is not None
        if section is not None:
            yield from _keys(section, f"{key}.")
        for components in (m for m in field.metadata if hasattr(m, "settings")):  # components.ComponentRegistry
            yield from ((f"{key}.{knob}", False) for knob in components.settings())


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Return the class of a field that is a section, or may be one."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (UnionType, Union) else [field.annotation]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def check_config(schema: type[M], values: object) -> M:
    """Return values as a config.

    Raises:
        ConfigError: naming every key or value that is wrong.
    """
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(explain(e, schema) for e in relevant(error.errors()))) from error
