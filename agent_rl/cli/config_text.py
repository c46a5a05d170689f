"""Settings as text: a config as YAML with what each setting means, and the list of a command's help."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Container, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import cast

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from agent_rl.config import choices, section_of

SHORT = 12
"""The fields of a section whose settings a help text lists one by one."""


def write_config(config: BaseModel) -> str:
    """Return a config as YAML, every key below what its docstring says; a section that is null as comments, too."""
    return "\n".join(_written(config, ""))


def _written(config: BaseModel | type[BaseModel], indent: str) -> Iterator[str]:
    for name, about, section, value in _entries(config):
        for paragraph in about.split("\n\n"):
            about = " ".join(paragraph.split())
            yield from textwrap.wrap(about, 118, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
        if isinstance(section, BaseModel):
            yield f"{indent}{name}:"
            yield from _written(section, f"{indent}  ")
            continue
        yield f"{indent}{name}: {'...' if value is PydanticUndefined else json.dumps(value)}"
        if section is not None:
            yield from (f"{indent}# {line}" for line in (f"{name}:", *_written(section, "  ")))


def list_settings(config: BaseModel, without: Container[str] = ()) -> str:
    """Return a config's settings for a help text: each with its value and its docstring's first sentence.

    Larger sections, and those in sections, are one line each, with their keys.

    Args:
        config: the settings.
        without: keys that are given in another way, as by an argument of the command.
    """
    listed = (f"  {setting:32s} {about}" for key, setting, about in _listed(config) if key not in without)
    lines = (textwrap.wrap(line, 118, subsequent_indent=" " * 35, break_on_hyphens=False) for line in listed)
    return "\n".join(line for wrapped in lines for line in wrapped)


def _listed(config: BaseModel, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield the key of every setting, the setting and what it is about."""
    for name, about, section, value in _entries(config):
        key, about = prefix + name, re.split(r"(?<! al)\. ", " ".join(about.split()))[0].rstrip(".")
        is_set = isinstance(section, BaseModel)
        if presets := choices(name) if is_set else []:
            setting, about = f"{key}=NAME", f"{about}; one of {', '.join(presets)}; or {key}.KEY=VALUE"
        elif isinstance(section, BaseModel) and not prefix and len(type(section).model_fields) <= SHORT:
            yield from _listed(section, f"{key}.")
            continue
        elif is_set:
            setting = f"{key}.KEY=VALUE"
        else:
            setting = f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        if section is not None:
            about += f"; keys: {', '.join(name for name, *_ in _entries(section))}"
        yield key, setting, about


def _entries(
    config: BaseModel | type[BaseModel],
) -> Iterator[tuple[str, str, BaseModel | type[BaseModel] | None, object]]:
    """Yield the name of every setting, its docstring, its section or the class of one that is null, and its value.

    Values are in JSON; those of a class are its defaults.
    """
    schema, values = config if isinstance(config, type) else type(config), dict[str, object]()
    if isinstance(config, BaseModel):
        values = config.model_dump(mode="json", by_alias=True)
    docs = _docstrings(schema)
    for attribute, field in schema.model_fields.items():
        name, value = field.alias or attribute, getattr(config, attribute, field.default)
        section = value if isinstance(value, BaseModel) else section_of(field)
        about = docs.get(attribute) or (section and section.__doc__) or ""
        yield name, about, section, values.get(name, value)


@cache
def _docstrings(schema: type[BaseModel]) -> Mapping[str, str]:
    """Return the docstring of every field, read when it is asked for: pydantic would for every class, in 100 ms."""
    found: dict[str, str] = {}
    for cls in reversed([cls for cls in schema.__mro__ if issubclass(cls, BaseModel) and cls is not BaseModel]):
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        for field, text in pairwise(cast(ast.ClassDef, tree).body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(text.value.value))
    return found
