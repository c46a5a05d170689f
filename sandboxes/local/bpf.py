"""Filters of system calls in the kernel's classic BPF: what a call is answered, by its number and its arguments.

Arguments are compared by their lower halves, as the kernel itself reads those that are no pointers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

Instruction = tuple[int, int, int, int]
"""Its code, how many to skip if it holds and if it does not, and its constant."""
Test = Callable[[int], list[Instruction]]
"""Makes the code of a test of an argument, given how many instructions to skip after it where it fails."""

ALLOW: Instruction = (0x06, 0, 0, 0x7FFF0000)
LIE = 0
"""The answer of a call that succeeds and does nothing."""

_KILL: Instruction = (0x06, 0, 0, 0x80000000)  # the process
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN, _ERRNO = 0x20, 0x15, 0x25, 0x45, 0x06, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
"""Offsets into struct seccomp_data."""


class Rule:
    """How a call is answered whose arguments pass all tests; without a test, every one."""

    def __init__(self, code: int, *tests: Test) -> None:
        """Make a rule that answers with an errno, or LIE."""
        self.code = [_answer(code)]
        for test in reversed(tests):
            self.code = [*test(len(self.code)), *self.code]


def is_one_of(argument: int, *values: int) -> Test:
    """Test whether an argument, counted from 0, is one of these values."""
    *others, last = values
    found = [(_EQUAL, len(values) - 1 - i, 0, value) for i, value in enumerate(others)]
    return lambda skip: [_load(argument), *found, (_EQUAL, 0, skip, last)]


def is_none_of(argument: int, *values: int) -> Test:
    """Test whether an argument is none of these values."""
    return lambda skip: [
        _load(argument),
        *((_EQUAL, len(values) - 1 - i + skip, 0, value) for i, value in enumerate(values)),
    ]


def has_any(argument: int, bits: int) -> Test:
    """Test whether an argument has one of these bits set."""
    return lambda skip: [_load(argument), (_ANY_BIT, 0, skip, bits)]


def is_given(argument: int) -> Test:
    """Test whether an argument, a pointer, is not null."""
    upper = (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4)
    return lambda skip: [_load(argument), (_EQUAL, 0, 2, 0), upper, (_EQUAL, skip, 0, 0)]


def begin(arch: int, ceiling: int, newer: int) -> list[Instruction]:
    """Begin a filter: kill who makes another architecture's calls; answer calls above `ceiling` with an errno."""
    own = [(_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, arch), _KILL]
    return [*own, (_LOAD, 0, 0, _NUMBER), (_GREATER, 0, 1, ceiling), _answer(newer)]


def answer(number: int | None, code: int) -> list[Instruction]:
    """Answer every call of a number, if there is one, with an errno, or LIE."""
    return [] if number is None else [(_EQUAL, 0, 1, number), _answer(code)]


def check(number: int | None, rules: Sequence[Rule]) -> list[Instruction]:
    """Answer the calls of a number, if there is one, by the first rule that they pass; allow those that pass none."""
    if number is None or not rules:
        return []
    block = [*(instruction for rule in rules for instruction in rule.code), ALLOW]
    return [(_EQUAL, 0, len(block), number), *block]


def packed(code: Sequence[Instruction]) -> bytes:
    """Return a filter as the kernel takes it."""
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


def _load(argument: int) -> Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument)


def _answer(code: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | code)
