"""The kinds of rules, and how each decides.

    exact        the text equals a value, or one of a list
    contains     the text contains a value, or one of a list
    regex        a pattern is found in the text
    invented     something that a pattern finds in the text, such as a source, is in no result of a tool, as whole words
    number       the last number of the text is a value, give or take `tolerance` or the share `relative` of it
    json_schema  the text is JSON that fits a schema
    python       an expression over `answer`, `task` and `messages`, evaluated in a sandbox

In a rubric file a rule is `{contains: Paris}`, with options beside it: `{contains: Paris, ignore_case: true}`. Each
takes `negate`. A value `{task: KEY}` is looked up in the episode's task.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.judge.rubric import Rule

REGEX_SECONDS = 2.0
"""Processor time of the process for one pattern, so that none holds up a run."""
_NUMBER = re.compile(r"(?<![\w.])[-+\u2212]?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")


class UndecidedError(Exception):
    """A rule can't be applied; the text says why."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What a kind of rule takes, and how it decides: `apply` returns whether it is met, and a quotation."""

    options: Mapping[str, type]
    check: Callable[[JSON], None]
    """Raises ValueError for a value that means nothing."""
    apply: Callable[[str, JSON, Mapping[str, JSON]], tuple[bool, str]]


def check_rule(rule: Rule) -> None:
    """Raise for a rule that could never be applied.

    Raises:
        ConfigError: naming the kind, option or value that is wrong.
    """
    kind = KINDS.get(rule.kind)
    if kind is None:
        raise ConfigError(f"no rule '{rule.kind}'.{did_you_mean(rule.kind, KINDS)} There are: {', '.join(KINDS)}")
    options = {"negate": bool, **kind.options}
    for name, option in rule.options.items():
        if name not in options:
            hint = did_you_mean(name, options)
            raise ConfigError(f"rule '{rule.kind}' has no option '{name}'.{hint} It has: {', '.join(options)}")
        accepted = (int, float) if options[name] is float else options[name]
        if not isinstance(option, accepted) or (options[name] is float and isinstance(option, bool)):
            raise ConfigError(f"rule '{rule.kind}': {name}={option!r} is no {options[name].__name__}")
        if options[name] is float and not 0 <= cast(float, option) < math.inf:
            raise ConfigError(f"rule '{rule.kind}': {name}={option!r} allows nothing: give a number from 0 on")
    if task_reference(rule.value) is None:
        try:
            kind.check(rule.value)
        except ValueError as error:
            raise ConfigError(f"rule '{rule.kind}': {error}") from error


def describe_rule(rule: Rule) -> str:
    """Return a rule in words: the text of a criterion that has none."""
    key = task_reference(rule.value)
    value = f"the task's {key}" if key is not None else json.dumps(rule.value, ensure_ascii=False)
    return f"{'not ' if rule.options.get('negate') else ''}{rule.kind} {value}"


def task_reference(value: JSON) -> str | None:
    """Return KEY of `{"task": KEY}`, which stands for that value of the episode's task; None for any other value."""
    if isinstance(value, Mapping) and len(value) == 1 and isinstance(key := value.get("task"), str):
        return key
    return None


# --- what they take, and how they decide ---


def _texts(value: JSON) -> list[str]:
    """Return what a value, or each of a list, is as text.

    Raises:
        ValueError: if there is none, or it is neither text nor a number.
    """
    found = list(value) if isinstance(value, list | tuple) else [value]
    for each in found:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise ValueError(f"{each!r:.100} is no text: put it in quotes")
        if not str(each).strip():
            raise ValueError("an empty text says nothing: give one, or {task: KEY}")
    if not found:
        raise ValueError("the list is empty: give a text, or {task: KEY}")
    return [str(each) for each in found]


def _check_texts(value: JSON) -> None:
    _texts(value)


def _folded(text: str, options: Mapping[str, JSON]) -> str:
    return text.casefold() if options.get("ignore_case") else text


def _exact(text: str, value: JSON, options: Mapping[str, JSON]) -> tuple[bool, str]:
    said = _folded(text.strip(), options)
    return any(said == _folded(each.strip(), options) for each in _texts(value)), text.strip()


def _contains(text: str, value: JSON, options: Mapping[str, JSON]) -> tuple[bool, str]:
    said = _folded(text, options)
    found = next((each for each in _texts(value) if _folded(each, options) in said), None)
    return found is not None, found or ""


def _check_pattern(value: JSON) -> None:
    import regex

    if not isinstance(value, str):
        raise ValueError(f"{value!r:.100} is no pattern: put it in quotes")
    try:
        regex.compile(value)
    except regex.error as error:
        raise ValueError(f"{value!r:.200} is no pattern: {error}") from error


def _matches(text: str, value: JSON, options: Mapping[str, JSON]) -> Iterator[str]:
    import regex  # for its time limit: Python's own can't be stopped, and holds up every thread

    flags = regex.IGNORECASE if options.get("ignore_case") else 0
    try:
        yield from (found[0] for found in regex.finditer(str(value), text, flags, timeout=REGEX_SECONDS))
    except TimeoutError:
        raise UndecidedError(f"took more than {REGEX_SECONDS:g} s: nested repetitions take very long") from None


def _regex(text: str, value: JSON, options: Mapping[str, JSON]) -> tuple[bool, str]:
    found = next(_matches(text, value, options), None)
    return found is not None, found or ""


def _invented(text: str, value: JSON, options: Mapping[str, JSON]) -> tuple[bool, str]:
    results = str(options["results"])
    found = next((each for each in _matches(text, value, options) if not _holds(results, each)), None)
    return found is not None, found or ""


def _holds(text: str, words: str) -> bool:
    """Return whether a text has these words, and not only as a part of longer ones: 12 does not hold 1."""
    begin, end = (r"\b" if re.match(r"\w", side) else "" for side in (words[:1], words[-1:]))
    return re.search(f"{begin}{re.escape(words)}{end}", text) is not None


def _number_of(value: JSON) -> float:
    try:
        number = float(value.replace(",", "")) if isinstance(value, str) else float(cast(float, value))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{value!r:.100} is no number")
    return number


def _check_number(value: JSON) -> None:
    _number_of(value)


def _number(text: str, value: JSON, options: Mapping[str, JSON]) -> tuple[bool, str]:
    wanted = _number_of(value)
    last = next(iter(reversed(_NUMBER.findall(text))), "")
    absolute, relative = (float(cast(float, options.get(name, 0.0))) for name in ("tolerance", "relative"))
    found = float(last.replace(",", "").replace("\u2212", "-")) if last else math.nan
    allowed = max(absolute, relative * abs(wanted))
    return abs(found - wanted) <= allowed + 1e-12 * max(abs(wanted), absolute), last


def _check_schema(value: JSON) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{value!r:.100} is no JSON schema: give an object")
    _fits(None, value)


def _json_schema(text: str, value: JSON, options: Mapping[str, JSON]) -> tuple[bool, str]:
    try:
        said = cast(JSON, json.loads(text))
    except (ValueError, RecursionError):
        return False, ""
    try:
        return _fits(said, cast(Mapping[str, JSON], value)), text
    except RecursionError:  # by the depth of what was said
        return False, ""


def _fits(value: JSON, schema: Mapping[str, JSON]) -> bool:
    """Return whether a value fits a schema; patterns in it have the time limit of `regex`, and it can't name URLs."""
    try:
        from jsonschema import validators
        from jsonschema.exceptions import SchemaError, ValidationError
        from referencing import Registry
        from referencing.exceptions import Unresolvable
    except ImportError as error:
        raise ValueError("rules of the kind json_schema need jsonschema: pip install 'agent-rl[judge]'") from error

    def pattern(_: object, wanted: str, said: object, __: object) -> Iterator[ValidationError]:
        if isinstance(said, str) and not _regex(said, wanted, {})[0]:
            yield ValidationError(f"{said!r:.100} does not match {wanted!r}")

    kind = validators.validator_for(schema, validators.Draft202012Validator)
    try:
        kind.check_schema(schema)
        if '"patternProperties"' in json.dumps(schema):
            raise ValueError("patternProperties has no time limit here: use propertyNames with a pattern")
        return bool(validators.extend(kind, {"pattern": pattern})(schema, registry=Registry()).is_valid(value))
    except (SchemaError, Unresolvable) as error:
        raise ValueError(f"no JSON schema: {getattr(error, 'message', error)}") from error


def _check_expression(value: JSON) -> None:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.100} is no expression: put it in quotes")
    try:
        ast.parse(value.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{value!r:.200} is no expression: {error.msg}") from error


def _in_a_sandbox(text: str, value: JSON, options: Mapping[str, JSON]) -> tuple[bool, str]:
    raise UndecidedError("evaluated in a sandbox")


_CASE: Mapping[str, type] = {"ignore_case": bool}
KINDS: Mapping[str, Kind] = {
    "exact": Kind(_CASE, _check_texts, _exact),
    "contains": Kind(_CASE, _check_texts, _contains),
    "regex": Kind(_CASE, _check_pattern, _regex),
    "invented": Kind(_CASE, _check_pattern, _invented),
    "number": Kind({"tolerance": float, "relative": float}, _check_number, _number),
    "json_schema": Kind({}, _check_schema, _json_schema),
    "python": Kind({}, _check_expression, _in_a_sandbox),
}
