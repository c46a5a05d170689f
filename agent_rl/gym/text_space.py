"""The space of every text, for Gymnasium; and its place in the shared memory of an `AsyncVectorEnv`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from gymnasium.spaces import Text
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory

if TYPE_CHECKING:
    from multiprocessing.sharedctypes import SynchronizedArray

MAX_LENGTH = 2**15
"""Characters of an observation or action."""
_PRINTABLE = [chr(code) for code in range(32, 127)]
_SAMPLED = 32  # characters at most of a random text
_HEAD = 4  # bytes of shared memory that hold a text's size


class AnyText(Text):
    """The space of every text up to a length; its samples are short and printable."""

    def __init__(self, max_length: int = MAX_LENGTH) -> None:
        super().__init__(max_length, min_length=0, charset="".join(_PRINTABLE))

    def __repr__(self) -> str:
        return f"AnyText({self.max_length})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText) and other.max_length == self.max_length

    def contains(self, x: object) -> bool:
        """Whether it is a text that is not too long."""
        return isinstance(x, str) and len(x) <= self.max_length

    def sample(self, mask: object = None, probability: object = None) -> str:
        """Draw a short text of printable characters; there is nothing to mask."""
        length = self.np_random.integers(min(_SAMPLED, self.max_length) + 1)
        return "".join(self.np_random.choice(_PRINTABLE, size=length))


class SharedTexts(Sequence[str]):
    """The texts in the shared memory of an `AsyncVectorEnv`; Gymnasium's own reading of texts is never renewed."""

    def __init__(self, memory: SynchronizedArray[int], n: int) -> None:
        self._rows = np.frombuffer(memoryview(memory.get_obj()).cast("B"), np.uint8).reshape(n, -1)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> str:  # type: ignore[override]
        row = self._rows[index]
        size = int(row[:_HEAD].view(np.uint32)[0])
        return bytes(row[_HEAD : _HEAD + size]).decode(errors="surrogatepass")

    def __deepcopy__(self, memo: object) -> tuple[str, ...]:
        return tuple(self)

    def write(self, index: int, text: str) -> None:
        """Replace one text."""
        data = np.frombuffer(text.encode(errors="surrogatepass"), np.uint8)
        self._rows[index, :_HEAD].view(np.uint32)[0] = len(data)
        self._rows[index, _HEAD : _HEAD + len(data)] = data


@create_shared_memory.register(AnyText)
def _create(space: AnyText, n: int = 1, ctx: ModuleType = multiprocessing) -> SynchronizedArray[int]:
    memory: SynchronizedArray[int] = ctx.Array("B", n * (_HEAD + 4 * space.max_length))
    return memory


@read_from_shared_memory.register(AnyText)
def _read(space: AnyText, shared_memory: SynchronizedArray[int], n: int = 1) -> SharedTexts:
    return SharedTexts(shared_memory, n)


@write_to_shared_memory.register(AnyText)
def _write(space: AnyText, index: int, value: str, shared_memory: SynchronizedArray[int]) -> None:
    rows = len(shared_memory) // (_HEAD + 4 * space.max_length)
    SharedTexts(shared_memory, rows).write(index, value)
