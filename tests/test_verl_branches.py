"""agent_rl.backends.verl.worker.rows: a continuation in another process equals the same one in this process."""

import asyncio
import json
import pickle
from dataclasses import replace

import pytest

from agent_rl.backends.verl.worker.rows import SNAPSHOTS, dump_branch, episode_of, load_continuation, rows_of
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message, ToolCall
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import ConfigError
from agent_rl.policy import Policy, TokenPolicy
from agent_rl.rollout import Job, continuation, run_episode
from tests.doubles import CALL, Dice, dice_spec, sampled, small_renderer

TWO_CALLS = Message("assistant", "hm ", tool_calls=(ToolCall("x", "roll"), ToolCall("x", "roll")))


class Fair(Dice):
    """Dice whose state is the position in its random numbers."""

    snapshot_attributes = ("rng",)

    def state_hash(self):
        return str(self.rng.bit_generator.state)


SPEC = dice_spec(Fair, None)


def replying(*replies: Message) -> TokenPolicy:
    renderer = small_renderer()
    return TokenPolicy(
        ScriptedEngine(sampled(renderer.reply(r) for r in replies)), renderer, SamplingParams(max_tokens=64)
    )


def run(job: Job, policy: Policy) -> Episode:
    return asyncio.run(run_episode(job, policy))


PARENT = run(
    Job(SPEC, {}, 5, "g", id="first", snapshots=True, env_args={"sides": 8}),
    replying(CALL, TWO_CALLS, Message("assistant", "6")),
)


@pytest.mark.parametrize("turn", range(3))
def test_continuation_crosses_processes_as_text(turn: int) -> None:
    (row,) = rows_of(PARENT)
    travelled = episode_of(json.loads(json.dumps(row.extra_fields)))
    assert travelled is not None and len(travelled.snapshots) == 3
    job = continuation(SPEC, travelled, turn, 77)
    assert job.branch is not None
    policies = [replying(CALL, Message("assistant", "6")) for _ in range(2)]
    crossed = run(load_continuation(dump_branch(job.branch), SPEC), policies[0])
    here = run(continuation(SPEC, PARENT, turn, 77), policies[1])
    assert crossed.error is None
    assert (crossed.messages, crossed.rewards, crossed.parent) == (here.messages, here.rewards, ("first", turn))
    # the environment's later rolls depend on the snapshot
    assert [s.state for s in crossed.steps] == [s.state for s in here.steps]
    assert len({s.state for s in crossed.steps}) == turn + 2
    assert (crossed.seed, crossed.env_args, crossed.group_id) == (5, {"sides": 8}, "g")
    (ours,), (theirs,) = (policy.engine.sessions for policy in policies)  # type: ignore[attr-defined]
    assert ours.token_ids == theirs.token_ids and ours.seed == 77


def test_snapshots_travel_with_the_first_row() -> None:
    assert SNAPSHOTS in rows_of(PARENT)[0].extra_fields
    assert SNAPSHOTS not in rows_of(replace(PARENT, snapshots=()))[0].extra_fields


@pytest.mark.parametrize("snapshot", [lambda: 0, (n for n in "ab")], ids=["a lambda", "a generator"])
def test_rows_of_names_unpicklable_snapshots(snapshot: object) -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(snapshot)
    with pytest.raises(ConfigError, match=r"snapshot of dice-v0 can't go to another process.*snapshot_attributes"):
        rows_of(replace(PARENT, snapshots=(snapshot,)))
