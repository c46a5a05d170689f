"""From a function's signature and Google-style docstring to the JSON schema of its arguments."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails, PydanticUndefined

from agent_rl.core.messages import JSON
from agent_rl.errors import DefinitionError, did_you_mean

_ARGS = re.compile(r"^Arg(?:ument)?s:[ \t]*\n((?:[ \t]+\S.*\n?|[ \t]*\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"(\w+)\s*(?:\([^)]*\))?:(.*)")


def arguments_model(name: str, function: Callable[..., object], parameters: list[inspect.Parameter]) -> type[BaseModel]:
    """Return a pydantic model whose fields, by alias and in order, are `parameters` of `function`.

    Raises:
        DefinitionError: if one can't be passed by name or has no usable type, or the docstring describes another.
    """
    described = parse_docstring(function.__doc__)[1]
    known = [p.name for p in parameters]
    for documented in described:
        if documented not in known:
            hint = did_you_mean(documented, known)
            raise DefinitionError(f"tool '{name}' documents '{documented}', which is not a parameter.{hint}")
    fields: dict[str, Any] = {}
    for p in parameters:
        if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
            raise DefinitionError(
                f"tool '{name}': parameter '{p}' can't be passed by name, and models only call by name"
            )
        description: dict[str, Any] = {"description": described[p.name]} if p.name in described else {}
        kind, default = _resolve(name, function, p), ... if p.default is p.empty else p.default
        if isinstance(default, FieldInfo):  # `x: int = Field(3, ge=0)` is `x: Annotated[int, Field(ge=0)] = 3`
            kind, default = Annotated[kind, default], default.get_default(call_default_factory=True, validated_data={})
            default = ... if default is PydanticUndefined else default
        # only the alias is ever seen; a field called "json" or "model_config" would shadow BaseModel's own
        fields[f"arg_{p.name}"] = (kind, Field(default, alias=p.name, **description))
    try:
        return create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
    except Exception as error:  # pydantic has a dozen kinds for types it can't read
        raise DefinitionError(f"tool '{name}': pydantic can't read its signature: {error}") from error


def json_schema(model: type[BaseModel]) -> Mapping[str, JSON]:
    """Return the model's JSON schema, without titles.

    Raises:
        DefinitionError: if one of the types has none.
    """
    try:
        schema = cast(JSON, model.model_json_schema())
    except Exception as error:
        raise DefinitionError(f"tool '{model.__name__}': a type has no JSON schema: {error}") from error
    short = dict(cast(Mapping[str, JSON], _without_titles(schema)))
    short.setdefault("properties", {})  # pydantic leaves it out for no arguments; some servers insist on it
    return short


def check_arguments(name: str, schema: Mapping[str, JSON], arguments: Mapping[str, JSON]) -> Mapping[str, JSON]:
    """Return the arguments as they are, checked for missing and unknown names: a foreign tool checks their values.

    Raises:
        pydantic.ValidationError: if one that the schema requires is missing, or one is not in a schema that is closed.
    """
    known, required = (cast("Mapping[str, JSON]", schema.get(key) or {}) for key in ("properties", "required"))
    unknown = [key for key in arguments if key not in known] if schema.get("additionalProperties") is False else []
    wrong = [InitErrorDetails(type="missing", loc=(key,), input=arguments) for key in required if key not in arguments]
    wrong += [InitErrorDetails(type="extra_forbidden", loc=(key,), input=arguments[key]) for key in unknown]
    if wrong:
        raise ValidationError.from_exception_data(name, wrong)
    return arguments


def parse_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """Return a docstring's first paragraph, and the descriptions in its `Args:` section by parameter."""
    clean = inspect.cleandoc(text or "") + "\n"
    section = _ARGS.search(clean)
    preamble = clean[: section.start()] if section else clean
    lines = [line for line in section[1].splitlines() if line.strip()] if section else []
    described: dict[str, str] = {}
    current = ""
    for line in lines:
        # deeper-indented lines continue the previous entry
        entry = _ENTRY.fullmatch(line.strip()) if _indent(line) == _indent(lines[0]) else None
        if entry:
            current, line = entry[1], entry[2]
        if current:
            described[current] = f"{described.get(current, '')} {line.strip()}".strip()
    return " ".join(preamble.split("\n\n", 1)[0].split()), described


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _resolve(name: str, function: Callable[..., object], parameter: inspect.Parameter) -> object:
    """Return a parameter's type, which `from __future__ import annotations` leaves as a string."""
    if parameter.annotation is parameter.empty:
        raise DefinitionError(
            f"tool '{name}': parameter '{parameter.name}' has no type; annotate it, as in `{parameter.name}: str`"
        )
    bearer = types.SimpleNamespace(__annotations__={"it": parameter.annotation})
    scope: dict[str, Any] = getattr(inspect.unwrap(function), "__globals__", {})
    try:
        return typing.get_type_hints(bearer, globalns=scope, include_extras=True)["it"]
    except NameError as error:
        raise DefinitionError(
            f"tool '{name}': the type of parameter '{parameter.name}', {parameter.annotation!r}, can't be found "
            f"({error}); define or import it at module level, above the tool and outside `if TYPE_CHECKING`"
        ) from error


def _without_titles(schema: JSON) -> JSON:
    """Drop the titles that pydantic makes of names: each costs the model's context and says nothing new."""
    if isinstance(schema, Mapping):
        # a *property* called "title" differs by its value, a schema and not a string
        return {k: _without_titles(v) for k, v in schema.items() if not (k == "title" and isinstance(v, str))}
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    return schema
