"""`agent-rl envs | algorithms`: what is registered."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from agent_rl.config import choices, load_config
from agent_rl.gym.registry import NAMESPACES, env_ids, load_namespace, spec
from agent_rl.view.tables import print_whole


def list_envs(arguments: argparse.Namespace) -> int:
    """List the registered environments, and the namespaces of other packages; or those of one namespace."""
    if arguments.namespace:
        load_namespace(arguments.namespace)
    table = Table(
        Column("id", no_wrap=True),
        Column("splits", overflow="fold"),
        Column("what it is", overflow="fold"),
        box=None,
        header_style="bold",
        padding=(0, 2, 0, 0),
    )
    for name in env_ids():
        if name.startswith(f"{arguments.namespace}/" if arguments.namespace else ""):
            env = spec(name)
            table.add_row(name, ", ".join(env.tasks.splits), (env.cls.__doc__ or "").strip().split("\n")[0])
    if not arguments.namespace:
        for name, text in NAMESPACES.items():
            table.add_row(f"{name}/...", "", f"{text}; `agent-rl envs {name}` lists them")
    print_whole(table, Console())
    return 0


def list_algorithms(arguments: argparse.Namespace) -> int:
    """List the algorithms and their parts, with formulas, and which make the same update at first."""
    from agent_rl.algorithms.alike import same_updates
    from agent_rl.algorithms.explain import KINDS, formula
    from agent_rl.backends.embedded.config import TrainConfig

    runs = {name: load_config("backend/embedded", TrainConfig, [f"algorithm={name}"]) for name in choices("algorithm")}
    presets = {name: run.algorithm for name, run in runs.items()}
    same = same_updates(presets)
    table = Table("algorithm=", "formula", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, config in presets.items():
        as_others = f"\n= {', '.join(same[name])} at ratio 1" if same[name] else ""
        several = f"\n{most} updates a batch" if (most := runs[name].updates.most) > 1 else ""
        table.add_row(name, Text(formula(config) + as_others + several))
    print_whole(table, Console())
    Console().print(
        "\n= NAME at ratio 1: the same update, up to its size, while theta, old and mu are one policy: the first of a\n"
        "batch that the trained weights sampled. Later ones, old tokens and other engines tell them apart.\n"
    )
    parts = Table("part", "name", "formula", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for kind, registry in KINDS.items():
        for name in registry:
            parts.add_row(kind, name, Text(registry[name].formula))
    print_whole(parts, Console())
    return 0
