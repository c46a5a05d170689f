"""Whether a run's openings, and its environment's own solutions, fit into the tokens of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from statistics import median

from agent_rl.core.episode import Origin
from agent_rl.core.messages import JSON, Message
from agent_rl.errors import ConfigError, RenderError
from agent_rl.gym.env import Env, Script
from agent_rl.gym.mixture import members_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.policy.base import AnyPolicy, unread
from agent_rl.policy.scripted import Scripted, ScriptedConversation
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.support import describe_additions
from agent_rl.rollout.episode import run_episode
from agent_rl.rollout.job import Job
from agent_rl.rollout.pool import split_jobs
from agent_rl.worker_threads import outside_loop

CHECKED = 4
"""Tasks at most."""
SECONDS = 60.0
"""How long the check may take; it does not judge what it has not measured by then."""


def check_policy_fit(jobs: Sequence[Job], policy: AnyPolicy) -> str | None:
    """Check a rollout as `check_fit` does, if its policy samples tokens; say what its renderer adds."""
    if not isinstance(policy, TokenPolicy):
        return None
    of_env: dict[str, list[Job]] = {}
    for job in jobs:
        of_env.setdefault(job.spec.id, []).append(job)
    context = policy.engine.context_limit
    fits = (check_fit(own, policy.renderer, context, "policy.context") for own in of_env.values())
    return _joined([describe_additions(policy.renderer), *fits])


def check_run_fit(
    spec: EnvSpec, split: str, env_args: Mapping[str, JSON], renderer: Renderer, context: int, setting: str
) -> str | None:
    """Check the first tasks of a training run as `check_fit` does; say what its renderer adds."""
    origin = Origin("rollout", split)
    jobs = (split_jobs(m.spec, CHECKED, 1, 0, origin=origin, env_args=m.args) for m in members_of(spec, env_args))
    return _joined([describe_additions(renderer), *(check_fit(own, renderer, context, setting) for own in jobs)])


def _joined(warnings: Iterable[str | None]) -> str | None:
    return "; ".join(filter(None, warnings)) or None


def check_fit(jobs: Sequence[Job], renderer: Renderer, context: int | None, setting: str) -> str | None:
    """Measure the first tasks of some jobs in the policy's tokens, and compare them with what an episode may use.

    Args:
        jobs: of one environment, with one budget.
        renderer: the policy's.
        context: the longest sequence of its engine.
        setting: its name in the config.

    Returns:
        A warning if the environment's oracle does not fit, or some openings don't.

    Raises:
        ConfigError: if no opening leaves room for a reply.
        RenderError: if the renderer refuses every opening, such as one of a family that leaves tools out.
    """
    first = [next(members) for _, members in islice(groupby(jobs, lambda job: job.group_id), CHECKED)]
    budget = (first[0].budget or first[0].spec.budget).tokens if first else None
    limit = min((n for n in (budget, context) if n is not None), default=None)
    if limit is None or not first:
        return None
    probes = outside_loop(lambda: asyncio.run(_measure(first, renderer)))
    if refusal := _refusal(probes):
        raise refusal
    name = "budget.tokens" if limit == budget else setting
    env, openings = first[0].spec.id, [p.opening for p in probes if p.opening]
    if openings and min(openings) >= limit:
        raise ConfigError(
            f"env={env}: an opening takes {_described(openings)} tokens of this policy, and {name}={limit} leaves no "
            f"room for a reply: set {name} higher"
        )
    what, sizes = "an opening and the first token of a reply take", [n + 1 for n in openings]
    if any(p.whole for p in probes):
        what, sizes = "the oracle itself needs", [p.whole for p in probes if p.whole]
    if not (over := sum(n > limit for n in sizes)):
        return None
    return (
        f"env={env}: {what} {_described(sizes)} tokens of this policy, and {name}={limit} cuts {over} of {len(sizes)} "
        f"episodes: set {name}={2 * max(sizes)} or so"
    )


def _refusal(probes: Sequence[_Probe]) -> RenderError | ConfigError | None:
    """Return why the renderer took no opening; None if it took one."""
    refusals = [p.refusal for p in probes if p.refusal is not None]
    return refusals[0] if len(refusals) == len(probes) else None


def _described(sizes: Sequence[int]) -> str:
    return f"{median(sizes):g} (at most {max(sizes)})"


@dataclass
class _Probe:
    """A policy that plays the environment's oracle, if there is one, and measures it."""

    renderer: Renderer
    env: str
    """Its id."""
    opening: int = 0
    """Tokens before the first reply; 0 if `reset` failed."""
    whole: int = 0
    """Tokens of an episode of the oracle; 0 if there is none, or it failed."""
    refusal: RenderError | ConfigError | None = None
    """Why the renderer did not take the opening."""

    def start_in(self, env: Env, seed: int) -> _Conversation:
        """Begin an episode."""
        return _Conversation(self, env, seed)


class _Conversation(ScriptedConversation):
    def __init__(self, probe: _Probe, env: Env, seed: int) -> None:
        super().__init__(Scripted(lambda env, seed: _solution(env), probe.renderer), env, seed)
        self._probe = probe

    def observe(self, messages: Sequence[Message]) -> int:
        try:
            length = super().observe(messages)
        except RenderError as error:
            self._probe.refusal = unread(error, messages, self._probe.env)
            raise
        self._probe.opening = self._probe.opening or length
        return length


def _solution(env: Env) -> Script:
    if type(env).oracle is not Env.oracle:
        yield from env.oracle()


async def _measure(jobs: Sequence[Job], renderer: Renderer) -> list[_Probe]:
    async def measure(job: Job, probe: _Probe) -> None:
        budget = replace(job.budget or job.spec.budget, tokens=None)
        episode = await run_episode(replace(job, budget=budget), probe, scored=False)
        if episode.error is None:
            probe.whole = max(map(len, episode.trajectories), default=0)

    probes = [_Probe(renderer, job.spec.id) for job in jobs]
    with suppress(TimeoutError):
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*map(measure, jobs, probes))
    return probes
