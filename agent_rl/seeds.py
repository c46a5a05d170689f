"""Seeds: every stream of random numbers, by name, so that no two uses share one by accident."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Any

import numpy as np


@unique
class Stream(IntEnum):
    """What random numbers are drawn for. A stream's number is part of its seed: changing it changes results.

    Negative ones are older than the numbers and no part of the seed: their keys alone tell them apart, as they differ
    in length and size.
    """

    TOKENS = -1
    """Which tokens an engine of ours samples; key: the episode's 63-bit seed."""
    TASK_ORDER = -2
    """The order of a finite split; key: the run's seed and the epoch."""
    TASKS = -3
    """The tasks of the built-in environments; key: the bytes of the split's name and the task's index."""
    DEMONSTRATION = 1
    """The mistakes of `Env.demonstrate`."""
    WARM_START = 2
    """The order of demonstrations, and the strings to copy."""
    SHUFFLED_REWARDS = 3
    """Which episode gets which reward in the control run."""
    STATE_VALUES = 4
    """Which states are valued, and the seeds of their continuations."""
    SHUFFLED_CONTINUATIONS = 5
    """Which continuation gets which reward in the control run."""
    STORED_GROUPS = 6
    """The order of stored groups."""
    INTERRUPTION = 7
    """After how many tokens a reply is interrupted."""
    ENVIRONMENT = 8
    """What `Env.reset` and later steps draw: numbers of its own, so that the tokens sampled say nothing about them."""
    BASELINE = 9
    """What the random policy says, and the arguments of its calls."""
    COMPARISON = 10
    """Resampled tasks and signs, where two rollouts are compared; resampled episodes of a judge's agreement."""
    WORLD = 11
    """What a built-in environment makes of a task's seed, such as a database or files."""
    MIXTURE = 12
    """The order of a mixture's environments; key: the run's seed and the block."""
    RETRY = 13
    """How much earlier a refused request is sent again; key: the episode's seed and the attempt."""
    MINI_BATCHES = 14
    """Which groups an update learns from; key: the run's seed, the step and the epoch."""
    TRIED_AGAIN = 15
    """The seeds of episodes of tasks that a step tries once more; key: the run's seed and the step."""


_WORD = 0xFFFFFFFF


def rng(stream: Stream, *key: int) -> np.random.Generator:
    """Return the generator of a stream; the same for the same key.

    Args:
        stream: what it is drawn for.
        key: non-negative numbers, such as the run's seed and the step.
    """
    words: list[int] = []  # as NumPy splits the numbers itself, which takes 3 µs more: a tenth of a short episode
    for number in (stream, *key) if stream > 0 else key:
        while number > _WORD:
            words.append(number & _WORD)
            number >>= 32
        words.append(number)
    return np.random.default_rng(np.array(words, np.uint32))


@dataclass(frozen=True, slots=True)
class RngState:
    """A generator of random numbers as plain values: where it is, and its seed, to spawn from."""

    entropy: tuple[int, ...]
    spawn_key: tuple[int, ...]
    spawned: int
    state: Mapping[str, Any]

    @classmethod
    def of(cls, generator: np.random.Generator) -> RngState:
        """Describe a generator.

        Raises:
            TypeError: if it is not NumPy's default one.
        """
        state, seeds = generator.bit_generator.state, generator.bit_generator.seed_seq
        if state["bit_generator"] != "PCG64" or not isinstance(seeds, np.random.SeedSequence):
            raise TypeError(f"only NumPy's default generator can be described, not {generator.bit_generator!r}")
        entropy = tuple(int(n) for n in np.atleast_1d(np.asarray(seeds.entropy, object)))
        return cls(entropy, tuple(int(n) for n in seeds.spawn_key), seeds.n_children_spawned, state)

    def generator(self) -> np.random.Generator:
        """Return a generator that gives the same numbers, and spawns the same ones."""
        seeds = np.random.SeedSequence(self.entropy, spawn_key=self.spawn_key, n_children_spawned=self.spawned)
        bits = np.random.PCG64(seeds)
        bits.state = dict(self.state)  # type: ignore[assignment]
        return np.random.Generator(bits)


class OwnRandom:
    """Python's and NumPy's global random numbers, an owner's own inside `with`; outside they are as they were.

    For code that draws from them: entered again, it meets the numbers that it left. Nothing may be awaited inside.
    """

    def __init__(self, seed: int) -> None:
        outside = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self._state = random.getstate(), np.random.get_state()
        _set_random(outside)

    def __enter__(self) -> None:
        self._outside = random.getstate(), np.random.get_state()
        _set_random(self._state)

    def __exit__(self, *exception: object) -> None:
        self._state = random.getstate(), np.random.get_state()
        _set_random(self._outside)


def _set_random(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
