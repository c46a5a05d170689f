"""Floors: what policies without skill score, beside the oracle."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from agent_rl.checks.bench import TURNS, Bench
from agent_rl.checks.report import Score, place
from agent_rl.core.display import plural
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.messages import JSON
from agent_rl.gym.env import Env
from agent_rl.gym.tasks import task_key
from agent_rl.policy.base import AnyPolicy
from agent_rl.policy.baselines import constant_policy, empty_policy, nothing_policy, random_policy
from agent_rl.policy.openai_client import without_requests
from agent_rl.policy.scripted import demonstrator, oracle
from agent_rl.rollout.evaluation import summarise
from agent_rl.rollout.job import Job
from agent_rl.worker_threads import outside_loop

FLOORS = ("random", "empty", "nothing", "constant")
"""The policies without skill. The constant answer is the oracle's most frequent one in the other tasks of the split."""
HIGHEST = 0.2
"""The success rate above which a floor is a finding."""
GAP = 0.5
"""The share of its own reward by which the oracle has to beat the random policy."""
SOLVED = 1.0
"""The success rate that the oracle has to reach."""
SHARE, SECONDS, TASKS = 0.05, 1.0, 32
"""Unasked, floors are played on the first so many tasks, for this share of an evaluation's time, or for a second."""


async def play_floors(bench: Bench) -> None:
    """Play every policy on every split."""
    if bench.cls.oracle is Env.oracle:
        bench.skipped["oracle"] = f"{bench.cls.__name__} has none: define oracle(self), a generator of right answers"
    for split in bench.spec.tasks.splits:
        await _play_split(bench, split, [bench.job(task) for task in bench.tasks(split)])


def floors_beside(jobs: Sequence[Job], wanted: bool | None, took: float) -> dict[str, Floors]:
    """Return what the oracle and policies without skill score on an evaluation's tasks, by environment.

    Args:
        jobs: of the evaluation.
        wanted: True plays all tasks, False none. None plays some, and asks no model: an environment whose user or judge
            is one has no floors then.
        took: seconds of the evaluation.
    """
    seconds = math.inf if wanted else 0.0 if wanted is False else max(SECONDS, SHARE * took)
    of_env: dict[str, dict[str, Job]] = {}
    for job in jobs:
        of_env.setdefault(job.spec.id, {}).setdefault(job.group_id, job)
    floors = {}
    for env, first in of_env.items() if seconds else ():
        some = [*first.values()][: None if wanted else TASKS]
        token = without_requests.set(not wanted)
        try:
            played = outside_loop(lambda: asyncio.run(rollout_floors(some, seconds / len(of_env))))  # noqa: B023
        finally:
            without_requests.reset(token)
        is_whole = len(played) == len(_names(some[0].spec.cls))
        if wanted or not is_whole or any(score.failed < len(some) for score in played):
            floors[env] = Floors(played, len(some), len(first), is_whole)
    return floors


@dataclass(frozen=True, slots=True)
class Floors:
    """The floors of an evaluation."""

    scores: tuple[Score, ...]
    """Of the oracle, if there is one, and of the policies without skill."""
    tasks: int
    of_tasks: int
    is_whole: bool
    """Whether no policy was left out for want of time."""

    def table(self) -> dict[str, JSON]:
        """Return the scores as JSON holds them."""
        return {score.policy: asdict(score) | {"success": score.success.value} for score in self.scores}

    def __str__(self) -> str:
        """Their scores, and the tasks."""
        which = "the same tasks" if self.tasks == self.of_tasks else f"the first {self.tasks} of these tasks"
        said = ", ".join(f"{score.policy} {score}" for score in self.scores) or "not known"
        late = "" if self.is_whole else " (floors=true takes the time for all)"
        return f"On {which}: {said}{late}"


async def rollout_floors(jobs: Sequence[Job], seconds: float = math.inf) -> tuple[Score, ...]:
    """Return what the oracle and the policies without skill score on the tasks of some jobs, of one environment.

    Args:
        jobs: whose first of each task is played.
        seconds: after which what has not ended is left out; what takes many turns comes last then.
    """
    first = {job.group_id: job for job in reversed(jobs)}  # one of each task
    example = jobs[0]
    bench = Bench(example.spec, example.env_args, len(first), 0, math.inf)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds if math.isfinite(seconds) else None):
            await _play_split(bench, example.origin.split, [*reversed(first.values())], math.isfinite(seconds))
    return tuple(sorted(floor_table(bench), key=lambda score: ("oracle", *FLOORS).index(score.policy)))


def _names(cls: type[Env], *, is_short: bool = False) -> tuple[str, ...]:
    """Return the policies to play, in order: the constant answer is one of the oracle's."""
    names = ("empty", "nothing", "oracle", "constant", "random") if is_short else ("oracle", *FLOORS)
    return names if cls.oracle is not Env.oracle else tuple(name for name in names if name != "oracle")


async def _play_split(bench: Bench, split: str, jobs: Sequence[Job], is_short: bool = False) -> None:
    solved: list[Episode] = []
    for name in _names(bench.cls, is_short=is_short):
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
    rewards = bench.cls.reward_components
    scoring = place(bench.cls, rewards[0].attribute if rewards else "step")
    remedy = "leave out tasks that take neither the tools nor the text, or let the reward look at more"
    if rewards and not rewards[0].weight and any(reward.weight for reward in rewards):
        remedy = f"success asks the first reward, '{rewards[0].name}', of weight 0: define the task's own before it"
    high = [s for s in table.values() if s.policy != "oracle" and s.success.n and s.success.value > HIGHEST]
    if high:
        each = ", ".join(f"{s.policy} {s.success.successes} of {s.success.n} on '{s.split}'" for s in high)
        bench.find(
            "floor",
            f"policies without skill succeed in more than {HIGHEST:.0%}: {each}",
            scoring,
            remedy,
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


async def check_demonstrations(bench: Bench) -> None:
    """Find a `demonstrate` that fails, on tasks of the first split; a warm start would stop at it."""
    if bench.cls.demonstrate is Env.demonstrate:
        return  # the oracle plays
    jobs = [bench.job(task) for task in bench.tasks(bench.spec.tasks.splits[0])]
    bench.demonstrated = await bench.play_all(jobs, [demonstrator()] * len(jobs))
    for episode in bench.demonstrated:
        error = episode.error
        if error is not None and error.type != "NotImplementedError":  # an adapter's, of a game that has none
            bench.blame(episode, "demonstrator", "demonstrate" if error.where == "policy" else "")


async def check_scored(bench: Bench) -> None:
    """Find a reward with a weight that scores no episode: all of them are without a score then, and train nothing."""
    ended = bench.ended()
    for component in (c for c in bench.cls.reward_components if c.weight):
        values = [reward.value for episode in ended for reward in episode.rewards if reward.name == component.name]
        if values and all(value is None for value in values):
            bench.find(
                "unscored",
                f"the reward '{component.name}' is None in all of {plural(len(values), 'episode')}: none is scored",
                place(bench.cls, component.attribute),
                "return a number, with 0 for what earns nothing; None is for what can't be judged",
            )


async def check_termination(bench: Bench) -> None:
    """Find an environment that no policy ends, and one without a limit that the random policy does not end."""
    remedy = "return ar.Step(..., terminated=True) where the task is over, and register with budget=ar.Budget(turns=N)"
    ended = [*bench.ended(), *(e for e in bench.demonstrated if e.error is None)]
    if ended and not any(e.stop_reason in (StopReason.DONE, StopReason.ENV_TRUNCATED) for e in ended):
        included = ", the oracle's included" if bench.ended("oracle") else ""
        bench.find(
            "termination",
            f"the environment ended none of {plural(len(ended), 'episode')}{included}",
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
