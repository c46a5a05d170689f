"""The arguments of an environment's class, `env_args`: their names and types checked, their values converted."""

from __future__ import annotations

import functools
import inspect
import shlex
import typing
from collections.abc import Callable, Mapping
from types import SimpleNamespace

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from agent_rl.config_mistakes import explain, relevant
from agent_rl.errors import ConfigError, did_you_mean

_CACHED = 256
"""Classes whose signature is kept; a notebook makes new ones."""


def check_names(id: str, cls: Callable[..., object], given: Mapping[str, object]) -> None:
    """Check that a class takes arguments of these names, and lacks none.

    Raises:
        ConfigError: if it does not.
    """
    signature = inspect.signature(cls)
    try:
        signature.bind(**given)
    except TypeError as error:
        raise ConfigError(f"{id}: {_explain_names(signature, given, error)}") from None


def convert(id: str, cls: Callable[..., object], given: Mapping[str, object]) -> dict[str, object]:
    """Return arguments as the types of a class's or function's signature say, each a copy: episodes share no list.

    A value that equals the default is taken, whatever the type. One without a type, or of a type that pydantic can't
    read, is left as it is.

    Raises:
        ConfigError: if one is of another type.
    """
    typed = _typed(cls) if given else {}
    converted, problems = {}, []
    for name, value in given.items():
        default, model = typed.get(name, (None, None))
        if model is None or (type(value) is type(default) and value == default):
            converted[name] = _own(value)
            continue
        try:
            converted[name] = taken = vars(model.model_validate({_key(name): _own(value)}))["value"]
            if isinstance(value, str | bool) and type(taken) in (int, float):  # which pydantic takes, but is a slip
                problems.append(f"{_key(name)}={value!r}: input should be a number")
        except ValidationError as error:
            for found in relevant(error.errors()):
                as_text = shlex.quote(f'{_key(name)}="{found["input"]}"')
                is_number = found["type"] == "string_type" and isinstance(found["input"], int | float)
                way_out = f"; if it is text, write {as_text}" if is_number and len(found["loc"]) == 1 else ""
                problems.append(explain(found, model) + way_out)
    if problems:
        raise ConfigError(f"{id}: {'; '.join(problems)}")
    return converted


def _key(name: str) -> str:
    return f"env_args.{name}"


def _own(value: object) -> object:
    """Copy the dicts and lists of a value, so that an episode that changes them changes no other's."""
    if isinstance(value, dict):
        return {key: _own(item) for key, item in value.items()}
    return [_own(item) for item in value] if isinstance(value, list) else value


@functools.lru_cache(maxsize=_CACHED)
def _typed(cls: Callable[..., object]) -> dict[str, tuple[object, type[BaseModel]]]:
    """Return the default and a model for each parameter whose type is known, by name."""
    found: dict[str, tuple[object, type[BaseModel]]] = {}
    made_by = getattr(cls, "__init__", cls) if isinstance(cls, type) else cls
    scope = getattr(inspect.unwrap(made_by), "__globals__", {})
    for parameter in inspect.signature(cls).parameters.values():
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if is_open or parameter.annotation is parameter.empty:
            continue
        bearer = SimpleNamespace(__annotations__={"it": parameter.annotation})
        try:
            kind = typing.get_type_hints(bearer, globalns=scope, include_extras=True)["it"]
            field = (kind, Field(alias=_key(parameter.name)))
            model = create_model("Argument", __config__=ConfigDict(extra="forbid"), value=field)
        except Exception:  # a type that is not there at run time, or of a dozen kinds that pydantic can't read
            continue
        found[parameter.name] = parameter.default, model
    return found


def _explain_names(signature: inspect.Signature, given: Mapping[str, object], error: TypeError) -> str:
    known = [p.name for p in signature.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    takes = f"It takes: {', '.join(known)}." if known else "It takes none."
    unknown = [name for name in given if name not in known]
    if unknown:
        return f"no argument '{unknown[0]}'.{did_you_mean(unknown[0], known)} {takes}"
    return f"{error}. {takes}"
