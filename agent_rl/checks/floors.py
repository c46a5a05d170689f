"""Floors: what policies without skill score, beside the oracle."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from agent_rl.checks.bench import TURNS, Bench
from agent_rl.checks.report import Score, place
from agent_rl.core.episode import Episode, StopReason
from agent_rl.gym.env import Env
from agent_rl.gym.tasks import task_key
from agent_rl.policy.base import AnyPolicy
from agent_rl.policy.baselines import constant_policy, empty_policy, nothing_policy, random_policy
from agent_rl.policy.scripted import oracle
from agent_rl.rollout.evaluation import summarise
from agent_rl.rollout.job import Job

FLOORS = ("random", "empty", "nothing", "constant")
"""The policies without skill. The constant answer is the oracle's most frequent one in the other tasks of the split."""
HIGHEST = 0.2
"""The success rate above which a floor is a finding."""
GAP = 0.5
"""The share of its own reward by which the oracle has to beat the random policy."""
SOLVED = 1.0
"""The success rate that the oracle has to reach."""


async def play_floors(bench: Bench) -> None:
    """Play every policy on every split."""
    if bench.cls.oracle is Env.oracle:
        bench.skipped["oracle"] = f"{bench.cls.__name__} has none: define oracle(self), a generator of right answers"
    for split in bench.spec.tasks.splits:
        await _play_split(bench, split, [bench.job(task) for task in bench.tasks(split)])


async def rollout_floors(jobs: Sequence[Job]) -> tuple[Score, ...]:
    """Return what the oracle and the policies without skill score on the tasks of some jobs, of one environment."""
    first = {job.group_id: job for job in reversed(jobs)}  # one of each task
    example = jobs[0]
    bench = Bench(example.spec, example.env_args, len(first), 0, math.inf)
    await _play_split(bench, example.origin.split, [*reversed(first.values())])
    return floor_table(bench)


async def _play_split(bench: Bench, split: str, jobs: Sequence[Job]) -> None:
    solved: list[Episode] = []
    for name in ("oracle", *FLOORS) if bench.cls.oracle is not Env.oracle else FLOORS:
        bench.played[name, split] = episodes = await bench.play_all(jobs, _players(name, solved, len(jobs)))
        solved = episodes if name == "oracle" and len(episodes) == len(jobs) else solved
        for episode in episodes:
            bench.blame(episode, name)


def _players(name: str, solved: Sequence[Episode], n: int) -> list[AnyPolicy]:
    if name == "constant":
        return [constant_policy(answer) for answer in constant_answers(solved)] or [constant_policy()] * n
    makers: Mapping[str, AnyPolicy] = {
        "oracle": oracle(),
        "random": random_policy(),
        "empty": empty_policy(),
        "nothing": nothing_policy(),
    }
    return [makers[name]] * n


def constant_answers(solved: Sequence[Episode]) -> list[str]:
    """Return for each task the most frequent answer of the others: what a policy learns without reading."""
    answers = [(task_key(episode.task), episode.final_text) for episode in solved]
    counts = Counter(answer for _, answer in answers if answer)
    found = []
    for _, own in answers:
        others = counts - Counter([own])
        found.append(others.most_common(1)[0][0] if others else "yes")
    return found


def floor_table(bench: Bench) -> tuple[Score, ...]:
    """Return the scores of what was played."""
    scores = []
    for (policy, split), episodes in bench.played.items():
        found = summarise(episodes)
        scores.append(Score(policy, split, found.success, found.reward, found.failed))
    return tuple(scores)


async def check_floors(bench: Bench) -> None:
    """Find an oracle that does not solve its tasks or is not better than chance, and floors that are high."""
    table = {(score.policy, score.split): score for score in floor_table(bench)}
    rewards = bench.cls.reward_components[:1]
    scoring = place(bench.cls, rewards[0].attribute if rewards else "step")
    high = [s for s in table.values() if s.policy != "oracle" and s.success.n and s.success.value > HIGHEST]
    if high:
        each = ", ".join(f"{s.policy} {s.success.successes} of {s.success.n} on '{s.split}'" for s in high)
        bench.find(
            "floor",
            f"policies without skill succeed in more than {HIGHEST:.0%}: {each}",
            scoring,
            "leave out tasks that take neither the tools nor the text, or let the reward look at more",
        )
    for (policy, split), score in table.items():
        best = table.get(("oracle", split))
        if policy == "oracle":
            failing = [e for e in bench.played[policy, split] if e.success is False]
            if score.success.n and score.success.value < SOLVED:
                bench.find(
                    "oracle",
                    f"the oracle solves {score.success.successes} of {score.success.n} tasks of '{split}'; not "
                    f"{str(dict(failing[0].task))[:200]}, where it ends with {failing[0].final_text[:60]!r}",
                    place(bench.cls, "oracle"),
                    "let the oracle reach a first reward of 1 in every task; if it can't, a task or a reward is wrong",
                )
        if policy == "random" and best is not None and best.reward - score.reward < GAP * abs(best.reward):
            bench.find(
                "gap",
                f"the oracle's mean reward on '{split}' is {best.reward:.3g}, the random policy's {score.reward:.3g}: "
                f"the gap is less than {GAP:.0%} of the oracle's",
                scoring,
                "let the reward tell a solved task from a random one",
            )


async def check_termination(bench: Bench) -> None:
    """Find an environment that no policy ends, and one without a limit that the random policy does not end."""
    remedy = "return ar.Step(..., terminated=True) where the task is over, and register with budget=ar.Budget(turns=N)"
    ended = bench.ended()
    if ended and not any(e.stop_reason in (StopReason.DONE, StopReason.ENV_TRUNCATED) for e in ended):
        bench.find(
            "termination",
            f"the environment ended none of {len(ended)} episodes, the oracle's included",
            place(bench.cls, "step"),
            remedy,
        )
    elif bench.spec.budget.turns is None and any(e.turns >= TURNS for e in bench.ended(*FLOORS)):
        bench.find(
            "termination",
            f"the budget has no limit in turns, and a policy without skill plays for {TURNS}",
            place(bench.cls, "step"),
            remedy,
        )
