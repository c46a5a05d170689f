"""Choices: the named functions that one part of an algorithm can be, and the config field that picks one.

A choice's knobs are the keyword-only parameters of its function: their types, bounds and defaults stand there and
nowhere else. In a config a choice is `name`, or `{name: ..., knob: value}`; a knob that the function lacks is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Annotated, Generic, ParamSpec, TypeVar, get_type_hints

from pydantic import BaseModel, Field, JsonValue, ValidationError, create_model
from pydantic_core import PydanticCustomError

from agent_rl.config import Section
from agent_rl.errors import did_you_mean

P = ParamSpec("P")
R = TypeVar("R")

Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Component(Generic[R]):
    """One function that a part can be."""

    function: Callable[..., R]
    formula: str
    """In one line, in terms of the knobs."""
    source: str
    """The paper and equation, or whose variant it is."""

    @cached_property
    def knobs(self) -> type[BaseModel]:
        """The function's keyword-only parameters, as a schema."""
        hints = get_type_hints(self.function, include_extras=True)
        fields = {
            name: (hints[name], ... if p.default is p.empty else p.default)
            for name, p in inspect.signature(self.function).parameters.items()
            if p.kind is p.KEYWORD_ONLY
        }
        schema: type[BaseModel] = create_model(self.function.__name__, __base__=Section, **fields)  # type: ignore[call-overload]
        return schema


ComponentConfig = dict[str, JsonValue]
"""`{"name": ..., knob: value}`, with every knob's value filled in."""


@dataclass(frozen=True)
class ComponentRegistry(Generic[R]):
    """The functions that one part can be, by name; as an annotation it makes a config field that picks one."""

    part: str
    by_name: Mapping[str, Component[R]]

    def check(self, value: object) -> ComponentConfig:
        """Return a choice with its defaults filled in; for pydantic.

        Raises:
            PydanticCustomError: if there is no such choice, or it has no such knob.
        """
        given = {"name": value} if isinstance(value, str) else dict(value) if isinstance(value, Mapping) else {}
        name = given.pop("name", None)
        if not isinstance(name, str) or name not in self.by_name:
            hint = did_you_mean(str(name), self.by_name) if name else " It needs a name."
            raise _problem(f"no {self.part} '{name}'.{hint} There are: {', '.join(self.by_name)}")
        knobs = self.by_name[name].knobs
        for key in given:
            if key not in knobs.model_fields:
                known = ", ".join(knobs.model_fields) or "none"
                raise _problem(f"'{name}' has no knob '{key}'.{did_you_mean(key, knobs.model_fields)} It has: {known}")
        try:
            return {"name": name, **knobs.model_validate(given).model_dump()}
        except ValidationError as error:
            first = error.errors()[0]
            raise _problem(f"'{name}': {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error

    def bind(self, chosen: ComponentConfig) -> Callable[..., R]:
        """Return the chosen function with its knobs set."""
        knobs = {key: value for key, value in chosen.items() if key != "name"}
        return partial(self.by_name[str(chosen["name"])].function, **knobs)

    def __getitem__(self, chosen: ComponentConfig) -> Component[R]:
        return self.by_name[str(chosen["name"])]

    def settings(self) -> set[str]:
        """Return every key that some choice takes."""
        return {"name"}.union(*(c.knobs.model_fields for c in self.by_name.values()))


def _problem(message: str) -> PydanticCustomError:
    return PydanticCustomError("choice", "{text}", {"text": message})
