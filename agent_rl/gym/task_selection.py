"""Selections: which of an environment's tasks a run takes, by a condition, an offset, a limit and repeats."""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from pydantic import Field, field_validator

from agent_rl.config import Section
from agent_rl.core.messages import JSON, Task
from agent_rl.errors import ConfigError
from agent_rl.gym.tasks import DRAWS, STRIDE, TaskSource

_PAIR = re.compile(r"\s*(\w+)\s*=\s*([^=\s].*?)\s*")
_OPERATORS: Mapping[type[ast.cmpop], Callable[[object, object], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,  # type: ignore[dict-item]
    ast.LtE: operator.le,  # type: ignore[dict-item]
    ast.Gt: operator.gt,  # type: ignore[dict-item]
    ast.GtE: operator.ge,  # type: ignore[dict-item]
    ast.In: lambda one, other: one in other,  # type: ignore[operator]
    ast.NotIn: lambda one, other: one not in other,  # type: ignore[operator]
}
_WORDS = {"true": True, "false": False, "null": None}
"""What JSON calls them: a name in Python, which no task has as a key, mostly."""
_WRITTEN = {str(value): word for word, value in _WORDS.items()}
_NODES = (
    *(ast.Expression, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, *_OPERATORS),
    *(ast.Name, ast.Attribute, ast.Constant, ast.List, ast.Tuple, ast.Load),
)


class TaskSelection(Section):
    """A choice of an environment's tasks, and their order."""

    where: str | None = None
    """A condition on a task, in every split: `level < 3 and kind in ('sum', 'product')`, or plain `kind=sum`."""
    offset: int = Field(0, ge=0)
    """Tasks at the beginning of `split` that are left out."""
    limit: int | None = Field(None, ge=1)
    """Tasks of `split` that are taken; of a generator, the same ones for every seed."""
    repeats: int = Field(1, ge=1)
    """How often training takes each task in an epoch."""
    shuffle: bool | None = None
    """Whether the order is drawn by the seed; null for training only. A shuffled split has another order each epoch."""

    @field_validator("where")
    @classmethod
    def _readable(cls, text: str | None) -> str | None:
        if text is not None:
            parse_condition(text)
        return text


def select_tasks(source: TaskSource, selection: TaskSelection, split: str) -> TaskSource:
    """Return the tasks of a source that a selection takes; `offset`, `limit` and `repeats` are of one split."""
    return source if selection == TaskSelection() else SelectedTasks(source, selection, split)


class SelectedTasks(TaskSource):
    """A part of another source."""

    def __init__(self, source: TaskSource, selection: TaskSelection, split: str) -> None:
        self._source, self._selection, self._split = source, selection, source.require(split)
        self._fits = parse_condition(selection.where) if selection.where is not None else None
        self._rows: dict[str, Sequence[Task] | None] = {}
        self.splits, self.holds_out, self.shuffle = source.splits, source.holds_out, selection.shuffle

    def size(self, split: str) -> int | None:
        """Return how many tasks there are, repeats counted; None for any number."""
        rows = self._selected(split := self.require(split))
        return None if rows is None else len(rows) * self.repeats(split)

    def get(self, split: str, index: int) -> Task:
        """Return one task.

        Raises:
            ConfigError: if a generator makes none that fits.
            IndexError: if there is no task of that index.
        """
        rows = self._selected(split := self.require(split))
        place = index // self.repeats(split)
        if rows is not None:
            if not 0 <= place < len(rows):
                raise IndexError(f"{len(rows)} tasks of split '{split}' are selected; there is no {index}")
            return rows[place]
        place += self._selection.offset if split == self._split else 0
        for attempt in range(DRAWS):
            task = self._source.get(split, place + attempt * STRIDE)
            if self._fits is None or self._fits(task):
                return task
        raise self._nothing(split, DRAWS, task)

    def describe_held_out(self) -> str:
        """Describe what is held out as `eval`, as the whole source does."""
        return self._source.describe_held_out()

    def repeats(self, split: str) -> int:
        """Return how often an epoch has each task."""
        return self._selection.repeats if split == self._split else 1

    def _selected(self, split: str) -> Sequence[Task] | None:
        """Return the tasks of a split, without repeats; None if a generator makes any number of them."""
        if split not in self._rows:
            offset, limit = (self._selection.offset, self._selection.limit) if split == self._split else (0, None)
            size = self._source.size(split)
            if size is None and limit is None:
                self._rows[split] = None
                return None
            tried = range(size) if size is not None else range(DRAWS * (offset + (limit or 0)))
            tasks = (self._source.get(split, index) for index in tried)
            stop = None if limit is None else offset + limit
            found = list(itertools.islice(filter(self._fits, tasks) if self._fits else tasks, offset, stop))
            if not found:
                raise self._nothing(split, len(tried), self._source.get(split, 0))
            self._rows[split] = found
        return self._rows[split]

    def _nothing(self, split: str, tried: int, task: Task) -> ConfigError:
        given = ", ".join(
            f"tasks.{name}={value!r}" for name, value in self._selection.model_dump(exclude_defaults=True).items()
        )
        return ConfigError(f"{given} leaves none of {tried} tasks of split '{split}', such as {str(dict(task))[:200]}")


def parse_condition(text: str) -> Callable[[Task], bool]:
    """Return the test that a condition describes; it is read, never executed.

    It has comparisons, `in`, `and`, `or`, `not`, numbers, strings, lists, true, false and null, in Python's writing,
    too, and a task's keys as names; `meta.level` is a key in a key. A key that a task has not is None, and no
    comparison by size holds of it.

    Raises:
        ConfigError: if it holds anything else.
    """
    if (pair := _PAIR.fullmatch(text)) and not re.search(r"[<>!]", text):
        key, wanted = pair[1], pair[2].strip("'\"")
        return lambda task: wanted in (str(task.get(key)), _WRITTEN.get(str(task.get(key))))
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ConfigError(f"tasks.where={text!r} is no condition: {error.msg}; write level < 3") from None
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise ConfigError(
                f"tasks.where={text!r} holds {ast.unparse(node)!r}: a condition has keys, numbers, strings, lists, "
                "comparisons, in, and, or, not"
            )
    if not any(isinstance(node, ast.Name) and node.id not in _WORDS for node in ast.walk(tree)):
        raise ConfigError(f"tasks.where={text!r} names no key of a task, so that it takes all or none; write level < 3")
    return lambda task: bool(_value(tree.body, task))


def _value(node: ast.expr, task: Mapping[str, JSON]) -> object:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return task.get(node.id, _WORDS.get(node.id))
        case ast.Attribute():
            inner = _value(node.value, task)
            return inner.get(node.attr) if isinstance(inner, Mapping) else None
        case ast.List() | ast.Tuple():
            return [_value(entry, task) for entry in node.elts]
        case ast.UnaryOp(op=ast.USub()):
            value = _value(node.operand, task)
            return -value if isinstance(value, int | float) else None
        case ast.UnaryOp():
            return not _value(node.operand, task)
        case ast.BoolOp(op=ast.And()):
            return all(_value(part, task) for part in node.values)
        case ast.BoolOp():
            return any(_value(part, task) for part in node.values)
        case ast.Compare():
            values = [_value(part, task) for part in (node.left, *node.comparators)]
            return all(map(_holds, node.ops, values, values[1:]))
    raise AssertionError(ast.unparse(node))  # `parse_condition` lets nothing else through


def _holds(compare: ast.cmpop, one: object, other: object) -> bool:
    try:
        return bool(_OPERATORS[type(compare)](one, other))
    except TypeError:  # a key that this task has not, or of another type
        return False
