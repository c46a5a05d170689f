"""agent_rl.replay.fork and `agent-rl replay fork`: stored episodes continued from a turn."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.messages import Message
from agent_rl.core.trajectory import Source
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import ConfigError, PolicyError, ReplayError
from agent_rl.gym.budget import Budget
from agent_rl.gym.registry import spec
from agent_rl.policy import AnyPolicy, TokenPolicy
from agent_rl.rendering.chatml import ChatMLRenderer
from agent_rl.rendering.tokenizer import train_tokenizer
from agent_rl.replay.fork import fork_jobs, verify_prefix
from agent_rl.rollout import run_episode
from agent_rl.store.codec import dump_line, load_line
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.store.selection import find_episode
from tests.doubles import CALL, Dice, dice_spec, play, run_dice, sampled, small_renderer, token_policy
from tests.fake_openai import FakeOpenAI, called, in_order, said

OF_THE_README = "agent-rl replay fork runs/latest ID --at-turn K policy=POLICY n=8"
SPEC = dice_spec()
PARENT = load_line(dump_line(run_dice(token_policy(CALL, CALL, CALL, "6"), id="first")))
CUT = load_line(dump_line(run_dice(token_policy(CALL, CALL), budget=Budget(turns=2), id="cut")))


def forked(parent: Episode, turn: int, policy: AnyPolicy, **options: object) -> Episode:
    (job,) = fork_jobs(SPEC, parent, turn, **options)
    asyncio.run(verify_prefix(job))
    return asyncio.run(run_episode(job, policy))


@pytest.mark.parametrize("turn", range(4))
def test_fork_repeats_its_parent_token_by_token(turn: int) -> None:
    policy = token_policy(*[CALL, CALL, CALL, "6"][turn:])
    child = forked(PARENT, turn, policy)
    (old,), (new,) = PARENT.trajectories, child.trajectories
    assert new.token_ids.tolist() == old.token_ids.tolist() == policy.engine.sessions[0].token_ids
    start = next(s.start for s in old.spans if s.source is Source.POLICY and s.turn == turn)
    assert new.spans[0].stop == start and new.spans[0].source is Source.PROMPT
    assert (child.messages, child.steps, child.rewards) == (PARENT.messages, PARENT.steps, PARENT.rewards)
    assert (child.parent, child.seed, child.outcome) == (("first", turn), PARENT.seed, PARENT.outcome)


def test_fork_continues_what_a_budget_cut() -> None:
    child = forked(CUT, 2, token_policy(CALL, "6"))
    whole = run_dice(token_policy(CALL, CALL, CALL, "6"))
    assert child.messages == whole.messages and child.stop_reason is StopReason.DONE and child.parent == ("cut", 2)
    assert child.trajectories[0].token_ids.tolist() == whole.trajectories[0].token_ids.tolist()
    again = forked(child, 3, token_policy("5"))  # of a fork
    assert again.messages[:-1] == whole.messages[:-1] and again.parent == (child.id, 3)
    with pytest.raises(ConfigError, match=r"budget.turns=2 leaves no turn after the 2 before the fork"):
        fork_jobs(SPEC, CUT, 2, budget=Budget(turns=2))
    with pytest.raises(ConfigError, match=r"ended in the last \(done\): nothing follows it; fork at turn 3"):
        fork_jobs(SPEC, PARENT, 4)
    with pytest.raises(ConfigError, match="has 4 turns, counted from 0: there is no 5"):
        fork_jobs(SPEC, PARENT, 5)


def test_fork_before_its_parents_own_part_renders_messages() -> None:
    child = forked(PARENT, 2, token_policy(CALL, "6"))
    again = forked(child, 1, token_policy(CALL, "6"))
    (old,), (new,) = PARENT.trajectories, again.trajectories
    start = old.before(1).tolist()
    assert new.token_ids[: new.spans[0].stop].tolist() == start and again.messages[:3] == PARENT.messages[:3]


def test_fork_renders_messages_of_another_tokenizer() -> None:
    renderer = ChatMLRenderer(train_tokenizer(["roll roll roll die is six"], 470))
    ids = [renderer.reply(Message("assistant", "6"))]
    child = forked(PARENT, 2, TokenPolicy(ScriptedEngine(sampled(ids)), renderer, SamplingParams(max_tokens=64)))
    prompt = renderer.prompt(PARENT.messages[:5], Dice().tools)
    assert child.trajectories[0].token_ids[: len(prompt)].tolist() == prompt and child.reward == 1.0
    untold = replace(PARENT, trajectories=())
    child = forked(untold, 2, token_policy("6"))
    prompt = small_renderer().prompt(PARENT.messages[:5], Dice().tools)
    assert child.trajectories[0].token_ids[: len(prompt)].tolist() == prompt


def test_fork_lets_a_script_play() -> None:
    child = forked(PARENT, 2, play(CALL, "6"))
    assert child.messages[:5] == PARENT.messages[:5] and child.reward == 1.0 and child.trajectories == ()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (
            {"steps": (replace(PARENT.steps[0], reward=1.0), *PARENT.steps[1:])},
            "turn 0: reward differs: recorded 1.0, replayed 0",
        ),
        (
            {"steps": (replace(PARENT.steps[0], truncated=True), *PARENT.steps[1:])},
            "turn 0: truncated differs: recorded True,",
        ),
        (
            {"messages": (Message("user", "rot"), *PARENT.messages[1:])},
            r"the opening: opening\[0\].content differs at 2",
        ),
        ({"seed": 1}, r"turn 0: observation\[0\].content differs at 0: recorded '\d', replayed '\d'"),
    ],
)
def test_fork_refuses_a_prefix_that_differs(change: dict[str, object], found: str) -> None:
    job = fork_jobs(SPEC, replace(PARENT, **change), 2)[0]  # type: ignore[arg-type]
    with pytest.raises(ReplayError, match=f"episode 'first' does not replay: {found}"):
        asyncio.run(verify_prefix(job))


def test_fork_asks_a_model_user_from_its_turn_on() -> None:
    class Buyer(ar.DialogueEnv):
        said: ClassVar[Iterator[int]] = itertools.count()

        async def reset(self, task, rng):
            words = (f"hm {next(self.said)}" for _ in range(4))
            self.user = ar.ModelUser(token_policy(*words), "You buy.")
            return await self.open_dialogue()

    buyer = dice_spec(Buyer, Budget(turns=3))
    parent = run_dice(token_policy("which?", "that?", "this?"), budget=buyer.budget, cls=Buyer)
    (job,) = fork_jobs(buyer, parent, 1)
    asyncio.run(verify_prefix(job))
    child = asyncio.run(run_episode(job, token_policy("red?", "blue?")))
    assert child.messages[:3] == parent.messages[:3] and child.turns == 3 and child.error is None
    assert {m.content for m in child.messages[3:]}.isdisjoint(m.content for m in parent.messages)


def test_fork_refuses_one_players_part_of_a_match() -> None:
    first, second = ar.run("nim-v0", ["demonstrator", "demonstrator"])
    alone = ar.run("nim-v0", "demonstrator", env_args={"seat": 1})[0]
    for episode in (first, second):
        with pytest.raises(ConfigError, match=r"is one player's of a match, .* fork one that was played"):
            fork_jobs(spec("nim-v0"), episode, 0)
    assert len(fork_jobs(spec("nim-v0"), alone, 0)) == 1


def test_fork_refuses_an_environment_that_breaks() -> None:
    job = fork_jobs(SPEC, replace(PARENT, task={"break": "step"}), 2)[0]
    with pytest.raises(ReplayError, match="does not replay: step raised KeyError: 'broken step'"):
        asyncio.run(verify_prefix(job))


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("fork") / "parents.jsonl"
    assert main(["rollout", "env=search-v0", "policy=oracle", "n=2", f"out={file}", "floors=false"]) == 0
    return file


def fork(stored: Path, *words: str) -> int:
    first = next(read_episodes(stored))
    return main(["replay", "fork", str(stored), first.id[:12], *words])


def test_fork_command_stores_a_group(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, parent = tmp_path / "out.jsonl", next(read_episodes(stored))
    filled = {"runs/latest": str(stored), "ID": parent.id, "K": "1", "policy=POLICY": "policy=random", "n=8": "n=3"}
    assert main([filled.get(word, word) for word in OF_THE_README.split()[1:]] + [f"out={out}"]) == 0
    assert "Replayed 1 turn of the episode: the same as recorded." in (shown := capsys.readouterr().out)
    assert f"3 forks of {parent.id[:12]} at turn 1 in {out}" in shown
    children = list(read_episodes(out))
    assert {c.parent for c in children} == {(parent.id, 1)} and len({c.group_id for c in children}) == 1
    assert sorted(c.origin.sample for c in children) == [0, 1, 2] and len({c.seed for c in children}) == 1
    assert all(c.messages[:3] == parent.messages[:3] for c in children)
    assert fork(stored, "--at-turn", "1", "policy=oracle", f"out={out}") == 0, "behind those that are there"
    assert f"forked from  {parent.id} at turn 1" in capsys.readouterr().out and len(list(read_episodes(out))) == 4
    assert fork(stored, "--at-turn", "1", "policy=random", "n=2", f"out={out}") == 0
    drawn = fork_jobs(SPEC, parent, 1, n=6)
    assert sorted(c.origin.sample for c in read_episodes(out)) == [0, 1, 2, 3, 4, 5], "each with a seed of its own"
    assert drawn[4:] == fork_jobs(SPEC, parent, 1, n=2, first=4) and len({job.branch.seed for job in drawn}) == 6


def test_fork_command_continues_with_a_served_model(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    parent, out = next(read_episodes(stored)), tmp_path / "out.jsonl"
    answers = [called(("c", "search", '{"query": "x"}')), said("nobody")]
    with FakeOpenAI(in_order(answers)) as server:
        served = ["policy=openai", "policy.model=m", f"policy.base_url={server.url}", f"out={out}"]
        assert fork(stored, "--at-turn", "1", *served) == 0
    asked, again = (body["messages"] for body in server.asked)
    assert [m["role"] for m in asked] == [m.role for m in parent.messages[:3]]
    assert asked[-2]["tool_calls"][0]["function"]["name"] == "search" and again[:3] == asked
    (child,) = read_episodes(out)
    assert child.messages[:3] == parent.messages[:3] and child.final_text == "nobody" and child.turns == 3


def test_fork_refuses_a_policy_that_only_starts(stored: Path, tmp_path: Path) -> None:
    class Starting:
        def start(self, tools, seed):
            raise NotImplementedError

    out, parent = tmp_path / "out.jsonl", next(read_episodes(stored))
    for turn in (0, 1):
        with pytest.raises(PolicyError, match=r"Starting can't continue an episode: it has no resume\("):
            ar.fork(stored, parent.id, turn, Starting(), out=str(out))
    assert not out.exists()


def test_fork_that_is_interrupted_at_once_leaves_no_run(
    stored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        def start(self, tools, seed):
            raise NotImplementedError

        def resume(self, tools, seed, prefix):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.chdir(tmp_path)
    parent = next(read_episodes(stored))
    for out in (None, "out.jsonl"):
        with pytest.raises(KeyboardInterrupt):
            ar.fork(stored, parent.id, 1, Interrupted(), out=out)
    assert list(tmp_path.iterdir()) == []


def test_fork_command_refuses_what_no_longer_replays(
    stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent, file = next(read_episodes(stored)), tmp_path / "changed.jsonl"
    messages = list(parent.messages)
    messages[2] = replace(messages[2], content="\x1b[2J" + messages[2].content)
    with EpisodeWriter(file) as writer:
        writer.write(replace(parent, messages=tuple(messages)))
    out = tmp_path / "never"
    assert fork(file, "--at-turn", "1", "policy=oracle", f"out={out}") == 1 and not out.exists()
    error = capsys.readouterr().err
    assert "does not replay: turn 0: observation[0].content differs" in error and "\x1b" not in error
    assert len(error.splitlines()) <= 3 and fork(stored, "--at-turn", "7") == 1
    assert find_episode(file, parent.id).turns == json.loads(file.read_text())["turns"]
