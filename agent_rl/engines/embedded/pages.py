"""Pages: where a sequence's keys and values lie, and which sequences open with the same ids and share them.

A page holds `PAGE` positions of one or several sequences, in all layers. It is found by its content: pages form a tree
in which a page's children go on after its ids, so that a path from the root spells a sequence. Whoever writes behind
ids that it shares gets a copy of that page first (copy on write). A page is free as soon as no sequence uses it.

This is the bookkeeping alone, in Python; the numbers that it hands out are rows of `kv_cache.KVCache`'s tensors.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Sequence

from agent_rl.core.sequences import shared_start

PAGE = 64
"""Positions in a page."""
WORTH = 8
"""Positions of another sequence's page that are worth a copy of it; fewer are fed again."""


class Page:
    """Ids in a row, the page whose ids come before them, and the pages that go on after them."""

    __slots__ = ("children", "ids", "number", "parent", "ready", "users")

    def __init__(self, number: int, parent: Page | None) -> None:
        self.number = number
        self.parent = parent
        self.ids: list[int] = []
        """At most `PAGE`; those of the step under way are among them."""
        self.ready = 0
        """How many of them have their keys and values: those of steps that are done."""
        self.users = 1
        """Tables that hold the page."""
        self.children: list[Page] = []


class Table:
    """The pages of one sequence, in order; all but the last one are full."""

    __slots__ = ("generation", "length", "pages")

    def __init__(self) -> None:
        self.pages: list[Page] = []
        self.length = 0
        self.generation = 0
        """How many times pages were forgotten before the first one was taken."""

    @property
    def ids(self) -> list[int]:
        """The sequence's ids, from its first one on."""
        return [i for page in self.pages for i in page.ids]


class Pages:
    """Hands out pages, the lowest free number first, and takes them back."""

    def __init__(self) -> None:
        self.high = 0
        """One more than the highest number that was handed out."""
        self.fresh: list[int] = []
        """Pages handed out since `settle`; they hold another sequence's leavings, or nothing yet."""
        self.copies: list[tuple[int, int, int]] = []
        """Pages to copy before the step: from, to, and how many positions of it count."""
        self._free: list[int] = []
        self._written: list[Page] = []
        self._root = Page(-1, None)
        self._generation = 0

    @property
    def used(self) -> int:
        """Pages that a sequence holds."""
        return self.high - len(self._free)

    def share(self, table: Table, ids: Sequence[int], ends: Container[int] = ()) -> int:
        """Append as many of a sequence's next ids as other sequences' pages hold; return how many.

        All of them only if they end where another sequence's of the step under way do, whose logits then serve both:
        `ends` are the numbers of the pages in which those end. Otherwise at least one is left to feed.
        """
        if not table.pages:
            table.generation = self._generation
        if table.length % PAGE or table.generation != self._generation:
            return 0
        begin = table.length
        while (taken := table.length - begin) < len(ids):
            left = len(ids) - taken
            parent = table.pages[-1] if table.pages else self._root
            likeness = [(shared_start(page.ids, ids[taken : taken + PAGE]), page) for page in parent.children]
            same, page = max(likeness, key=lambda found: found[0], default=(0, parent))
            if (same == PAGE and left > PAGE) or (same == left == len(page.ids) and page.number in ends):
                page.users += 1
                table.pages.append(page)
                table.length += same
                continue
            likeness = [(min(same, left - 1, page.ready), page) for same, page in likeness]
            count, page = max(likeness, key=lambda found: found[0], default=(0, parent))
            if count >= WORTH:
                table.pages.append(self._copy(page, count))
                table.length += count
            break
        return table.length - begin

    def write(self, table: Table, ids: Sequence[int]) -> None:
        """Append ids to a sequence, whose keys and values the step under way computes."""
        if not table.pages:
            table.generation = self._generation
        written = 0
        while written < len(ids):
            place = table.length % PAGE
            if place == 0:
                page = self._take(table.pages[-1] if table.pages else self._root)
                table.pages.append(page)
            else:
                page = self._own(table, place)
            part = ids[written : written + PAGE - place]
            page.ids += part
            self._written.append(page)
            table.length += len(part)
            written += len(part)

    def _own(self, table: Table, place: int) -> Page:
        """Return the last page of a table, in which `place` ids are the sequence's, as one that no other uses."""
        page = table.pages[-1]
        if page.users == 1:
            return page
        table.pages[-1] = copy = self._copy(page, place)
        page.users -= 1
        return copy

    def _copy(self, page: Page, count: int) -> Page:
        copy = self._take(page.parent)
        copy.ids = page.ids[:count]
        self._written.append(copy)
        self.copies.append((page.number, copy.number, count))
        return copy

    def _take(self, parent: Page | None) -> Page:
        if self._free:
            number = heapq.heappop(self._free)
        else:
            number, self.high = self.high, self.high + 1
        self.fresh.append(number)
        page = Page(number, parent)
        if parent is not None:
            parent.children.append(page)
        return page

    def settle(self) -> None:
        """Note that the step is done: what was written in it can be copied from now on."""
        for page in self._written:
            page.ready = len(page.ids)
        self._written, self.fresh, self.copies = [], [], []

    def release(self, table: Table) -> None:
        """Empty a table; pages that no other table holds become free."""
        for page in table.pages:
            page.users -= 1
            if not page.users:
                heapq.heappush(self._free, page.number)
                if page.parent is not None:
                    page.parent.children.remove(page)
        table.pages, table.length = [], 0

    def forget(self) -> None:
        """Let no sequence find what is there now; those that use it keep it. A step under way is given up."""
        self._written, self.fresh, self.copies = [], [], []
        self._root = Page(-1, None)
        self._generation += 1
