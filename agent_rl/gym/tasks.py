"""Tasks: an environment's source of them, their order, and a key for each."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from agent_rl.core.messages import JSON, Task, own_task
from agent_rl.errors import ConfigError, DefinitionError, did_you_mean
from agent_rl.gym.task_files import TaskRows, read_rows, rows_by_split
from agent_rl.seeds import Stream, rng

TaskFunction: TypeAlias = Callable[[str, int], Mapping[str, object]]
"""`(split, index) -> Task`: any index from 0 up, the same task for the same index."""

TRAIN, EVAL = "train", "eval"
"""The splits that training and every evaluation take by default."""
HELD_OUT = 10
"""One task in so many of `train` is held out as `eval` where an environment names no such split."""
DRAWS, STRIDE = 200, 2**31 - 1
"""How often a task function is asked for a task that fits, and how far apart the indices are."""
RL_START = 2**24
"""Where the tasks of reinforcement learning begin in a `TaskStream`: behind those of the demonstrations."""
REFILL_START = 2**30
"""Where those begin that refill a batch: a run that asks for few of them leaves none out of its own order."""
KEYS = 4096
"""The positions of a stream whose tasks' keys are kept, to find equal ones."""
EVALUATION_SEED = 2**31
"""The run seed of every evaluation's episodes: two evaluations of a task differ in the policy only."""
_WHOLE_NUMBER = TypeAdapter(int)


class TaskSource:
    """The tasks of an environment, by split and index.

    Without a split `eval`, part of `train` is held out for it: the tasks that a hash of their content chooses.
    """

    shuffle: bool | None = None
    """Whether a run draws the order of a finite split by its seed; None for training only."""

    def __init__(
        self,
        tasks: Mapping[str, TaskRows] | TaskRows | TaskFunction | None = None,
        *,
        splits: Sequence[str] | None = None,
        base: Path | None = None,
    ) -> None:
        """Store where the tasks are; files are read at first use.

        Args:
            tasks: the rows of each split, or of "train": a file (.jsonl, .json, .csv, .parquet), a saved data set's
                folder, or an iterable of dicts; or a function that makes them; or None, for tasks that are only
                numbered: `{"split": "train", "index": 0}`.
            splits: the names of a function's splits; "train" and "eval" if left out.
            base: the folder that relative files start from; the working directory if left out.

        Raises:
            ConfigError: if there are no splits or no tasks, or `splits` is a string, or given beside a mapping.
        """
        self._function: TaskFunction | None = None
        self._given: Mapping[str, TaskRows] = {}
        self._loaded: dict[str, Sequence[Task]] = {}
        self._base = base or Path.cwd()
        if isinstance(splits, str):
            raise ConfigError(f"splits={splits!r} is a string: give their names, such as ('train', 'eval')")
        if tasks is None or callable(tasks):
            self._function = _numbered if tasks is None else _checked_function(tasks)
            self.splits = (TRAIN, EVAL) if splits is None else tuple(splits)
        else:
            if splits is not None:
                raise ConfigError(f"splits={list(splits)!r} names a task function's splits; these tasks name their own")
            self._given = rows_by_split(tasks, self._base)
            self.splits = tuple(self._given)
        if not self.splits:
            raise ConfigError("there are no splits; name at least one, such as 'train'")
        self.holds_out = TRAIN in self.splits and EVAL not in self.splits
        """Whether `eval` is a part of `train`."""
        if self.holds_out:
            self.splits += (EVAL,)

    def size(self, split: str) -> int | None:
        """Return how many tasks a split has; None if a function makes any number of them.

        Raises:
            ConfigError: if there is no such split, or its file can't be read.
        """
        split = self.require(split)
        return len(self._tasks(split)) if self._function is None else None

    def get(self, split: str, index: int) -> Task:
        """Return one task, as `own_task` gives it.

        Raises:
            ConfigError: if there is no such split, its file can't be read, or a key is no text.
            IndexError: if the split has no task of that index.
            TypeError: if a task function returns something else than a mapping.
        """
        split = self.require(split)
        if self._function is None:
            tasks = self._tasks(split)
            if not 0 <= index < len(tasks):
                raise IndexError(f"split '{split}' has the tasks 0 to {len(tasks) - 1}, not {index}")
            return own_task(tasks[index])
        if index < 0:
            raise IndexError(f"tasks count from 0, not {index}")
        if not (self.holds_out and split in (TRAIN, EVAL)):
            return self._drawn(split, index)
        for attempt in range(DRAWS):
            task = self._drawn(TRAIN, index + attempt * STRIDE)
            if _is_held_out(task_key(task)) == (split == EVAL):
                return task
        return self._drawn(TRAIN, index)  # of a function with very few tasks

    def distinct(self, split: str, n: int) -> list[Task]:
        """Return the first `n` different tasks of a split; fewer if it doesn't seem to have as many."""
        size = self.size(split)
        found: dict[str, Task] = {}
        for index in range(size if size is not None else 20 * n):
            if len(found) == n:
                break
            task = self.get(split, index)
            found.setdefault(task_key(task), task)
        return list(found.values())

    def stream(self, split: str, seed: int = 0) -> TaskStream:
        """Return a split as an endless sequence."""
        return TaskStream(self, split, seed)

    def repeats(self, split: str) -> int:
        """Return how many neighbours in a split are the same task."""
        return 1

    def require(self, split: str) -> str:
        """Return the name of a split: `test`, as `eval` was called once, is `eval` where there is no other.

        Raises:
            ConfigError: if there is no such split.
        """
        if split in self.splits:
            return split
        if (now := split.replace("test", EVAL)) in self.splits:
            return now
        names = ", ".join(self.splits)
        raise ConfigError(f"no split '{split}'.{did_you_mean(split, self.splits)} The splits are: {names}.")

    def describe_held_out(self) -> str:
        """Describe the tasks held out as `eval` in a sentence; empty if there is a split of that name."""
        if not self.holds_out:
            return ""
        if self._function is not None:
            return f"no split 'eval' is named: one task in {HELD_OUT} of 'train' is held out for it, by a hash"
        train, held_out = self._tasks(TRAIN), self._tasks(EVAL)
        if train == held_out:
            return "no split 'eval' is named, and 'train' has one task only: it is trained and evaluated on"
        n = len(held_out)
        return f"no split 'eval' is named: {n} of the {n + len(train)} tasks of 'train' are held out for it, by a hash"

    def _drawn(self, split: str, index: int) -> Task:
        assert self._function is not None
        task = self._function(split, index)
        if not isinstance(task, Mapping):
            raise DefinitionError(f"the task function returned {task!r} for ('{split}', {index}); return a dict")
        return own_task(task)

    def _tasks(self, split: str) -> Sequence[Task]:
        if split not in self._loaded:
            if self.holds_out and split in (TRAIN, EVAL):
                self._loaded |= _divided(read_rows(self._given[TRAIN], TRAIN, self._base))
            else:
                self._loaded[split] = read_rows(self._given[split], split, self._base)
        return self._loaded[split]


class TaskStream:
    """One split as an endless sequence, so that a trainer's place in its data is a single integer.

    A finite split is shuffled again for each epoch, which has every task once. Of a task function, each seed draws
    from an index range of its own.
    """

    def __init__(self, source: TaskSource, split: str, seed: int = 0) -> None:
        source.require(split)
        if seed < 0:
            raise ConfigError(f"seed={seed} is negative; count seeds from 0")
        self.source = source
        self.split = split
        self.seed = seed
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._key = lru_cache(KEYS)(lambda position: task_key(self.at(position)))

    def at(self, position: int) -> Task:
        """Return the task at a position, from 0 up; the same for the same (source, split, seed, position)."""
        return self.source.get(self.split, self._place(position)[1])

    def again(self, position: int, earlier: Iterable[int] = ()) -> int:
        """Return a number that tells the times apart at which the stream has a task: its seeds are to differ, too.

        It counts from the epoch of `RL_START`. A function's tasks have no epochs: of them it counts the equal ones at
        `earlier` positions, such as those of the same step.
        """
        epoch, index = self._place(position)
        repeats, size = self.source.repeats(self.split), self.source.size(self.split)
        if size is None:
            return self.equal(position, earlier)
        return (epoch - RL_START // size) * repeats + index % repeats

    def equal(self, position: int, others: Iterable[int]) -> int:
        """Return at how many other positions the stream has the same task."""
        key = self._key(position)
        return sum(self._key(other) == key for other in others)

    def _place(self, position: int) -> tuple[int, int]:
        """Return the epoch of a position, and the index of its task in the source."""
        if position < 0:
            raise IndexError(f"positions count from 0, not {position}")
        size = self.source.size(self.split)
        if size is None:
            return 0, self.seed * 2**32 + position
        epoch, offset = divmod(position, size)
        if self.source.shuffle is False:
            return epoch, offset
        if epoch != self._epoch:
            self._order = rng(Stream.TASK_ORDER, self.seed, epoch).permutation(size)
            self._epoch = epoch
        return epoch, int(self._order[offset])


def task_key(task: Task) -> str:
    """Return a hash of a task's content, 16 hex digits; the order of its keys does not matter.

    Raises:
        ConfigError: if the task holds something that JSON can't, other than infinities and NaN.
    """
    try:
        text = json.dumps(task, sort_keys=True, separators=(",", ":"), default=_plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the task {task!r} holds what JSON can't: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def task_values(task: Task) -> dict[str, JSON]:
    """Return a task's values by key, also those in an object: by `meta.level`."""
    inner = {
        f"{key}.{within}": found
        for key, value in task.items()
        if isinstance(value, Mapping)
        for within, found in task_values(value).items()
    }
    return {**inner, **task}


def world_seed(task: Task) -> int:
    """Return the seed of a task's world, which all of its samples meet: the task's `seed`, or a hash of the task.

    A file may hold the number as text, as all values of a .csv file, or as 5.0, as in a column with gaps.

    Raises:
        ConfigError: if the task's `seed` is no whole number.
    """
    seed = task.get("seed")
    if seed in (None, ""):
        return int(task_key(task), 16) % 2**31
    try:
        return _WHOLE_NUMBER.validate_python(seed)
    except ValidationError:
        raise ConfigError(f"a task has the seed {seed!r:.80}: give a whole number, or call it otherwise") from None


def episode_seed(run_seed: int, task: Task, sample: int) -> int:
    """Return the 63-bit seed of an episode's random streams.

    It depends only on the run's seed, the task's content and the sample's number in its group, not on how
    many episodes ran before nor on which finished first, so any episode can be played again by itself.
    """
    key = f"{run_seed}/{task_key(task)}/{sample}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def _is_held_out(key: str) -> bool:
    return int(key, 16) % HELD_OUT == 0


def _divided(tasks: Sequence[Task]) -> dict[str, Sequence[Task]]:
    """Return `train` and `eval` of tasks; each has one at least, and both have the same if there is only one."""
    keys = [task_key(task) for task in tasks]
    held_out = set(filter(_is_held_out, keys))
    if held_out in (set(), set(keys)):
        held_out = {min(keys)}
    train = [task for task, key in zip(tasks, keys, strict=True) if key not in held_out]
    return {
        TRAIN: train or tasks,
        EVAL: [task for task, key in zip(tasks, keys, strict=True) if key in held_out],
    }


def _checked_function(function: TaskFunction) -> TaskFunction:
    """Refuse a function that does not take a split and an index."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a built-in may have none
        return function
    try:
        signature.bind("train", 0)
    except TypeError as error:
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"tasks={name}: {error}; a task function takes (split, index)") from error
    return function


def _numbered(split: str, index: int) -> Task:
    return {"split": split, "index": index}


def _plain(value: object) -> object:
    """Return the JSON type of a container other than dict and list."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"a {type(value).__name__}")
