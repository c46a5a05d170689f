"""agent_rl.rollout.group: rewards that compare the episodes of one task."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import agent_rl as ar
from agent_rl.algorithms import Algorithm, AlgorithmConfig
from agent_rl.backends.embedded.run import start_run
from agent_rl.backends.group_sampling import require_hooks
from agent_rl.cli import main
from agent_rl.core.episode import EpisodeGroup, Outcome, Reward, group_episodes
from agent_rl.errors import ConfigError, DefinitionError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import register, spec
from agent_rl.gym.reward import group_reward, reward
from agent_rl.rollout import group_jobs, run_groups, score_groups
from agent_rl.rollout.evaluation import trajectory_metrics
from agent_rl.store.codec import dump_line, load_line
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from agent_rl.view.text import failure_lines, print_episode
from tests.doubles import Dice, dice_spec, example_episode, play
from tests.runs import config


class Compared(Dice):
    """Rewards the share of the group's other episodes that rolled less."""

    opened: list["Compared"] = []  # noqa: RUF012

    def __init__(self, sides: int = 6) -> None:
        super().__init__(sides)
        self.opened.append(self)

    @group_reward(weight=0.5)
    def rank(self, group: EpisodeGroup) -> list[float | None]:
        assert not hasattr(self, "task")  # not reset
        seeds = [e.seed for e in group.episodes]
        return [None if s == min(seeds) else sum(o < s for o in seeds) / (len(seeds) - 1) for s in seeds]


def example_group(*outcomes: Outcome, cls: type[Env] = Compared, budget: Budget | None = None) -> EpisodeGroup:
    """Score a group of episodes with the seeds 0, 1, ...; one for each outcome."""
    episodes = [example_episode(f"e{i}", seed=i, outcome=o, env_args={}) for i, o in enumerate(outcomes)]
    (group,) = asyncio.run(score_groups(group_episodes(episodes), dice_spec(cls, budget)))
    return group


DONE, FAILED = Outcome.TERMINATED, Outcome.FAILED


def test_group_rewards_are_added_to_each_finished_episode():
    Dice.closed.clear()
    group = example_group(DONE, FAILED, DONE, DONE)
    assert [e.rewards[3:] for e in group.episodes] == [
        (Reward("rank", None, 0.5, "group"),),
        (),
        (Reward("rank", 0.5, 0.5, "group"),),
        (Reward("rank", 1.0, 0.5, "group"),),
    ]
    assert [e.reward for e in group.episodes][:2] == [None, None]
    assert group.episodes[3].reward == pytest.approx(1 / 3 + 0.125 + 0.5)
    assert Dice.closed == ["unopened"]


def test_group_without_finished_episodes_is_not_scored():
    before = len(Compared.opened)
    assert all(len(e.rewards) == 3 for e in example_group(FAILED, FAILED).episodes)
    assert len(Compared.opened) == before


def test_score_groups_passes_groups_without_group_rewards():
    groups = group_episodes([example_episode("a")])
    assert asyncio.run(score_groups(groups, dice_spec())) == groups


class Never:
    """An awaitable that never ends; unlike a coroutine, it may be left alone, by who gets it too late."""

    def __await__(self):
        return asyncio.Event().wait().__await__()


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("raises", "KeyError: 'no judge'"),
        ("blocks", "Broken.judge took more than 0.05 s"),
        ("hangs", "Broken.judge took more than 0.05 s"),
        ("short", "ValueError: group reward Broken.judge returned 1 values for 2 episodes"),
        ("number", "TypeError: group reward Broken.judge returned 3; return one value per episode"),
        ("nan", "ValueError: reward Broken.judge returned nan"),
    ],
)
def test_failing_group_reward_stores_its_reason(way, reason, caplog):
    release = threading.Event()

    class Broken(Dice):
        @group_reward
        def judge(self, group):
            match way:
                case "raises":
                    raise KeyError("no judge")
                case "blocks":
                    release.wait(30)
                case "hangs":
                    return Never()
            return {"short": [1.0], "number": 3, "nan": [1.0, float("nan")]}[way]

        @group_reward
        async def other(self, group):
            return (1.0, 0.0)

    seconds = 0.05 if way in ("blocks", "hangs") else 60.0  # others wait for a thread of the machine's alone
    group = example_group(DONE, DONE, cls=Broken, budget=Budget(score_seconds=seconds))
    release.set()
    assert f"group reward Broken.judge failed: {reason}" in caplog.text
    (counted,) = failure_lines(group.episodes)
    assert counted.startswith(f"2 not scored: group reward judge: {reason}")
    with (console := Console(width=200)).capture() as printed:
        print_episode(group.episodes[0], console)
    assert reason in printed.get()
    for episode, value in zip(group.episodes, (1.0, 0.0), strict=True):
        judge, other = episode.rewards[3:]
        assert (judge.value, other) == (None, Reward("other", value, 1.0, "group"))
        assert judge.error is not None and judge.error.startswith(reason)
        assert episode.reward is None
        assert load_line(dump_line(episode)).rewards == episode.rewards
    assert trajectory_metrics(group.episodes)["rollout/broken_rewards"] == 1.0


def test_run_groups_scores_in_job_order():
    jobs = [job for n in range(3) for job in group_jobs(dice_spec(Compared), {"n": n}, 4, 0, env_args={"sides": 4})]
    groups = asyncio.run(run_groups(jobs, play("6")))
    assert [(g.task["n"], len(g.episodes)) for g in groups] == [(0, 4), (1, 4), (2, 4)]
    assert all(sum(e.value("rank") is None for e in g.episodes) == 1 for g in groups)
    assert Compared.opened[-1].sides == 4
    assert asyncio.run(run_groups([], play())) == []


def test_run_groups_keeps_order_for_repeated_tasks():
    jobs = [job for n in (0, 1, 0) for job in group_jobs(dice_spec(Compared), {"n": n}, 2, 0)]
    groups = asyncio.run(run_groups(jobs, play("6")))
    assert [(g.task["n"], len(g.episodes)) for g in groups] == [(0, 2), (1, 2), (0, 2)]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"rank": lambda self: []}, r"must be a method that takes the finished group: def <lambda>\(self, group\)"),
        ({"rank": lambda self, group: [], "weight": float("inf")}, "give a finite number"),
    ],
)
def test_group_reward_refuses_wrong_signature_and_weight(body, message):
    with pytest.raises(DefinitionError, match=message):
        group_reward(weight=body.get("weight", 1.0))(body["rank"])


def test_group_reward_refuses_the_name_of_a_reward():
    with pytest.raises(DefinitionError, match="are both rewards called 'same'"):
        one, two = reward(name="same")(lambda self, episode: 1), group_reward(name="same")(lambda self, group: [])
        type("Twice", (Dice,), {"one": one, "two": two})


@pytest.mark.parametrize(("advantage", "vine"), [("over-greedy", {}), ("state-values", {"max_episodes": 8})])
def test_single_episode_advantages_refuse_group_rewards(advantage, vine):
    algorithm = Algorithm(AlgorithmConfig.model_validate({"advantage": advantage, "vine": vine}))
    with pytest.raises(
        ConfigError, match=f"advantage={advantage} compares with single episodes, but dice-v0 has @group"
    ):
        require_hooks(dice_spec(Compared), algorithm)


@register("ranked-calculator-v0", tasks=spec("calculator-v0").tasks.get, splits=("train", "eval", "dev"))
class RankedCalculator(spec("calculator-v0").cls):  # type: ignore[misc]
    """Calculator, where the shortest final answer of a group earns a little more."""

    @ar.group_reward(weight=0.25)
    def short(self, group: EpisodeGroup) -> list[float]:
        lengths = [len(e.final_text) for e in group.episodes]
        return [float(n == min(lengths)) for n in lengths]


@register("unranked-calculator-v0", tasks=spec("calculator-v0").tasks.get, splits=("train", "eval"))
class UnrankedCalculator(spec("calculator-v0").cls):  # type: ignore[misc]
    """Calculator, whose group reward always fails."""

    @ar.group_reward
    def short(self, group: EpisodeGroup) -> list[float]:
        raise KeyError("lengths")


def test_rollout_command_says_that_a_group_reward_failed(tmp_path: Path, capsys):
    settings = ["env=unranked-calculator-v0", "policy=oracle", "n=1", "samples=2", "split=train"]
    assert main(["rollout", *settings, f"out={tmp_path}/e.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert "2 not scored: group reward short: KeyError: 'lengths'" in printed
    assert "The oracle solves all" not in printed


def test_run_scores_groups_and_evaluate_does_not():
    episodes = ar.run("ranked-calculator-v0", n=2, samples=4)
    assert [e.value("short") for e in episodes] == [1.0] * 8
    assert ar.evaluate("ranked-calculator-v0", n=2, split="dev").reward == pytest.approx(1.1)


def test_training_on_the_embedded_backend_scores_groups(tmp_path: Path):
    run = start_run(config(tmp_path, env="ranked-calculator-v0", steps=1), Progress())
    trained = [e for e in read_episodes(run) if e.origin.purpose == "train"]
    assert len(trained) == 12
    for group in group_episodes(trained):
        finished = [e for e in group.episodes if e.trainable]
        lengths = [len(e.final_text) for e in finished]
        assert [e.value("short") for e in finished] == [float(n == min(lengths)) for n in lengths]
    assert not any(e.value("short") is not None for e in read_episodes(run) if e.origin.purpose == "eval")
    assert replace(trained[0], rewards=()).origin.split == "train"


@register("sorting-rewards-v0", tasks=[{"n": n, "words": ["b", "a"]} for n in range(4)])
class SortingRewards(ar.ToolEnv):
    def reset(self, task, rng):
        return f"{task['words']}"

    @reward
    def sorted_words(self, episode):
        episode.task["words"].sort()
        return True

    @group_reward
    def shortened_words(self, group):
        return [float(len(episode.task.pop("words"))) for episode in group.episodes]

    def oracle(self):
        yield "a"


def test_rewards_that_change_the_task_change_no_episode():
    episodes = ar.run("sorting-rewards-v0", "oracle", n=1, samples=3, split="train", concurrency=1)
    assert [episode.messages[0].content for episode in episodes] == ["['b', 'a']"] * 3
    assert [episode.task["words"] for episode in episodes] == [["b", "a"]] * 3
    assert [episode.reward for episode in episodes] == [3.0] * 3
