"""agent_rl.backends.verl.worker.agent_loop and .dataset: episodes are sampled as their rows ask."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from doubles import Silent  # site-packages has a `tests`, too
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import DictConfigWrap
from verl.workers.rollout.replica import TokenOutput

from agent_rl.backends.verl.config.settings import VerlConfig, verl_settings
from agent_rl.backends.verl.driver import run as launch
from agent_rl.backends.verl.worker.agent_loop import EnvAgentLoop
from agent_rl.backends.verl.worker.dataset import TaskDataset
from agent_rl.backends.verl.worker.rows import SNAPSHOTS, dump_branch, episode_of
from agent_rl.core.episode import Episode, Origin
from agent_rl.core.messages import Message, ToolCall
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import ConfigError
from agent_rl.rendering import load_renderer, train_tokenizer
from agent_rl.rendering.hermes import write_call
from agent_rl.rollout.job import Branch, Job


def call(operator: str, left: int, right: int) -> Message:
    arguments = {"operator": operator, "left": left, "right": right}
    return Message("assistant", tool_calls=(ToolCall("c", "calculator", arguments),))


CALL, AGAIN = call("+", 1, 2), call("*", 3, 2)
TOKENIZER = train_tokenizer([write_call(m.tool_calls[0]) for m in (CALL, AGAIN)] * 9, 500)
RENDERER = load_renderer(TOKENIZER)
REFERENCE = {"rollout": {"max_model_len": 400, "multi_turn": {}}, "actor": {"strategy": "fsdp2"}}
CONFIG = OmegaConf.create(
    {"actor_rollout_ref": REFERENCE, "data": {"agent_rl": {"routes": None, "store_experts": False}}}
)
SAMPLING = {"temperature": 0.7, "top_p": 1.0, "top_k": -1}
REMAX = {"advantage": "over-greedy"}
VINE = {"advantage": "state-values", "vine": {"continuations": 2, "max_episodes": 6}}


@dataclass(eq=False)  # hashed by identity, as verl's client is
class Server:
    """verl's client: says these messages in turn, and remembers what it was asked."""

    replies: list[Message]
    asked: list[tuple[list[int], dict[str, Any]]] = field(default_factory=list)

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> TokenOutput:
        self.asked.append((prompt_ids, sampling_params))
        ids = RENDERER.reply(self.replies[len(self.asked) - 1])
        return TokenOutput(token_ids=ids, log_probs=[-0.5] * len(ids), extra_fields={"min_global_steps": 3})


def rows(algorithm: dict[str, object], files: str) -> TaskDataset:
    settings = verl_settings(
        VerlConfig.model_validate(
            {"env": "calculator-v0", "start_from": "m", "algorithm": algorithm, "rollout": {"samples": 2}}
        ),
        Path("r"),
    )
    return TaskDataset(files, OmegaConf.create({"agent_rl": settings["data.agent_rl"]}))


def loop_of(server: Server, **arguments: Any) -> EnvAgentLoop:
    """Make an agent loop as a worker does."""
    given = {"env": "calculator-v0", "env_args": {}, "imports": [], "seed": 0, "max_tokens": 64, **arguments}
    return EnvAgentLoop(DictConfigWrap(CONFIG), server, TOKENIZER, None, None, DictConfigWrap(CONFIG.data), **given)


def run(row: dict[str, Any], session: int, *replies: Message) -> tuple[Episode, dict[str, Any], Server]:
    """Run a row as an agent loop's worker does; return the episode, what its row carries, and the server."""
    server = Server([*replies])

    async def output() -> Any:
        loop = loop_of(server)
        (output,) = await loop.run(SAMPLING, **row, session_id=session, global_steps=4)
        return output

    carried = asyncio.run(output()).extra_fields
    episode = episode_of(carried)
    assert episode is not None and episode.error is None, episode and episode.error
    return episode, carried, server


def row_of(algorithm: dict[str, object]) -> dict[str, Any]:
    row = rows(algorithm, "train")[0]
    return {name: value for name, value in row.items() if name != "__rollout_n__"}  # verl takes it out


def test_agent_loop_plays_greedy_session_with_first_seed() -> None:
    assert rows(REMAX, "train")[0]["__rollout_n__"] == 3
    found = [run(row_of(REMAX), session, CALL, Message("assistant", "3")) for session in range(3)]
    assert [[params["temperature"] for _, params in server.asked] for *_, server in found] == [
        [0.7, 0.7],
        [0.7, 0.7],
        [0.0, 0.0],
    ]
    first, second, greedy = (episode for episode, *_ in found)
    assert (first.id, greedy.id) == ("train-00004-0000000-00", "train-00004-0000000-greedy")
    assert first.origin == Origin("train", "train", 4)
    assert greedy.origin == replace(first.origin, greedy=True)
    assert greedy.seed == first.seed != second.seed and greedy.group_id == first.group_id
    assert not any(SNAPSHOTS in carried for _, carried, _ in found)


def test_agent_loop_runs_a_row_without_our_columns() -> None:
    for row in (rows({}, "train")[0], rows(REMAX, "eval:3")[0], rows(VINE, "eval:3")[0]):
        assert not {"__rollout_n__", "greedy", "snapshots"} & row.keys()
    *_, server = run(row_of({}), 2, Message("assistant", "3"))
    assert server.asked[0][1]["temperature"] == 0.7


def test_agent_loop_runs_every_kind_of_episode_again() -> None:
    parent, *_ = run(row_of(VINE), 1, CALL, Message("assistant", "3"))

    async def jobs() -> list[Job]:
        loop = loop_of(Server([]), retries={"env_crash": 2})
        branch = {"branch": dump_branch(Branch(parent, 1, 55))}
        given = {**row_of(REMAX), "global_steps": 4}
        return [
            loop._job(branch, SamplingParams()),
            *(loop._job({**given, "session_id": n}, SamplingParams(temperature=1.0 - n)) for n in (0, 1)),
        ]

    found = asyncio.run(jobs())
    assert found[0].branch is not None and found[2].origin.greedy
    assert [job.retries for job in found] == [{"env_crash": 2}] * 3


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_agent_loop_continues_a_branch_from_its_turn(turn: int) -> None:
    parent, carried, old = run(row_of(VINE), 1, CALL, AGAIN, Message("assistant", "3"))
    assert len(carried[SNAPSHOTS]) == len(parent.snapshots) == 3
    row = {"branch": dump_branch(Branch(parent, turn, 55)), "uid": "u", "index": 0}
    episode, _, server = run(row, 0, AGAIN, Message("assistant", "7"))
    assert episode.parent == (parent.id, turn)
    assert server.asked[0][0] == old.asked[turn][0]  # the ids sampled after the branch, then and now
    assert [params["temperature"] for _, params in server.asked] == [0.7, 0.7]
    assert server.asked[0][1]["seed"] == 55
    assert episode.messages[: 1 + 2 * turn] == parent.messages[: 1 + 2 * turn]
    # the calculator's answers by each turn, those before the branch included
    answers = ["", "1+2=3", "1+2=3; 2*3=6"][: turn + 1]
    assert [s.state for s in episode.steps][: turn + 1] == answers
    assert episode.steps[-1].state == {0: "2*3=6", 1: "1+2=3; 2*3=6", 2: "1+2=3; 2*3=6"}[turn]


def test_start_refuses_an_environment_without_snapshots(tmp_path: Path) -> None:
    settings = {"env": Silent.id, "start_from": "m", "algorithm": VINE, "eval": {"split": "eval"}}
    with pytest.raises(ConfigError, match=r"silent-v0 has no snapshots: list .* in Silent.snapshot_attributes"):
        launch.start(VerlConfig.model_validate(settings | {"runs_dir": str(tmp_path)}))
    assert not any(tmp_path.iterdir())
