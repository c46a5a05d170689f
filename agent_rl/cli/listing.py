"""`agent-rl envs | algorithms`: what is registered."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_rl.config import choices, load_config
from agent_rl.gym.registry import env_ids, spec


def list_envs(arguments: argparse.Namespace) -> int:
    """List the registered environments."""
    table = Table("id", "splits", "what it is", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in env_ids():
        env = spec(name)
        table.add_row(name, ", ".join(env.tasks.splits), (env.cls.__doc__ or "").strip().split("\n")[0])
    Console().print(table)
    return 0


def list_algorithms(arguments: argparse.Namespace) -> int:
    """List the algorithms and their parts, with formulas."""
    from agent_rl.algorithms.explain import KINDS, formula
    from agent_rl.backends.embedded.config import TrainConfig

    table = Table("algorithm=", "formula", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in choices("algorithm"):
        config = load_config("backend/embedded", TrainConfig, [f"algorithm={name}"])
        table.add_row(name, Text(formula(config.algorithm)))
    Console().print(table)
    parts = Table("part", "name", "formula", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for kind, registry in KINDS.items():
        for name in registry:
            parts.add_row(kind, name, Text(registry[name].formula))
    Console().print(parts)
    return 0
