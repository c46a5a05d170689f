"""`agent-rl compare`: two rollouts, by the tasks that both played."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from agent_rl.core.episode import Episode
from agent_rl.rollout.comparison import compare as compared
from agent_rl.view.selection import select


def compare(arguments: argparse.Namespace) -> int:
    """Print how two rollouts differ.

    Raises:
        StoreError: if there is no such file, or a line can't be read.
        ConfigError: if they have no scored task in common, or a filter has no meaning.
    """
    found = compared(*(_episodes(file, arguments.where) for file in (arguments.first, arguments.second)))
    if arguments.json:
        print(json.dumps([asdict(comparison) for comparison in found], indent=2))
        return 0
    table = Table("", "A", "B", "B - A", "95 % interval", "p", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for c in found:
        low, high = c.interval
        numbers = (f"{c.first:.3f}", f"{c.second:.3f}", f"{c.difference:+.3f}", f"{low:+.3f} to {high:+.3f}")
        table.add_row(c.measure, *numbers, f"{c.p:.2g}")
    Console().print(table)
    only = ((found[0].only_first, "A"), (found[0].only_second, "B"))
    left_out = "".join(f"; {count} that only {name} has scored are left out" for count, name in only if count)
    print(f"over {found[0].tasks} tasks{left_out}")
    return 0


def _episodes(file: str, where: Sequence[str]) -> Iterator[Episode]:
    return select(file, where=where, limit=2**62).episodes()
