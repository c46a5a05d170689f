"""agent_rl.judge.run: the judge of a run's settings, in rollouts and in training, on either backend."""

import asyncio
import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import agent_rl as ar
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import start_run
from agent_rl.backends.settings import resumed_changes
from agent_rl.backends.verl.config.settings import VerlConfig, agent_loop, verl_settings
from agent_rl.cli import main
from agent_rl.config import check_config
from agent_rl.core.judgement import JudgeFault, Judgement, Verdict
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError, InfrastructureError, StoreError
from agent_rl.gym.registry import spec
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.log import CallLog
from agent_rl.judge.run import CALLS, RUBRICS, check_judges, judge_of_worker, read_rubrics, run_judge, save_rubrics
from agent_rl.rollout.evaluation import rollout_metrics
from agent_rl.runs.commands import rollout_command
from agent_rl.runs.folder import read_config
from agent_rl.runs.rollout import RolloutSettings, floors_of, is_unpaid, resume_rollout, start_rollout
from agent_rl.store.episodes import read_episodes
from agent_rl.view.progress import Progress
from agent_rl.view.results import print_results, result_table
from tests.doubles import example_episode
from tests.fake_judge import WAYS, Asked, answered, fair, words_rubric
from tests.fake_openai import Answer, Body, FakeOpenAI
from tests.judged_env import Sums, judging
from tests.runs import config
from tests.test_checkpoint import full


@pytest.fixture
def judge(tmp_path: Path):
    with judging(tmp_path) as both:
        yield both


def test_rubrics_that_do_not_fit_keep_those_before(tmp_path: Path) -> None:
    one, other = (words_rubric([word]) for word in ("4", "2"))
    save_rubrics([one], file := tmp_path / RUBRICS)
    with full(64), pytest.raises(OSError):
        save_rubrics([other], file)
    assert [*read_rubrics(file)] == [one.label]


def test_rollout_is_judged_logged_and_counted(judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    server, asking = judge
    out = tmp_path / "a" / "episodes.jsonl"
    settings = {"env": "judged/sums-v0", "n": 12, "out": str(out), "judge": asking}
    ran = start_rollout(check_config(RolloutSettings, settings), Progress())
    episodes = list(read_episodes(out))
    unscored = [e for e in episodes if e.reward is None]
    assert {e.ending for e in episodes} == {"ok", "judge_failed"} == {e.ending for e in unscored} | {"ok"}
    assert {r.error for e in unscored for r in e.rewards if r.name == "words"} == {"not judged: refused (2)"}
    assert {(len(e.judgements), e.rewards[-1].source) for e in episodes} == {(2, "judge")}
    assert {j.rubric for e in episodes for j in e.judgements} == set(read_rubrics(out.parent / RUBRICS))
    log = CallLog(out.parent / CALLS)
    assert len(log) == len({json.dumps(body["messages"]) for body in server.asked}) > 0
    log.close()
    prices = asking["prices"]
    print_results(ran.evaluation, Console(), title="sums", judge_prices=prices)
    printed = capsys.readouterr().out
    judged = result_table(ran.evaluation, judge_prices=prices)["judged"]
    assert f"judged: 24, {len(unscored) / 24:.1%} not scored (refused ({2 * len(unscored)})), 0.0% suspect" in printed
    assert f"judge: {judged['usage']['replies']} calls, tokens" in printed and f"cost {judged['cost']:.4g}" in printed
    asked = len(server.asked)
    again = settings | {"out": str(tmp_path / "a" / "more.jsonl"), "n": 1, "policy": {"name": "oracle"}}
    start_rollout(check_config(RolloutSettings, again), Progress())
    assert len(server.asked) == asked  # the log of the folder had it
    (floors,) = floors_of(replace(ran, settings=ran.settings.model_copy(update={"floors": True})), 1.0).values()
    assert len(server.asked) > asked and not [score for score in floors.scores if score.failed == len(episodes)]


def test_commands_that_are_printed_name_the_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @ar.register("judged/letter-v0", tasks={"train": [{}], "eval": [{}]})
    @ar.judge(rubric=words_rubric(["a"]))
    class Letter(ar.ToolEnv):
        def reset(self, task, rng):
            return "Say a."

        def oracle(self):
            yield "a"

    def answer(body: Body) -> Answer:
        return WAYS["ok"][0](asked := Asked.of(body), fair(asked))

    with FakeOpenAI(answer) as server:
        words = ["judge.model=m", f"judge.base_url={server.url}", "judge.samples=3"]
        assert main(["rollout", "env=judged/letter-v0", "policy=oracle", f"out={tmp_path}/e.jsonl", *words]) == 0
    (hint,) = [line for line in capsys.readouterr().out.splitlines() if "train on them: " in line]
    assert shlex.split(hint.partition("agent-rl train ")[2])[-4:] == ["env=judged/letter-v0", *words]
    settings = config(tmp_path, env="judged/letter-v0", judge={"model": "m", "samples": 3, "evolve": True})
    trained = shlex.split(rollout_command(settings, spec("judged/letter-v0"), Path("x")))
    assert trained[-4:] == ["split=eval", "judge.model=m", "judge.samples=3", "policy=x"]


def test_limit_of_cost_changes_when_a_run_goes_on(judge, tmp_path: Path):
    server, asking = judge
    limited = {"model": "m", "base_url": server.url, "prices": asking["prices"], "max_cost": 0.01}
    sizes = {"rollout": {"groups": 1, "samples": 2, "max_tokens": 8}, "eval": {"n": 1, "dev_n": 1}}
    warm = {"demonstrations": 2, "copy_steps": 0, "copy_share": 0.0, "clone_steps": 1, "batch": 2}
    small = config(tmp_path, env="judged/sums-v0", steps=1, warm_start=warm, judge=limited, **sizes)
    with pytest.raises(InfrastructureError, match=r"may then spend as much again, or more with judge\.max_cost=N"):
        start_run(small, Progress())
    (folder,), asked = (tmp_path / "runs").glob("*-*"), len(server.asked)
    with pytest.raises(ConfigError, match=r"^judge\.model can't change when a run is resumed: .*judge\.max_cost"):
        ar.train(resume=folder, progress=False, judge={"max_cost": 9, "model": "other"})
    assert main(["train", f"resume={folder}", "judge.max_cost=9"]) == 0
    assert read_config(folder, TrainConfig).judge.max_cost == 9
    assert len(server.asked) > asked + 1
    assert resumed_changes("verl", {"judge": {"max_cost": None}}) == {"judge.max_cost": None}  # no limit any more


def test_limit_of_cost_changes_when_a_rollout_goes_on(judge, tmp_path: Path):
    out = tmp_path / "c" / "episodes.jsonl"
    settings = {"env": "judged/sums-v0", "n": 2, "out": str(out), "judge": judge[1] | {"max_cost": 0.01}}
    start_rollout(check_config(RolloutSettings, settings), Progress())
    assert main(["rollout", f"resume={out}", "judge.max_cost=9"]) == 0
    ran = resume_rollout(str(out), Progress(), changes={"judge.max_cost": None})
    assert ran.settings.judge.max_cost is None and ran.settings.judge.model == "m"


def test_rollout_whose_judge_spent_its_limit_is_scored_on_retry(
    judge, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out, (_, asking) = tmp_path / "e" / "episodes.jsonl", judge
    settings = [f"judge.{name}={value}" for name, value in asking.items()]
    words = ["rollout", "env=judged/sums-v0", "n=6", "judge.max_cost=0.01", "judge.concurrency=1", "floors=false"]
    assert main([*words, *settings, f"out={out}"]) == 0
    said, stored = capsys.readouterr().out, list(read_episodes(out))
    unpaid = [e for e in stored if is_unpaid(e)]
    assert 0 < len(unpaid) < 6 and f"judge.max_cost is spent, which leaves {len(unpaid)} of 6 episodes wi" in said
    assert f"agent-rl rollout resume={out} retry_failed=true\nOr judge them as they are: agent-rl judge run" in said
    assert main(["rollout", f"resume={out}", "judge.max_cost=9"]) == 0
    assert "judge.max_cost is spent" in capsys.readouterr().out and len(list(read_episodes(out))) == 6
    assert main(["rollout", f"resume={out}", "retry_failed=true", "judge.max_cost=9"]) == 0
    again = list(read_episodes(out))[6:]
    assert {e.group_id for e in again} == {e.group_id for e in unpaid} and not any(map(is_unpaid, again))
    assert "judge.max_cost is spent" not in capsys.readouterr().out


def test_rollout_in_a_folder_that_is_judged_in_is_refused(judge, tmp_path: Path):
    log = CallLog(tmp_path / "d" / CALLS)
    settings = {"env": "judged/sums-v0", "n": 2, "out": str(tmp_path / "d" / "a.jsonl"), "judge": judge[1]}
    with pytest.raises(StoreError, match=r"another run is judging in .*d, .*: wait for its end, or .* out=FOLDER"):
        start_rollout(check_config(RolloutSettings, settings), Progress())
    assert [file.name for file in (tmp_path / "d").iterdir()] == [CALLS]
    log.close()


def test_judge_that_nothing_asks_is_refused(tmp_path: Path):
    model, prices = JudgeConfig(model="m"), JudgeConfig(prices=str(tmp_path / "prices.yaml"))
    few = JudgeConfig(concurrency=2)
    for judge, env, why in (
        (model, "calculator-v0", "model=m changes nothing: calculator-v0 has no @ar.judge"),
        (model, "research-v0", "model=m changes nothing: the judges of research-v0 need no model"),
        (prices, "calculator-v0", "prices.yaml changes nothing: calculator-v0 has no @ar.judge"),
        (few, "calculator-v0", "judge.concurrency=2 changes nothing: calculator-v0 has no @ar.judge"),
        (few, "research-v0", "concurrency=2 changes nothing: the judges of research-v0 need no model"),
    ):
        with pytest.raises(ConfigError, match=why):
            start_rollout(RolloutSettings(env=env, out=str(tmp_path / "b"), judge=judge), Progress())
    check_judges(prices, spec("research-v0"))
    with run_judge(JudgeConfig(), spec("calculator-v0"), tmp_path, workers=2):
        pass


def test_run_without_its_judge_is_refused_before(tmp_path: Path):
    needed = r"judged/sums-v0: rubric 'words' needs a model: w0, w1 has no rule\.\nSet judge\.model"
    for refused in (
        lambda: check_judges(JudgeConfig(), spec("judged/sums-v0")),
        lambda: start_run(config(tmp_path, env="judged/sums-v0"), Progress()),
        lambda: start_rollout(RolloutSettings(env="judged/sums-v0", out=str(tmp_path / "b")), Progress()),
        lambda: ar.run("judged/sums-v0"),
    ):
        with pytest.raises(ConfigError, match=needed) as error:
            refused()
        assert len(str(error.value).splitlines()) <= 3
    assert not list(tmp_path.rglob("episodes.jsonl"))
    check_judges(JudgeConfig(model="m"), spec("judged/sums-v0"))
    check_judges(JudgeConfig(), spec("calculator-v0"))


def test_workers_share_the_limits_of_a_judge(tmp_path: Path):
    whole = JudgeConfig(model="m", requests_per_minute=60, concurrency=4)
    judge = judge_of_worker(whole, tmp_path / "calls.jsonl", 8)
    assert (judge.config.requests_per_minute, judge.config.concurrency) == (7.5, 1)
    assert judge_of_worker(JudgeConfig(), tmp_path / "calls.jsonl", 8) is None


def test_verl_hands_its_judge_to_driver_and_workers(tmp_path: Path):
    judge = {"model": "m", "base_url": "http://judge:8000/v1"}
    run = check_config(VerlConfig, {"env": "calculator-v0", "start_from": "m", "judge": judge})
    assert verl_settings(run, tmp_path)["data.agent_rl"]["judge"] == judge
    (loop,) = agent_loop(run, tmp_path)
    assert (loop["judge"], loop["folder"]) == (judge, str(tmp_path))


def test_demonstration_costs_no_judge():
    episode = answered("42")
    shown = replace(episode, origin=replace(episode.origin, purpose="demonstration"))
    words = vars(Sums)["words"]
    assert asyncio.run(words.score(shown)) is None
    assert asyncio.run(vars(Sums)["judge"].score(shown)).score == 1.0


def test_judge_metrics_add_up_what_judges_said():
    assert not [name for name in rollout_metrics([example_episode()]) if name.startswith("judge/")]
    used = Usage("m", 100, 10, cached_tokens=40, finish_reason="stop", errors=("429",))
    late = Judgement("r", "m", (Verdict("a", error=JudgeFault.TIMEOUT),), None, seconds=2.0, usage=(used, used))
    fine = Judgement("r", "m", (Verdict("a", "yes", 1.0),), 1.0, suspect=("planted",), seconds=1.0, usage=(used,))
    found = rollout_metrics([example_episode(judgements=(late, fine))])
    assert {name: value for name, value in found.items() if name.startswith("judge/")} == {
        "judge/unscored": 0.5,
        "judge/suspect": 0.5,
        "judge/seconds/p50": 1.5,
        "judge/seconds/p99": pytest.approx(1.99),
        "judge/calls": 3,
        "judge/failed_attempts": 3,
        "judge/input_tokens": 300,
        "judge/cached_tokens": 120,
        "judge/output_tokens": 30,
        "judge/faults/timeout": 1,
    }


def test_check_finds_a_rubric_that_pays_for_nothing(capsys: pytest.CaptureFixture[str]):
    @ar.register("judged/short-v0", tasks={"train": [{"n": 4821}], "eval": [{"n": 1733}]})
    @ar.judge(rubric={"name": "short", "criteria": [{"text": "Short.", "rule": {"regex": "^.{0,9}$"}}]})
    class Short(ar.Env):
        def reset(self, task, rng):
            return "Be brief."

        def step(self, action):
            return ar.Step(terminated=True)

    assert main(["check", "judged/short-v0", "n=1"]) == 1
    assert "rubric-empty-answer: an empty answer scores 1" in capsys.readouterr().out
    assert main(["check", "judged/sums-v0", "n=1"]) == 1
    assert "Set judge.model=NAME" in capsys.readouterr().err
