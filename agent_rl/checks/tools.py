"""Checks of tools: their schemas, and what arbitrary arguments and texts do to an episode."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from agent_rl.checks.bench import Bench
from agent_rl.checks.report import line_of, place
from agent_rl.core.episode import Episode, Outcome
from agent_rl.core.messages import JSON, Message, ToolCall, ToolErrorKind
from agent_rl.gym.env import Env, Script, ToolEnv
from agent_rl.gym.tool import ToolSpec
from agent_rl.gym.tool_messages import NO_FORM
from agent_rl.policy.baselines import draw_value
from agent_rl.policy.scripted import Scripted
from agent_rl.seeds import Stream, rng

TYPES = ("object", "array", "string", "integer", "number", "boolean", "null")
HUGE = "x" * 100_000
TEXTS = ("", HUGE, "żółć 日本 \U0001f600 \u202e\u0000", "\ud800", "'; DROP TABLE x; --", "{}", "-1", "1e999", "\n\n")
"""What a policy may say at any time; all can come from a tokenizer or a JSON decoder."""
ODD: tuple[JSON, ...] = (None, True, -1, 10**30, 0.5, float("inf"), *TEXTS, [], [[]], {}, {"a": [None]})
"""Values of any type, for arguments of any type."""
REPLIES = 16
"""Of one episode, so that slow tools stay within its time."""
FAILURES = 3
"""After so many failed episodes the rest is not tried."""


async def check_schemas(bench: Bench) -> None:
    """Find tools whose names or schemas no server would take."""
    for spec in await _tools(bench):
        problem = schema_problem(spec.parameters, spec.parameters)
        if not problem and spec.parameters.get("type") != "object":
            problem = f"its type is {spec.parameters.get('type')!r}, not 'object'"
        if problem:
            bench.find(
                "schema",
                f"the schema of tool '{spec.name}' is no valid JSON Schema: {problem}",
                _place(bench, spec.name),
                "let @ar.tool read it off the signature, or mend ToolSpec.parameters",
            )


async def _tools(bench: Bench) -> Sequence[ToolSpec]:
    """Return the tools of an instance that was reset."""
    found: list[Sequence[ToolSpec]] = []

    def look(env: Env, seed: int) -> Script:
        found.append(env.tools)
        yield ""

    await bench.play(bench.job(bench.tasks(bench.spec.tasks.splits[0])[0]), Scripted(look))
    return found[0] if found else ()


def schema_problem(schema: object, root: Mapping[str, JSON]) -> str:
    """Return what is wrong with a JSON schema's form; empty if nothing is."""
    if isinstance(schema, bool):
        return ""
    if not isinstance(schema, Mapping):
        return f"{schema!r} is no schema"
    try:
        json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"JSON can't hold it: {error}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if not isinstance(kinds, Sequence) or not all(kind in TYPES for kind in kinds):
        return f"type {schema['type']!r} is none of {', '.join(TYPES)}"
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        return f"properties is {properties!r}"
    if not isinstance(required, list | tuple) or not all(name in properties for name in required):
        return f"required names {required!r}, properties {list(properties)}"
    if isinstance(reference := schema.get("$ref"), str) and not _resolves(reference, root):
        return f"$ref {reference!r} leads nowhere"
    if "enum" in schema and not (isinstance(schema["enum"], list | tuple) and schema["enum"]):
        return f"enum is {schema['enum']!r}"
    return next(filter(None, (schema_problem(inner, root) for inner in _inner(schema))), "")


def _inner(schema: Mapping[str, JSON]) -> Iterator[object]:
    """Yield the schemas within a schema."""
    for key in ("properties", "$defs", "definitions"):
        members = schema.get(key, {})
        yield from members.values() if isinstance(members, Mapping) else ()
    for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
        options = schema.get(key, ())
        yield from options if isinstance(options, list | tuple) else ("no list",)
    yield from (schema[key] for key in ("items", "additionalProperties", "not") if key in schema)


def _resolves(reference: str, root: object) -> bool:
    for part in reference.removeprefix("#").strip("/").split("/"):
        if not isinstance(root, Mapping) or part not in root:
            return False
        root = root[part]
    return reference.startswith("#/")


async def check_fuzz(bench: Bench) -> None:
    """Find replies, calls with arbitrary arguments above all, that fail the episode, and results that can't be read."""
    tools = await _tools(bench)
    left = deque([*_calls(tools), *(Message("assistant", text) for text in TEXTS)])
    job = bench.job(bench.tasks(bench.spec.tasks.splits[0])[0], is_unlimited=True)
    failures = 0
    for played in chain.from_iterable(bench.played.values()):
        _find_unreadable(bench, played)

    def say(env: Env, seed: int) -> Script:
        for _ in range(min(REPLIES, len(left))):
            yield left.popleft()

    while left and failures < FAILURES:
        before = len(left)
        episode = await bench.play(job, Scripted(say))
        if episode is None:
            failures += 1
        else:
            _find_unreadable(bench, episode)
            if episode.outcome is Outcome.FAILED and episode.error and episode.error.where != "policy":
                failures += 1
                bench.blame(episode, "fuzz", check="fuzz" if episode.error.where == "step" else "")
        if len(left) == before:  # reset fails: another check names it
            return


def _find_unreadable(bench: Bench, episode: Episode) -> None:
    """Find results of tools that have no JSON form: the model reads an error in their place, each time."""
    for message in episode.messages:
        if message.tool_error is ToolErrorKind.EXCEPTION and NO_FORM in message.content:
            bench.find(
                "result",
                f"what tool '{message.name}' returns can't be read: {message.content.removeprefix('error: ')}",
                _place(bench, message.name or ""),
                "return text, numbers, or lists and mappings of them: str(value) where nothing else is",
            )


def _calls(tools: Sequence[ToolSpec]) -> Iterator[Message]:
    """Yield calls with arguments that are missing, of every type, too many, and unreadable."""
    drawn = rng(Stream.BASELINE, 0)
    for tool in tools:
        valid = draw_value(tool.parameters, ["1"], drawn)
        fitting = dict(valid) if isinstance(valid, Mapping) else {}
        properties = tool.parameters.get("properties", {})
        yield _call(tool.name)
        yield _call(tool.name, {**fitting, "surplus": 1})
        yield _call(tool.name, fitting, error="no JSON")
        for name in properties if isinstance(properties, Mapping) else ():
            yield from (_call(tool.name, {**fitting, name: value}) for value in ODD)
    yield _call("no_such_tool", {"a": 1})
    yield Message(
        "assistant", "", tool_calls=tuple(ToolCall(f"call_{i}", t.name) for i, t in enumerate((*tools, *tools)))
    )


def _call(tool: str, arguments: Mapping[str, JSON] | None = None, error: str | None = None) -> Message:
    return Message("assistant", tool_calls=(ToolCall("call_0", tool, arguments or {}, error),))


def _place(bench: Bench, tool: str) -> str:
    if issubclass(bench.cls, ToolEnv) and tool in bench.cls._tools:
        return f"{bench.cls.__name__}.{tool}{line_of(bench.cls._tools[tool])}"
    return place(bench.cls, "tools")
