"""The language of `--where`: conditions on stored episodes, parsed to a tree and compiled to SQL; nothing is executed.

    expression  = either { "or" either }           either = term { "and" term }
    term        = "not" term | "(" expression ")" | condition
    condition   = FIELD SIGN VALUE | FIELD ["not"] "in" "(" VALUE { "," VALUE } ")"
    SIGN        = "=" | "==" | "!=" | "<" | "<=" | ">" | ">="

FIELD is one of NUMBERS, FLAGS and TEXTS, or `task.KEY` (a scalar of the task), or `rewards.NAME` (a component). VALUE
is a word or a text in quotes; `*` in a text's value means any characters; the word `none` means no value. `!=` is the
opposite of `=`, and an order holds for no episode without a value. A scalar of a task equals a value that is the same
text, the same number, or `yes` or `true` where it is true.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias, get_args

from agent_rl.core.ending import Ending
from agent_rl.core.episode import Outcome, Purpose, StopReason
from agent_rl.errors import ConfigError, did_you_mean

NUMBERS: Final = (
    *("reward", "turns", "calls", "errors", "tokens", "sampled", "seconds"),
    *("step", "sample", "version", "seed"),
)
FLAGS: Final = ("success", "greedy")
"""Are yes or no; success may be none."""
TEXTS: Final = ("id", "group", "env", "split", "purpose", "outcome", "stop", "ending", "error", "parent", "question")
FIELDS: Final = (*NUMBERS, *FLAGS, *TEXTS)
INNER: Final = ("task", "rewards")
"""What has fields of its own: `task.KEY` and `rewards.NAME`."""
_VALUES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{"purpose": get_args(Purpose), "outcome": tuple(Outcome), "stop": tuple(StopReason)},
        **{"ending": tuple(Ending), "success": ("yes", "no", "none"), "greedy": ("yes", "no")},
    }
)
_BOOLEANS: Mapping[str, bool] = MappingProxyType({"yes": True, "true": True, "no": False, "false": False})
_TOKEN = re.compile(
    r"""\s*(?:(?P<sign><=|>=|!=|==?|<|>)|(?P<mark>[(),])|(?P<quoted>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')"""
    r"""|(?P<word>[^\s()<>=!,"']+)|(?P<end>\Z)|(?P<odd>.))""",
    re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d{1,19}", re.ASCII)
_MOST, _DEEPEST = 500, 100
"""Conditions in one expression, and parentheses in each other: what SQLite takes."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A field beside one value, or with `=` beside several of which one must fit; None is no value."""

    field: str
    sign: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """The opposite."""

    part: Node


@dataclass(frozen=True, slots=True)
class Every:
    """All of them hold; so do none."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    """At least one of them holds."""

    parts: tuple[Node, ...]


Node: TypeAlias = Comparison | Not | Every | Either
SQL: TypeAlias = tuple[str, tuple[object, ...]]
"""An expression that is 0 or 1, never NULL, and its parameters."""


def parse_where(texts: Sequence[str]) -> Node:
    """Return the tree of expressions that all have to hold.

    Raises:
        ConfigError: if one has no meaning; the message says where, and what has.
    """
    return Every(tuple(_Parser(text).parse() for text in texts))


def fields_of(node: Node) -> frozenset[str]:
    """Return the fields that a tree asks about."""
    if isinstance(node, Comparison):
        return frozenset({node.field})
    parts = (node.part,) if isinstance(node, Not) else node.parts
    return frozenset().union(*map(fields_of, parts))


def sql_of(node: Node) -> SQL:
    """Return a tree as SQL over columns that are called as the fields, with JSON in `task` and `rewards`."""
    if isinstance(node, Comparison):
        return _comparison(node)
    if isinstance(node, Not):
        inner, given = sql_of(node.part)
        return f"NOT {inner}", given
    word, empty = (" AND ", "1") if isinstance(node, Every) else (" OR ", "0")
    return _joined([sql_of(part) for part in node.parts], word, empty)


def sort_key(field: str) -> SQL:
    """Return what to sort by.

    Raises:
        ConfigError: if there is no such field.
    """
    return _value(checked_field(field, f"--sort {field}"))


def quoted(text: str) -> str:
    """Return a text as a value that means it; `*` in it keeps its meaning."""
    return '"{}"'.format(re.sub(r'["\\]', r"\\\g<0>", text))


def checked_field(name: str, said: str) -> str:
    """Return a field's name.

    Raises:
        ConfigError: if there is no such field; the message begins with what was said.
    """
    outer, dot, inner = name.partition(".")
    if name in FIELDS or (outer in INNER and inner and not re.search(r'["\\]', inner)):
        return name
    if dot and outer in INNER:
        raise ConfigError(f'{said}: {name!r}: write {_INNER_FORM[outer]}, or {outer}."KEY"; a key may hold no quotes')
    there = ", ".join((*FIELDS, *_INNER_FORM.values()))
    raise ConfigError(f"{said}: no such field.{did_you_mean(name, FIELDS)} There are: {there}.")


_INNER_FORM = {"task": "task.KEY", "rewards": "rewards.NAME"}


class _Token(NamedTuple):
    kind: str
    text: str
    start: int
    stop: int


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.comparisons = 0
        self.tokens = []
        for found in _TOKEN.finditer(text):
            kind = str(found.lastgroup)
            token = _Token(kind, found[kind], found.start(kind), found.end(kind))
            if kind == "odd":
                what = "a quote is not closed" if token.text in "\"'" else f"{token.text} has no meaning"
                raise self.error(token, f"{what}; a value with such characters goes in quotes")
            self.tokens.append(token)
            if kind == "end":
                break

    def parse(self) -> Node:
        node = self.expression(0)
        if self.next.kind != "end":
            hint = did_you_mean(self.next.text, ("and", "or")) or " A value with spaces goes in quotes."
            raise self.error(self.next, f"here goes and, or, or nothing more.{hint}")
        return node

    @property
    def next(self) -> _Token:
        return self.tokens[self.at]

    def take(self, *texts: str) -> bool:
        """Step over the next token if it is one of these, unquoted."""
        if found := self.next.text in texts and self.next.kind != "quoted":
            self.at += 1
        return found

    def error(self, token: _Token, message: str) -> ConfigError:
        place = f"{token.text!r} at character {token.start + 1}" if token.text else "the end"
        return ConfigError(f"--where {self.text!r}, {place}: {message}")

    def expression(self, depth: int) -> Node:
        return self.chain("or", Either, lambda: self.chain("and", Every, lambda: self.term(depth)))

    def chain(self, word: str, made: Callable[[tuple[Node, ...]], Node], part: Callable[[], Node]) -> Node:
        parts = [part()]
        while self.take(word):
            parts.append(part())
        return made(tuple(parts)) if len(parts) > 1 else parts[0]

    def term(self, depth: int) -> Node:
        if depth > _DEEPEST or self.comparisons >= _MOST:
            raise self.error(
                self.next, f"more than {_MOST} conditions, or {_DEEPEST} in each other; `in (a, b)` is one"
            )
        if self.take("not"):
            return Not(self.term(depth + 1))
        if self.take("("):
            inner = self.expression(depth + 1)
            self.expect(")")
            return inner
        return self.condition()

    def condition(self) -> Node:
        first = self.next
        if first.kind != "word":
            raise self.error(first, "here goes a condition, such as reward<0.5 or stop=turns")
        self.at += 1
        name = first.text
        if name in ("task.", "rewards.") and self.next.kind == "quoted" and self.next.start == first.stop:
            name += _unquoted(self.next.text)
            self.at += 1
        self.comparisons += 1
        sign = self.next
        is_list = sign.text in ("in", "not") and sign.kind == "word"
        if not is_list and sign.kind != "sign":
            raise self.error(first, "is no condition: write FIELD<VALUE in quotes, such as 'reward<0.5'")
        checked_field(name, f"--where {self.text!r}, {name!r} at character {first.start + 1}")
        self.at += 1
        if is_list:
            return self.members(name, is_not=sign.text == "not")
        value = self.value(name, sign.text)
        found = Comparison(name, "=" if sign.text in ("==", "!=") else sign.text, (value,))
        return Not(found) if sign.text == "!=" else found

    def members(self, name: str, *, is_not: bool) -> Node:
        if is_not:
            self.expect("in")
        self.expect("(")
        values = [self.value(name, "=")]
        while self.take(","):
            values.append(self.value(name, "="))
        self.expect(")")
        found = Comparison(name, "=", tuple(values))
        return Not(found) if is_not else found

    def expect(self, text: str) -> None:
        if not self.take(text):
            raise self.error(self.next, f"here goes {text}")

    def value(self, name: str, sign: str) -> str | None:
        """Return a value, checked for its field."""
        token = self.next
        if token.kind not in ("word", "quoted"):
            raise self.error(token, f'a value for {name} is missing; an empty text is ""')
        self.at += 1
        value = _unquoted(token.text) if token.kind == "quoted" else token.text
        has_order = name not in (*FLAGS, *TEXTS)
        is_none = value == "none" and token.kind == "word"
        if sign not in ("=", "==", "!=") and (is_none or not has_order):
            what = ", and * in the value" if name in TEXTS else ""
            raise self.error(token, f"{name} {sign} {value} has no meaning; = and != have{what}")
        if is_none and name != "greedy":
            return None
        must_be_number = name in NUMBERS or name.startswith("rewards.") or sign not in ("=", "==", "!=")
        if must_be_number and _number(value) is None:
            raise self.error(token, f"{name} is a number, or none")
        if name in FLAGS and value in _BOOLEANS:
            return value
        known = _VALUES.get(name, ())
        if known and value not in known and ("*" not in value or name in FLAGS):
            raise self.error(token, f"{name} is one of {', '.join(known)}.{did_you_mean(value, known)}")
        return value


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)


def _number(text: str) -> float | None:
    if _WHOLE.fullmatch(text) and abs(int(text)) < 2**63:  # a seed has more digits than a float keeps
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else None


def _value(field: str) -> SQL:
    outer, _, inner = field.partition(".")
    return (f"json_extract({outer}, ?)", (_path(inner),)) if inner else (f'"{field}"', ())


def _path(key: str) -> str:
    return f'$."{key}"'


def _joined(parts: Sequence[SQL], word: str, empty: str) -> SQL:
    text = word.join(part for part, _ in parts) if parts else empty
    return f"({text})", tuple(value for _, given in parts for value in given)


def _comparison(node: Comparison) -> SQL:
    value, path = _value(node.field)
    if node.sign != "=":
        number = _number(str(node.values[0]))
        if not node.field.startswith("task."):
            return f"ifnull({value} {node.sign} ?, 0)", (*path, number)
        is_number = "json_type(task, ?) IN ('integer', 'real')"
        return f"ifnull({is_number} AND {value} {node.sign} ?, 0)", (*path, *path, number)
    parts: list[SQL] = [(f"{value} IS NULL", path)] if None in node.values else []
    texts = [text for text in node.values if text is not None]
    if node.field.startswith("task."):
        parts += [_any_of(f"CASE WHEN json_type(task, ?) = 'text' THEN {value} END", path * 2, texts)]
        numbers = [number for text in texts if (number := _number(text)) is not None]
        parts += [_among(f"CASE WHEN json_type(task, ?) IN ('integer', 'real') THEN {value} END", path * 2, numbers)]
        words = {str(_BOOLEANS[text]).lower() for text in texts if text in _BOOLEANS}
        parts += [_among("json_type(task, ?)", path, sorted(words))]
    elif node.field in TEXTS:
        parts += [_any_of(value, path, texts)]
    else:
        wanted = [_BOOLEANS[text] if node.field in FLAGS else _number(text) for text in texts]
        parts += [_among(value, path, wanted)]
    return _joined(parts, " OR ", "0")


def _any_of(value: str, path: tuple[object, ...], texts: Sequence[str]) -> SQL:
    parts = [_among(value, path, [text for text in texts if "*" not in text])]
    parts += [(f"ifnull({value} GLOB ?, 0)", (*path, _glob(text))) for text in texts if "*" in text]
    return _joined(parts, " OR ", "0")


def _among(value: str, path: tuple[object, ...], wanted: Sequence[object]) -> SQL:
    marks = ", ".join("?" * len(wanted))
    return (f"ifnull({value} IN ({marks}), 0)", (*path, *wanted)) if wanted else ("0", ())


def _glob(text: str) -> str:
    """Return a pattern of SQLite's GLOB in which only `*` is special."""
    return re.sub(r"[?\[]", r"[\g<0>]", text)
