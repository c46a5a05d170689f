"""Group rewards, on samples of one task."""

from __future__ import annotations

import warnings
from dataclasses import replace

from agent_rl.checks.bench import Bench
from agent_rl.checks.report import place
from agent_rl.core.episode import EpisodeGroup
from agent_rl.rollout.group import score_groups

SAMPLES = 3


async def check_group_rewards(bench: Bench) -> None:
    """Find group rewards that raise, are late, or return no number for each episode."""
    components = bench.cls.group_reward_components
    for example in bench.examples()[:1] if components else ():
        samples = tuple(replace(example, id=f"{example.id}-{n}") for n in range(SAMPLES))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a close() that fails: the episodes have said so
            (scored,) = await score_groups([EpisodeGroup(example.group_id, samples)], bench.spec)
        failed = {r.name: r.error for e in scored.episodes for r in e.rewards if r.source == "group" and r.error}
        for component in components:
            if problem := failed.get(component.name):
                remedy = "return a number, a bool or None for each episode of the group, in their order"
                bench.find("group reward", problem[:1000], place(bench.cls, component.attribute), remedy)
