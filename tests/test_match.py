"""Games for several players: matches, their episodes, groups and failures, and nim-v0."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
from doubles import small_renderer

import agent_rl as ar
from agent_rl.backends.embedded.run import start_run
from agent_rl.core.ending import Ending
from agent_rl.core.trajectory import FinishReason
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.gym.registry import spec
from agent_rl.gym.tasks import RL_START
from agent_rl.policy import Scripted, TokenPolicy, demonstrator, oracle
from agent_rl.policy.base import Reply
from agent_rl.rollout import Job, run_episode, run_groups, run_jobs, summarise
from agent_rl.rollout.match import match_jobs
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from tests.runs import config

NIM = spec("nim-v0")
TASK = {"stones": 7, "most": 3}


def answers(*texts: str) -> Scripted:
    return Scripted(lambda env, seed: (text for text in texts))


def match(env: ar.EnvSpec, *policies: ar.AnyPolicy, budget: ar.Budget | None = None) -> list[ar.Episode]:
    jobs = match_jobs(Job(env, TASK, 5, "task", budget, id="m"), policies)
    return asyncio.run(run_jobs(jobs, oracle(), concurrency=1))


def contents(episode: ar.Episode) -> list[str]:
    return [message.content for message in episode.messages]


def test_match_gives_each_player_an_episode() -> None:
    first, second = match(NIM, answers("3", "3"), answers("1"))
    assert contents(first) == ["7 stones, take 1 to 3 in turn, the last one wins", "3", "3 left", "3"]
    assert contents(second) == ["7 stones, take 1 to 3 in turn, the last one wins\n4 left", "1", "0 left"]
    assert (first.seat, first.reward, first.id, first.group_id) == (0, 1.1, "m-seat0", "task-seat0")
    assert (second.seat, second.reward, second.id, second.group_id) == (1, 0.1, "m-seat1", "task-seat1")
    assert first.seed != second.seed and first.stop_reason is second.stop_reason is ar.StopReason.DONE


def test_group_reward_alone_is_all_that_players_earn() -> None:
    class Judged(ar.Game):
        def begin(self, task: ar.Task, rng: np.random.Generator) -> None:
            self.tell("go")

        def play(self, action: ar.Message) -> None:
            self.turn, self.over = 1, self.turn == 1

        def oracle(self) -> ar.Script:
            yield "b"

        @ar.group_reward(weight=0.5)
        def best(self, group: ar.EpisodeGroup) -> list[float]:
            return [1.0] * len(group.episodes)

    ar.register("judged-game-v0", tasks=[{}])(Judged)
    for policy in (answers("a"), [answers("a"), answers("b")]):
        for episode in ar.run("judged-game-v0", policy):
            assert ([r.name for r in episode.rewards], episode.success) == (["best"], True)


def test_trajectories_hold_what_each_player_saw_and_sampled() -> None:
    renderer = small_renderer()
    texts = ["2", "1", "3", "1"]  # in the order of the turns, of either player
    engine = ScriptedEngine(renderer.reply(ar.Message("assistant", text)) for text in texts)
    episodes = match(NIM, *[TokenPolicy(engine, renderer)] * 2)
    assert [[m.content for m in e.messages if m.role == "assistant"] for e in episodes] == [["2", "3"], ["1", "1"]]
    for episode, session in zip(episodes, engine.sessions, strict=True):
        (trajectory,) = episode.trajectories
        assert trajectory.token_ids.tolist() == session.token_ids  # what the engine was given, and gave back
        sampled = trajectory.token_ids[trajectory.loss_mask].tolist()
        own = [m for m in episode.messages if m.role == "assistant"]
        assert sampled == [i for m in own for i in renderer.reply(m)]
        assert trajectory.token_ids.tolist()[: len(sampled)] != sampled


def test_samples_of_a_seat_are_a_group() -> None:
    jobs = [j for n in range(3) for j in match_jobs(Job(NIM, TASK, n, "task", origin=ar.Origin("train", sample=n)))]
    groups = asyncio.run(run_groups(jobs, demonstrator(), concurrency=2))
    assert [group.id for group in groups] == ["task-seat0", "task-seat1"]
    for seat, group in enumerate(groups):
        assert [(e.seat, e.origin.sample) for e in group.episodes] == [(seat, 0), (seat, 1), (seat, 2)]
    for one, other in zip(*(group.episodes for group in groups), strict=True):
        assert sorted([one.value("won"), other.value("won")]) == [0.0, 1.0]


def test_policies_meet_by_name() -> None:
    episodes = ar.run("nim-v0", ["oracle", {"name": "constant", "text": "1"}], n=4, split="eval")
    assert [episode.seat for episode in episodes].count(0) == 4
    assert {(e.seat, e.value("won")) for e in episodes} == {(0, 1.0), (1, 0.0)}
    with pytest.raises(ar.ConfigError, match="has 2 players, and 1 policies"):
        ar.run("nim-v0", ["oracle"])
    with pytest.raises(ar.ConfigError, match="no game"):
        ar.run("guess-v0", ["oracle", "oracle"])


def test_failed_player_fails_the_match_without_a_score() -> None:
    first, second = match(NIM, answers("1", "1"), answers("1"))  # the second script ends too early
    assert [e.outcome for e in (first, second)] == [ar.Outcome.FAILED] * 2 and first.reward is second.reward is None
    assert first.error is not None and "seat 1 failed: the script ended" in first.error.message


class FailsFirst(NIM.cls):  # type: ignore[misc, name-defined]
    """A game that can't be begun, or goes down in a move, the first times."""

    failures: ClassVar[dict[str, int]] = {}

    def fail(self, stage: str) -> None:
        self.failures[stage] -= 1
        if self.failures[stage] >= 0:
            raise RuntimeError("down")

    async def open(self, task: ar.Task, rng: np.random.Generator) -> None:
        self.fail("open")
        await super().open(task, rng)

    async def move(self, action: ar.Message) -> None:
        self.fail("move")
        await super().move(action)


@pytest.mark.parametrize("stage", ["open", "move"])
def test_failed_match_is_run_again_as_a_whole(stage: str) -> None:
    def ended(failures: int, ending: Ending, retries: int) -> list[str]:
        FailsFirst.failures.update({"open": 0, "move": 0, stage: failures})
        job = Job(replace(NIM, cls=FailsFirst), TASK, 5, "task", retries={ending: retries})
        return [str(e.ending) for e in asyncio.run(run_jobs(match_jobs(job), oracle()))]

    assert ended(2, Ending.ENV_CRASH, 2) == ["ok", "ok"]
    assert "env_crash" in ended(3, Ending.ENV_CRASH, 2) and FailsFirst.failures[stage] == 0
    assert "env_crash" in ended(2, Ending.TOOL_INFRA, 2)  # what the other player's failure looks like
    assert FailsFirst.failures[stage] == 1


def test_budget_of_one_player_cuts_the_match() -> None:
    first, second = match(NIM, answers("1"), answers("1"), budget=ar.Budget(turns=1))
    assert (first.stop_reason, second.stop_reason) == (ar.StopReason.TURNS, ar.StopReason.ENV_TRUNCATED)
    assert first.value("won") == second.value("won") == first.value("legal") == 0.0


def test_match_that_ends_before_a_turn_is_not_scored() -> None:
    class Quick(ar.Game):
        closed: ClassVar[list[int]] = []

        async def begin(self, task: ar.Task, rng: np.random.Generator) -> None:
            self.tell("go")

        def play(self, action: ar.Message) -> None:
            self.over = action.content == "end"
            self.turn = 2

        async def close(self) -> None:
            self.closed.append(1)

    ar.register("match-test/quick-v0")(Quick)
    env = spec("match-test/quick-v0")
    first, second = match(env, answers("end"), answers("end"))
    assert first.outcome is ar.Outcome.TERMINATED and second.outcome is ar.Outcome.FAILED
    assert second.error is not None and "before seat 1 had a turn" in second.error.message
    first, second = match(env, answers("on"), answers("on"))
    assert first.error is not None and "turn=2" in first.error.message and second.reward is None
    assert Quick.closed == [1, 1]  # once a match
    with pytest.raises(ar.ConfigError, match="seats are 0 to 1"):
        Quick(2)


def test_match_too_short_for_a_seat_is_not_repeated() -> None:
    class Short(ar.Game):
        begun = 0

        def begin(self, task: ar.Task, rng: np.random.Generator) -> None:
            Short.begun += 1

        def play(self, action: ar.Message) -> None:
            self.over = True

    ar.register("match-test/short-v0")(Short)
    jobs = match_jobs(Job(spec("match-test/short-v0"), TASK, 5, "task", retries={Ending.TOOL_INFRA: 2}))
    first, second = asyncio.run(run_jobs(jobs, answers("end")))
    assert (first.ending, second.ending, Short.begun) == (Ending.OK, Ending.TOOL_INFRA, 1)


class Slow:
    """A policy whose replies take a while; implements `Policy` and `Conversation`."""

    context_limit, trajectories = None, ()

    def start(self, tools: object, seed: int) -> Slow:
        return self

    def observe(self, messages: object) -> int:
        return 0

    async def reply(self, max_tokens: int | None = None) -> Reply:
        await asyncio.sleep(0.12)
        return Reply(ar.Message("assistant", "1"), FinishReason.STOP)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("slow", [0, 1])
def test_match_counts_no_other_players_replies_as_time(slow: int) -> None:
    policies = [answers(*"11111"), answers(*"11111")]
    policies[slow] = Slow()  # type: ignore[call-overload]
    episodes = match(NIM, *policies, budget=ar.Budget(seconds=0.1))
    assert [episode.stop_reason for episode in episodes] == [ar.StopReason.DONE] * 2


def test_blocking_game_plays_in_worker_threads() -> None:
    threads = set()

    class Blocking(NIM.cls):  # type: ignore[misc, name-defined]
        blocking = True

        def begin(self, task: ar.Task, rng: np.random.Generator) -> None:
            threads.add(threading.current_thread())
            super().begin(task, rng)

        def play(self, action: ar.Message) -> None:
            threads.add(threading.current_thread())
            super().play(action)

    env = replace(NIM, cls=Blocking)
    assert match(env, oracle(), oracle())[0].reward == 1.1
    assert asyncio.run(run_episode(Job(env, TASK, 5), oracle())).reward == 1.1
    assert threading.main_thread() not in threads


def test_close_of_a_match_keeps_to_its_time() -> None:
    class Hanging(NIM.cls):  # type: ignore[misc, name-defined]
        async def close(self) -> None:
            await asyncio.sleep(5)

    started = time.monotonic()
    with pytest.warns(RuntimeWarning, match="close took more than the budget's 0.01 s"):
        episodes = match(replace(NIM, cls=Hanging), oracle(), oracle(), budget=ar.Budget(close_seconds=0.01))
    assert episodes[0].reward == 1.1 and time.monotonic() - started < 4


def test_matches_need_their_neighbours() -> None:
    with pytest.raises(ar.ConfigError, match="neighbours"):
        asyncio.run(run_jobs(match_jobs(Job(NIM, TASK, 0))[:1], oracle()))


# alone, and nim-v0


def test_player_meets_the_opponent_alone() -> None:
    job = Job(NIM, TASK, 0, env_args={"seat": 1})
    (episode,) = asyncio.run(run_jobs([job], answers("2", "1", "1")))
    assert contents(episode)[:2] == ["7 stones, take 1 to 3 in turn, the last one wins\n4 left", "2"]
    assert (episode.value("won"), episode.value("legal")) == (0.0, 1.0)


def test_nim_takes_one_for_what_is_no_legal_number() -> None:
    for text in ("", "0", "4", "-1", "two", "²", "3.0", "9" * 5000):
        first, _ = match(NIM, answers(text, "1", "3"), answers("1", "1", "1"))
        assert contents(first)[2] == "5 left" and first.value("legal") == 0.0


def test_nim_oracle_wins_first_and_demonstrations_sometimes() -> None:
    for split in NIM.tasks.splits:
        jobs = [Job(NIM, NIM.tasks.get(split, i), i) for i in range(40)]
        assert {e.reward for e in asyncio.run(run_jobs(jobs, oracle()))} == {1.1}
        if split == "train":
            played = asyncio.run(run_jobs(jobs * 3, demonstrator()))
            assert 0.05 < summarise(played).success.value < 0.8
    parts = [{NIM.tasks.get(split, i)["puzzle"] for i in range(200)} for split in ("train", "eval", "dev")]
    assert not parts[0] & parts[1] and not parts[0] & parts[2] and not parts[1] & parts[2]


# training


def test_self_play_trains_both_seats(tmp_path: Path) -> None:
    rollout = {"groups": 4, "samples": 2, "slots": 5, "max_tokens": 8}
    short = {"self_play": True, "budget": {"tokens": 256, "turns": 2}, "eval": {"n": 1, "dev_n": 1, "every": 0}}
    warm = {"demonstrations": 16, "copy_steps": 1, "clone_steps": 2, "batch": 8}
    run = start_run(config(tmp_path, env="nim-v0", steps=2, rollout=rollout, warm_start=warm, **short), Progress())
    trained = [e for e in read_episodes(run / "episodes.jsonl") if e.origin.purpose == "train"]
    assert sorted((e.group_id, e.seat) for e in trained) == [
        (f"train-{step:05d}-{task:03d}-seat{seat}", seat)
        for step in (0, 1)
        for task in (0, 1)
        for seat in (0, 1)
        for _ in range(2)
    ]
    assert len({episode.id for episode in trained}) == 16
    tasks = {episode.group_id[:15]: episode.task for episode in trained}
    stream = NIM.tasks.stream("train")  # of which each step takes what the one before it left
    assert [tasks[name] for name in sorted(tasks)] == [stream.at(RL_START + place) for place in range(4)]


def test_self_play_is_refused_where_it_means_nothing(tmp_path: Path) -> None:
    for changes, reason in (
        ({"env": "calculator-v0"}, "no game"),
        ({"env": "nim-v0", "algorithm": {"advantage": {"name": "over-greedy"}}}, "single episodes"),
        ({"env": "nim-v0", "rollout": {"slots": 1}}, "a slot for each player"),
    ):
        with pytest.raises(ar.ConfigError, match=reason):
            start_run(config(tmp_path, self_play=True, **changes), Progress())


@pytest.mark.parametrize("seat", [2, -1, 0.5, True, "1", None])
def test_game_refuses_a_seat_that_there_is_not(seat: object) -> None:
    with pytest.raises(ar.ConfigError, match=r"the seats are 0 to 1|env_args\.seat=.* input should be a "):
        ar.run("nim-v0", n=1, env_args={"seat": seat})


@pytest.mark.parametrize(
    ("turn", "told", "problem"),
    [
        (2, None, r"begin set turn=2: the seats are 0 to 1"),
        (0, 5, r"tell\(..., 5\): the seats are 0 to 1"),
        (0, -1, r"tell\(..., -1\): the seats are 0 to 1"),
    ],
)
def test_game_that_begins_with_no_seat_names_the_seats(turn: int, told: int | None, problem: str) -> None:
    class Odd(ar.Game):
        def begin(self, task: ar.Task, rng: np.random.Generator) -> None:
            self.turn = turn
            self.tell("go", told)

    env = replace(NIM, namespace="match-test", name="odd", version=0, cls=Odd)
    jobs = [*match_jobs(Job(env, TASK, 5, "match")), Job(env, TASK, 5, "alone")]
    for episode in asyncio.run(asyncio.wait_for(run_jobs(jobs, oracle()), 10)):
        assert episode.error is not None and re.search(problem, episode.error.message)
