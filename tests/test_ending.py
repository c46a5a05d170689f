"""agent_rl.core.ending: how episodes end, what becomes of each, and that one that breaks leaves the others alone."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import agent_rl as ar
from agent_rl.algorithms import Algorithm
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.core.ending import Ending
from agent_rl.core.episode import Episode, EpisodeGroup, Failure, Outcome, Reward, StopReason
from agent_rl.core.messages import Message, ToolCall
from agent_rl.errors import PolicyError, SandboxError, ToolServerError
from agent_rl.rollout import Job, group_jobs, run_episode, run_groups
from agent_rl.rollout.evaluation import rollout_metrics
from tests.doubles import example_episode
from tests.runs import config

STAGES = ("make", "reset", "step", "tool", "score", "group", "close")


class DownError(ConnectionError, ar.InfrastructureError):
    """What an index of one's own raises."""


class UserError(Exception):
    """No error of agent_rl's, though it has the name of one."""


class Breaking(ar.ToolEnv):
    """The third of the instances raises at a stage; the instances after the last are for group rewards."""

    stage = ""
    raises: BaseException = KeyError("broken")
    made = 0
    late: tuple[int, ...] = (3,)

    def __init__(self) -> None:
        Breaking.made += 1
        self.number = Breaking.made
        self.at("make")

    def at(self, stage: str) -> None:
        if stage == self.stage and self.number in self.late:
            raise self.raises

    def reset(self, task, rng):
        self.at("reset")
        return "Answer."

    @ar.tool(inline=True)
    def look(self) -> str:
        self.at("tool")
        return "nothing"

    async def step(self, action):
        self.at("step")
        return await super().step(action)

    @ar.reward
    def first(self, episode) -> float:
        self.at("score")
        return float(self.number % 2)

    @ar.group_reward
    def ranked(self, group) -> list[float]:
        if self.stage == "group":
            raise self.raises
        return [0.5] * len(group.episodes)

    def close(self):
        self.at("close")

    def oracle(self):
        yield ar.Message("assistant", tool_calls=(ToolCall("c", "look", {}),))
        yield "done"


ar.register("ending/breaking-v0", tasks=lambda split, index: {"index": index}, splits=("train", "eval"))(Breaking)


@pytest.fixture(autouse=True)
def unbroken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaking, "made", 0)


def breaking(monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException, *late: int) -> None:
    monkeypatch.setattr(Breaking, "stage", stage)
    monkeypatch.setattr(Breaking, "raises", error)
    monkeypatch.setattr(Breaking, "late", late or (3,))


def failed(where: str, type: str) -> dict[str, Any]:
    return {"error": Failure(where, type, "why"), "outcome": Outcome.FAILED, "stop_reason": StopReason.ERROR}


CUT = {"outcome": Outcome.TRUNCATED, "stop_reason": StopReason.TURNS}
UNREAD = Message("assistant", tool_calls=(ToolCall("c", "look", {}, error="no JSON"),))


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        ({}, "ok"),
        (CUT, "truncated"),
        (CUT | {"messages": (Message("user", "?"), UNREAD)}, "parse_error"),
        (CUT | {"messages": (UNREAD, Message("tool", "no JSON"), Message("assistant", "49"))}, "truncated"),
        (failed("step", "ZeroDivisionError"), "env_crash"),
        (failed("step", "ToolServerError"), "tool_infra"),
        (failed("step", "RemoteError"), "tool_infra"),
        (failed("reset", "SandboxError"), "sandbox_lost"),
        (failed("policy", "PolicyError"), "policy_error"),
        (failed("policy", "ValueError"), "policy_error"),
        (failed("policy", "TimeoutError"), "timeout"),
        (failed("reset", "TimeoutError"), "timeout"),
        (failed("score", "TimeoutError"), "judge_failed"),
        (failed("score", "KeyError"), "judge_failed"),
        (failed("step", "CancelledError"), "cancelled"),
        ({"rewards": (Reward("judge", None, error="late"),)}, "judge_failed"),
        ({"rewards": (Reward("noted", None, weight=0.0, error="late"), Reward("correct", 1.0))}, "ok"),
    ],
)
def test_ending_follows_from_what_an_episode_stores(changes: dict[str, Any], ending: str) -> None:
    assert example_episode(**changes).ending == ending


def test_ending_counts_in_the_metrics_of_a_step() -> None:
    episodes = [example_episode("a"), *(example_episode(k, **failed("reset", "SandboxError")) for k in "bc")]
    assert {name: n for name, n in rollout_metrics(episodes).items() if "failed" in name} == {
        "rollout/failed": 2.0,
        "rollout/failed/sandbox_lost": 2.0,
    }


@pytest.mark.parametrize(
    ("error", "retries", "made"),
    [
        (SandboxError("gone"), {"sandbox_lost": 2}, 3),
        (SandboxError("gone"), {"sandbox_lost": 1}, 2),
        (SandboxError("gone"), {"env_crash": 2}, 1),
        (ToolServerError("down"), {"tool_infra": 4}, 3),
        (DownError("down"), {"tool_infra": 2}, 3),
        (UserError("my own"), {"tool_infra": 2}, 1),
        (asyncio.CancelledError(), {"cancelled": 2}, 3),
    ],
)
def test_episode_is_run_again_as_its_ending_says(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, retries: dict[str, int], made: int
) -> None:
    breaking(monkeypatch, "reset", error, 1, 2)
    wanted = {Ending(name): n for name, n in retries.items()}
    job = Job(ar.spec("ending/breaking-v0"), {}, 0, retries=wanted)
    episode = asyncio.run(run_episode(job, ar.oracle()))
    assert Breaking.made == made and (episode.ending == "ok") == (made == 3)


@pytest.mark.parametrize("what", ["train", "mask", "exclude"])
def test_truncated_episodes_are_trained_on_masked_or_excluded(what: str) -> None:
    def scored(name: str, value: float, **changes: Any) -> Episode:
        return example_episode(name, rewards=(Reward("correct", value),), **changes)

    group = EpisodeGroup("g0", (scored("a", 1.0), scored("b", 0.5), scored("c", 0.0, **CUT)))
    settings = AlgorithmConfig.model_validate({"endings": {"truncated": what}})
    x = Algorithm(settings).experience([group])
    assert x.kept.tolist() == [True, True, what == "train"]
    assert x.scores.isnan().tolist() == [False, False, what == "exclude"]
    assert x.components.isnan().flatten().tolist() == [False, False, what == "exclude"]
    greedy = EpisodeGroup("g1", (scored("d", 1.0),), scored("e", 0.0, **CUT))
    assert Algorithm(settings).experience([greedy]).baselines.isnan().tolist() == [what == "exclude"]


@pytest.mark.filterwarnings("ignore:.*close.. failed")
@pytest.mark.parametrize("error", [KeyError("broken"), SystemExit("broken")], ids=["error", "exit"])
@pytest.mark.parametrize("stage", STAGES)
def test_group_keeps_seven_of_eight_when_one_breaks(
    monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException
) -> None:
    breaking(monkeypatch, stage, PolicyError("broken") if stage == "tool" else error)
    jobs = group_jobs(ar.spec("ending/breaking-v0"), {"index": 0}, 8, 0)
    (group,) = asyncio.run(run_groups(jobs, ar.oracle(), concurrency=1))
    endings = Counter(episode.ending for episode in group.episodes)
    broken = {"make": "env_crash", "reset": "env_crash", "step": "env_crash", "tool": "policy_error"}
    broken |= {"score": "judge_failed"}
    if stage == "group":
        assert endings == {"judge_failed": 8} and all(
            type(error).__name__ in str(e.rewards[-1].error) for e in group.episodes
        )
    else:
        assert endings == ({"ok": 7, broken[stage]: 1} if stage in broken else {"ok": 8})
        assert sum(episode.reward is not None for episode in group.episodes) == (7 if stage in broken else 8)


def test_group_whose_scorer_cannot_be_made_is_not_scored(monkeypatch: pytest.MonkeyPatch) -> None:
    breaking(monkeypatch, "make", OSError("no room"), 9)  # the instance for the group's rewards
    jobs = group_jobs(ar.spec("ending/breaking-v0"), {"index": 0}, 8, 0)
    (group,) = asyncio.run(run_groups(jobs, ar.oracle()))
    assert [episode.rewards[-1].error for episode in group.episodes] == ["OSError: no room"] * 8
    assert all(episode.value("first") is not None and episode.reward is None for episode in group.episodes)


@pytest.mark.filterwarnings("ignore:.*close.. failed")
def test_training_step_scores_seven_of_eight(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    rollout = {"groups": 1, "samples": 8, "max_tokens": 4}
    actor = load_actor(folder / "checkpoint", slots=8, context=128)
    settings = config(tmp_path, env="ending/breaking-v0", rollout=rollout)
    for stage in ("make", "reset", "step", "score", "close"):
        breaking(monkeypatch, stage, KeyError("broken"), 3)
        monkeypatch.setattr(Breaking, "made", 0)
        result = Trainer(ar.spec("ending/breaking-v0"), actor, settings).train_step()
        scored = sum(episode.reward is not None for episode in result.episodes)
        assert (len(result.episodes), result.metrics["rollout/failed"]) == (8, 8.0 - scored)
        assert scored >= 7, stage


class Slow(ar.Env):
    """Takes a few turns of the event loop to close."""

    closing: asyncio.Event
    closed = 0

    def reset(self, task, rng):
        return "Answer."

    def step(self, action):
        return ar.Step(terminated=True)

    @ar.reward
    def right(self, episode) -> bool:
        return True

    async def close(self) -> None:
        Slow.closing.set()
        for _ in range(5):
            await asyncio.sleep(0)
        Slow.closed += 1

    def oracle(self):
        yield "done"


ar.register("ending/slow-v0")(Slow)


@pytest.mark.parametrize("times", [1, 2])
def test_close_under_way_is_not_cut_short_by_a_cancellation(times: int) -> None:
    async def main() -> None:
        Slow.closing = asyncio.Event()
        task = asyncio.create_task(run_episode(Job(ar.spec("ending/slow-v0"), {}, 0), ar.oracle()))
        await Slow.closing.wait()
        for _ in range(times):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task
        assert Slow.closed == 1

    Slow.closed = 0
    asyncio.run(main())
