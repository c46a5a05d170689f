"""agent_rl.gym.tool_schema, through @tool: schemas of signatures, and the conversion of arguments."""

import asyncio
import threading
from collections.abc import Callable
from typing import Literal

import pytest
from pydantic import BaseModel

from agent_rl.core.messages import Message, ToolCall, ToolErrorKind
from agent_rl.errors import DefinitionError
from agent_rl.gym.tool import Tool, tool
from agent_rl.gym.tool_calls import call_tools
from tests.doubles import Color, Point


def call(called: Tool, **arguments: object) -> Message:
    tools = {called.spec.name: called}
    (message,) = asyncio.run(call_tools(tools, [ToolCall("c0", called.spec.name, arguments)], None))
    return message


def typed(annotation: object, default: object = ...) -> Tool:
    """Return a tool with one parameter of that type; it answers with its argument's `repr`."""

    def probe(value):
        return repr(value)

    probe.__annotations__["value"] = annotation
    probe.__defaults__ = None if default is ... else (default,)
    return tool(inline=True)(probe)


def test_tool_spec_combines_docstring_and_signature():
    @tool
    def price(item: str, currency: Literal["eur", "usd"] = "eur") -> float:
        """Look up
        an item's price.

        Not for the model.

        Args:
            item: the item's name,
                e.g. "red chair": with its color
            currency (str): what to count in

        Returns:
            nothing: to see here
        """
        return 1.0

    assert price.spec.openai() == {
        "type": "function",
        "function": {
            "name": "price",
            "description": "Look up an item's price.",
            "parameters": {
                "type": "object",
                "properties": {
                    "item": {"type": "string", "description": 'the item\'s name, e.g. "red chair": with its color'},
                    "currency": {
                        "type": "string",
                        "enum": ["eur", "usd"],
                        "default": "eur",
                        "description": "what to count in",
                    },
                },
                "required": ["item"],
                "additionalProperties": False,
            },
        },
    }


@pytest.mark.parametrize(
    ("annotation", "schema", "given", "got"),
    [
        (str, {"type": "string"}, "x", "x"),
        (int, {"type": "integer"}, "3", 3),
        (float, {"type": "number"}, 3, 3.0),
        (bool, {"type": "boolean"}, "true", True),
        (list[int], {"type": "array", "items": {"type": "integer"}}, ["1", 2], [1, 2]),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}, {"a": "1"}, {"a": 1}),
        (int | None, {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None, None),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}, "a", "a"),
        (Color, {"$ref": "#/$defs/Color"}, "red", Color.RED),
        (Point, {"$ref": "#/$defs/Point"}, {"x": "1"}, Point(x=1)),
    ],
    ids=str,
)
def test_tool_schema_covers_types_and_converts(annotation, schema, given, got):
    probe = typed(annotation)
    assert probe.spec.parameters["properties"] == {"value": schema}
    assert call(probe, value=given).content == repr(got)


def test_tool_schema_drops_titles_but_keeps_properties():
    class Book(BaseModel):
        title: str

    parameters = typed(list[Book]).spec.parameters
    assert parameters["$defs"] == {
        "Book": {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
    }
    assert "title" not in parameters


def test_tool_schema_without_parameters_is_an_object():
    @tool
    def now() -> str:
        """Tell the time."""
        return ""

    assert now.spec.parameters == {"type": "object", "properties": {}, "additionalProperties": False}


def test_tool_takes_parameter_names_of_pydantic():
    @tool(inline=True)
    def probe(json: str, model_config: int, copy: bool, schema: int = 4) -> list[object]:
        return [json, model_config, copy, schema]

    assert call(probe, json="x", model_config=1, copy=True).content == '["x",1,true,4]'
    assert call(probe, arg_json="x", model_config=1, copy=True).tool_error is ToolErrorKind.BAD_ARGUMENTS


def test_tool_copies_mutable_defaults():
    @tool(inline=True)
    def collect(item: int, into: list[int] = []) -> list[int]:  # noqa: B006
        into.append(item)
        return into

    assert [call(collect, item=i).content for i in (1, 2)] == ["[1]", "[2]"]


def no_type(item) -> str: ...
def star_args(*items: str) -> str: ...
def star_kwargs(**items: str) -> str: ...
def positional(item: str, /) -> str: ...
def unknown_type(item: "Nowhere") -> str: ...  # noqa: F821
def no_schema(item: threading.Lock) -> str: ...  # type: ignore[valid-type]
def no_json(item: Callable[[], int]) -> str: ...


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (no_type, "'item' has no type"),
        (star_args, r"'\*items: str'"),
        (star_kwargs, r"'\*\*items: str'"),
        (positional, "'item: str'"),
        (unknown_type, "Nowhere"),
        (no_schema, "no_schema"),
        (no_json, "no_json"),
    ],
)
def test_tool_refuses_signatures_without_a_schema(function, names):
    with pytest.raises(DefinitionError, match=names):
        tool(function)


def test_tool_refuses_documentation_of_unknown_parameters():
    def price(item: str) -> float:
        """Look up a price.

        Args:
            itm: the item
        """
        return 1.0

    with pytest.raises(DefinitionError, match=r"'itm', which is not a parameter. Did you mean 'item'\?"):
        tool(price)
