"""`run`, `evaluate` and `train` from Python, in a script and in a running event loop."""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

import agent_rl as ar
from agent_rl.envs.calculator import Calculator
from agent_rl.worker_threads import WorkerCall, outside_loop
from tests.doubles import Silent
from tests.runs import SMALL, assert_same_run, config


def test_run_returns_episodes_in_task_order() -> None:
    episodes = ar.run("calculator-v0", n=3, samples=2, split="dev")
    tasks = [ar.spec("calculator-v0").tasks.get("dev", i) for i in range(3)]
    assert [e.task for e in episodes] == [t for t in tasks for _ in range(2)]
    assert all(e.success for e in episodes) and len({e.seed for e in episodes}) == 6


def test_evaluate_returns_success_rates() -> None:
    assert ar.evaluate("search-v0", "oracle", n=5, split="dev").success.value == 1.0
    assert 0 < ar.evaluate("search-v0", "demonstrator", n=60, split="dev").success.value < 1


def test_run_works_in_a_running_loop() -> None:
    async def notebook() -> int:
        return len(ar.run("calculator-v0", n=2))

    assert asyncio.run(notebook()) == 2


def test_run_names_an_unknown_policy() -> None:
    with pytest.raises(ar.ConfigError, match="Did you mean 'oracle'"):
        ar.run("calculator-v0", "oracel")


def test_run_takes_a_registered_class() -> None:
    assert [e.env for e in ar.run(Calculator, n=1)] == ["calculator-v0"]
    with pytest.raises(ar.ConfigError, match="Unregistered is not registered: decorate it"):
        ar.run(type("Unregistered", (Silent,), {}))


def test_train_matches_the_run_of_same_settings(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def notebook() -> ar.Run:
        return ar.train(**SMALL, algorithm="grpo", runs_dir=str(tmp_path), progress=False)

    trained = asyncio.run(notebook())
    assert_same_run(folder, trained.folder)
    assert capsys.readouterr().out == ""
    assert trained.summary["steps"] == 4 and trained.metrics[-1]["kind"] == "eval"
    used = config(tmp_path, rollout={**SMALL["rollout"], "context": 256})  # made for the demonstrations
    assert trained.config == used.model_copy(update={"runs_dir": str(tmp_path)})
    assert {e.origin.purpose for e in trained.episodes()} == {"train", "eval"}


def test_run_policy_and_checkpoint_play(folder: Path) -> None:
    trained = ar.Run(folder)
    greedy = ar.run("calculator-v0", trained.policy(temperature=0), n=3, split="dev")
    assert [e.messages for e in greedy] == [
        e.messages for e in ar.run("calculator-v0", trained.policy(temperature=0), n=3, split="dev")
    ]
    assert all(t.loss_mask.sum() <= 24 * e.turns for e in greedy for t in e.trajectories)  # the run's max_tokens
    assert ar.evaluate("calculator-v0", trained.checkpoint, n=3, split="dev").success.n == 3
    assert ar.evaluate("calculator-v0", str(trained.checkpoint), n=3, split="dev").success.n == 3


def test_load_plays_as_the_run_does(folder: Path) -> None:
    expected = [e.messages for e in ar.run("calculator-v0", ar.Run(folder).policy(temperature=0), n=2)]
    for path in (folder, str(folder), folder / "checkpoint"):
        policy = ar.load(path, temperature=0)
        assert policy.params.max_tokens == 24  # the run's own
        assert [e.messages for e in ar.run("calculator-v0", policy, n=2)] == expected


def test_load_takes_any_model_folder(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(folder / "checkpoint")
    policy = ar.load(tmp_path / "model", temperature=0, max_tokens=5)
    assert policy.params.max_tokens == 5 and ar.run("calculator-v0", policy, n=1)[0].trajectories
    with pytest.raises(ar.CheckpointError, match="no model in"):
        ar.load(tmp_path)


def test_run_of_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ar.CheckpointError, match=r"there is no run '.*nowhere'"):
        ar.Run(tmp_path / "nowhere")


def test_damaged_summary_names_a_command_that_works(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    folder.mkdir()
    (folder / "summary.json").write_text("{")
    with pytest.raises(ar.StoreError, match="is damaged") as refused:
        _ = ar.Run(folder).summary
    assert f"agent-rl train 'resume={folder}' writes it again" in str(refused.value)


def test_metrics_are_plain_rows_and_series(folder: Path) -> None:
    metrics = ar.Run(str(folder)).metrics
    assert all(type(row) is dict for row in metrics)
    assert [step for step, _ in metrics.series("rollout/success")] == [1, 2, 3, 4]
    assert {type(value) for _, value in metrics.series("rollout/success")} == {float}


def test_metrics_go_to_pandas(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = ModuleType("pandas")
    pandas.DataFrame = lambda rows: ("frame", rows)  # type: ignore[attr-defined]
    metrics = ar.Run(folder).metrics
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert metrics.to_pandas() == ("frame", metrics)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ar.ConfigError, match="pip install pandas"):
        metrics.to_pandas()


def test_stored_episodes_are_iterable_by_folder_or_file(folder: Path) -> None:
    ids = [e.id for e in ar.Run(folder).episodes()]
    assert ids == [e.id for e in ar.read_episodes(str(folder))]
    assert ids == [e.id for e in ar.read_episodes(folder / "episodes.jsonl")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stepz": 3}, "no setting 'stepz'. Did you mean 'steps'?"),
        ({"rollout": {"grops": 3}}, "Did you mean 'rollout.groups'?"),
        ({"rollout.grops": 3}, "Did you mean 'rollout.groups'?"),
        ({"algorithm": "ggrpo"}, "no algorithm 'ggrpo'. Did you mean 'grpo'?"),
        ({"steps": -1}, "steps=-1"),
        ({"backend": "verll"}, "no backend 'verll'. Did you mean 'verl'?"),
        ({"async_": {"mode": "separate"}}, "set async.mode=one_step_off"),
        ({"env": "calculater-v0"}, "Did you mean 'calculator-v0'?"),
        ({"split": "tran"}, "Did you mean 'train'?"),
        ({"env_args": {"levl": 2}}, "no argument 'levl'"),
        ({"algorithm": "vineppo", "env": "nim-v0"}, "has no snapshots"),
        ({"resume": "nowhere", "seed": 3}, "seed can't change"),
        ({"resume": "nowhere", "steps": "many"}, "steps=many"),
    ],
)
def test_train_names_wrong_settings(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(ar.AgentRLError) as error:
        ar.train(**{"runs_dir": str(tmp_path)} | settings if "resume" not in settings else settings)
    assert message in str(error.value) and not any(tmp_path.iterdir())


@pytest.mark.parametrize("late", [0.0, 0.1])
def test_outside_loop_stops_work_at_an_interrupt(late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, begin = threading.Event(), WorkerCall.begin

    def begins(self: WorkerCall[str]) -> None:
        begin(self)
        time.sleep(late)  # of a machine so busy that the work could interrupt before anybody waits for it

    monkeypatch.setattr(WorkerCall, "begin", begins)

    def work() -> str:
        signal.raise_signal(signal.SIGINT)
        return "stopped" if ended.wait(20) else "never asked"

    async def notebook() -> str:
        return outside_loop(work, ended.set)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.closing(asyncio.new_event_loop()) as loop:  # asyncio.run handles the signal itself
        assert loop.run_until_complete(notebook()) == "stopped"
