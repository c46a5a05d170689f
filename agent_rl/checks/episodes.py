"""Checks of whole episodes: determinism, isolation, observations, the end, snapshots."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from itertools import accumulate

import numpy as np

from agent_rl.checks.bench import Bench, difference
from agent_rl.checks.report import place
from agent_rl.concurrency import maybe_await
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.messages import Message, Step, own_calls, own_task
from agent_rl.core.turns import replies
from agent_rl.gym.env import Env, messages_of
from agent_rl.rollout.closing import close_env
from agent_rl.seeds import OwnRandom, Stream, rng

_PLAIN = (int, float, str, list, dict, set, bytearray, deque, np.ndarray)
_LARGE = 10_000
"""Items of a container whose content is not compared."""


async def check_determinism(bench: Bench) -> None:
    """Find episodes that differ though seed, task and replies are the same, and the cause."""
    if bench.spec.nondeterministic:
        bench.skipped["determinism"] = "the environment is registered with nondeterministic=True"
        return
    examples = bench.examples()
    for episode in examples:
        before = shared_state(bench.cls)
        with OwnRandom(1):
            (first,) = await bench.play_again(episode)
        with OwnRandom(1):
            (second,) = await bench.play_again(episode)
        with OwnRandom(2):
            (third,) = await bench.play_again(episode)
        if first is None or second is None:
            return
        same_again, same_elsewhere = difference(first, second), difference(first, third)
        # what the first run left behind shows against the episode that was recorded before it
        changed = [name for name, value in shared_state(bench.cls).items() if before.get(name, value) != value]
        if changed and (problem := same_again or same_elsewhere or difference(episode, first)):
            _find_shared(bench, f"{problem}; what changed: {', '.join(changed)}")
        elif same_again:
            bench.find(
                "determinism",
                f"the same seed, task and replies give another episode: {same_again}",
                place(bench.cls, "reset" if "opening" in same_again else "step"),
                "draw from the `rng` of reset only, not from the clock, ids or another process; or register with "
                "nondeterministic=True",
            )
        elif same_elsewhere:
            bench.find(
                "global-random",
                f"an episode depends on the global random numbers: {same_elsewhere}",
                place(bench.cls, "reset" if "opening" in same_elsewhere else "step"),
                "draw from the `rng` of reset, not from `random` or `np.random`",
            )


async def check_isolation(bench: Bench) -> None:
    """Find episodes that come out another way when others run beside them."""
    if bench.spec.nondeterministic or {"determinism", "global-random"} & {check for check, _ in bench.findings}:
        bench.skipped["isolation"] = "episodes differ even alone"
        return
    examples = bench.examples()
    with OwnRandom(1):
        alone = [(await bench.play_again(episode))[0] for episode in examples]
    with OwnRandom(1):
        together = await bench.play_again(*examples)
    for one, other in zip(alone, together, strict=True):
        if one is not None and (problem := difference(one, other)):
            _find_shared(bench, f"an episode is another when others run beside it: {problem}")


def _find_shared(bench: Bench, problem: str) -> None:
    bench.find(
        "isolation",
        f"instances share state: {problem}",
        place(bench.cls, "reset"),
        "set attributes in reset, on self; keep what changes out of the class, its defaults and the module",
    )


def shared_state(cls: type[Env]) -> dict[str, str]:
    """Return the plain values of a class and of its module, as text by name."""
    owners: list[tuple[str, Mapping[str, object]]] = [
        (owner.__name__, vars(owner))
        for owner in cls.__mro__
        if not owner.__module__.startswith(("agent_rl.gym", "builtins"))
    ]
    owners.append((cls.__module__, vars(sys.modules[cls.__module__]) if cls.__module__ in sys.modules else {}))
    found = {}
    for owner, members in owners:
        for name, value in list(members.items()):
            if (
                isinstance(value, _PLAIN)
                and not (isinstance(value, Sized) and len(value) > _LARGE)
                and name[:2] != "__"
            ):
                found[f"{owner}.{name}"] = repr(value)
    return found


async def check_observations(bench: Bench) -> None:
    """Find observations that a policy can't be given: none, of the wrong role, or no text."""
    remedy = (
        "return text that UTF-8 can hold, as user, system or tool messages; a tool message answers a call by its id"
    )
    for episode in bench.ended():
        replied = reply_positions(episode)
        first, asked = min(replied, default=len(episode.messages)), set[str]()
        for position, message in enumerate(episode.messages):
            is_example = message.role == "assistant" and position < first
            if position in replied or is_example:
                asked |= {call.id for call in message.tool_calls}
            elif problem := _problem_of(message, asked):
                where = "reset" if position < first else "step"
                bench.find("observation", problem, place(bench.cls, where), remedy)
        if 0 in replied:
            problem = "reset returns no message: a policy has nothing to answer"
            bench.find("observation", problem, place(bench.cls, "reset"), remedy)


def reply_positions(episode: Episode) -> frozenset[int]:
    """Return where among an episode's messages the policy's replies are."""
    lengths = [1 + step.messages for step in episode.steps]
    opening = len(episode.messages) - sum(lengths)
    return frozenset(accumulate(lengths[:-1], initial=opening) if lengths else ())


def _problem_of(message: Message, asked: set[str]) -> str:
    try:
        message.content.encode()
    except UnicodeEncodeError:
        return f"an observation holds half of a character: {message.content[:60]!r}"
    if message.role == "assistant":
        return f"an observation speaks as the assistant: {message.content[:60]!r}"
    if message.role == "tool" and message.tool_call_id not in asked:
        return f"a tool message answers tool_call_id={message.tool_call_id!r}, which was not asked"
    return ""


async def check_end(bench: Bench) -> None:
    """Find an environment that continues, or pays, after its end."""
    for episode in bench.examples():
        if episode.stop_reason is not StopReason.DONE:
            continue
        said = replies(episode)
        env = await _opened(bench, episode)
        try:
            for reply in said:
                await _step(env, reply)
            try:
                step = await _step(env, said[-1])
            except Exception:
                continue
        except Exception:  # another check names it
            continue
        finally:
            await _close(env)
        if not (step.terminated or step.truncated) or step.reward:
            did = f"pays {step.reward:g} once more" if step.reward else "continues as if it were not over"
            bench.find(
                "end",
                f"after its end, a step with the last reply {did}",
                place(bench.cls, "step"),
                "raise in step once the episode has ended, or return ar.Step(terminated=True) without a reward",
            )


async def check_snapshots(bench: Bench) -> None:
    """Find snapshots from which a fresh instance continues in another way, and unsteady state hashes."""
    if not bench.cls.has_snapshots():
        bench.skipped["snapshot"] = "not declared: snapshot_attributes, or snapshot and restore"
        return
    for episode in bench.examples():
        try:
            problem = await _snapshot_problem(bench, episode, replies(episode))
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            bench.find(
                "snapshot",
                problem,
                place(bench.cls, "snapshot" if "snapshot" in vars(bench.cls) else "reset"),
                "name every attribute that changes after reset in snapshot_attributes, that of the `rng` too if steps "
                "draw from it; a snapshot of your own must be a copy",
            )


async def _snapshot_problem(bench: Bench, episode: Episode, said: Sequence[Message]) -> str:
    """Play an episode with a snapshot before each turn, and from each of them, twice; return the first difference."""
    env = await _opened(bench, episode)
    snapshots, states, steps = [], [], []
    try:
        for reply in said:
            snapshots.append(await maybe_await(env.snapshot()))
            states.append(await maybe_await(env.state_hash()))
            steps.append(await _step(env, reply))
        scores = await env.score(episode, bench.seconds)
    finally:
        await _close(env)
    for turn in [*range(len(said)), 0]:
        restored = f"restored before turn {turn + 1}"
        env = await _opened(bench, episode)
        try:
            await maybe_await(env.restore(snapshots[turn]))
            for later in range(turn, len(said)):
                if (state := await maybe_await(env.state_hash())) != states[later]:
                    return f"{restored}, state_hash says {state!r} before turn {later + 1}, not {states[later]!r}"
                if (step := await _step(env, said[later])) != steps[later]:
                    return f"{restored}, turn {later + 1} gives {_brief(step)}, not {_brief(steps[later])}"
            if (again := await env.score(episode, bench.seconds)) != scores:
                return f"{restored}, the rewards are {_values(again)}, not {_values(scores)}"
        finally:
            await _close(env)
    return ""


async def _step(env: Env, reply: Message) -> Step:
    step = await maybe_await(env.step(own_calls(reply)))
    return Step(messages_of(step.observation), step.reward, step.terminated, step.truncated)


def _brief(step: Step) -> str:
    return f"{' '.join(m.content for m in step.observation)[:60]!r} (reward {step.reward:g})"


def _values(rewards: Sequence[object]) -> list[object]:
    return [getattr(reward, "value", None) for reward in rewards]


async def _opened(bench: Bench, episode: Episode) -> Env:
    env = bench.spec.make(**bench.env_args)
    await maybe_await(env.reset(own_task(episode.task), rng(Stream.ENVIRONMENT, episode.seed)))
    return env


async def _close(env: Env) -> None:
    with suppress(Exception):  # another check names it
        await close_env(env, 30.0)
