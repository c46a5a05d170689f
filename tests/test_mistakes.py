"""Mistakes of a user: refused with the value and the way out, in three lines, without a traceback."""

import asyncio
import errno
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import agent_rl as ar
from agent_rl.backends.embedded import stages
from agent_rl.backends.embedded.run import start_run
from agent_rl.cli import main
from agent_rl.gym import registry
from agent_rl.gym.reward import checked_reward
from agent_rl.gym.tasks import TaskSource
from agent_rl.gym.tool_calls import call_tools
from agent_rl.runs.folder import removed_if_unused
from agent_rl.runs.metrics import read_metrics
from agent_rl.tools.mcp import McpServer, McpSession
from agent_rl.view.progress import Progress
from tests.runs import config


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """Return what a command that fails prints."""
    capsys.readouterr()
    assert main(argv) == 1
    err = capsys.readouterr().err
    assert "Traceback" not in err and 1 <= len(err.splitlines()) <= 3, err
    return err


@ar.register("mistaken-v0", tasks=lambda split, index: {"index": index})
class Mistaken(ar.Env):
    """Ends at once; has neither an oracle nor demonstrations."""

    def reset(self, task: ar.Task, rng: object) -> str:
        return "hi"

    def step(self, action: ar.Message) -> ar.Step:
        return ar.Step(terminated=True)


# --- declarations ---


@ar.tool
def a_tool() -> str:
    return "done"


@ar.reward
def a_reward(self: Mistaken, episode: ar.Episode) -> bool:
    return True


@pytest.mark.parametrize(
    ("declare", "message"),
    [
        (lambda: ar.register(Mistaken), "has no id: write @ar.register"),  # type: ignore[arg-type]
        (lambda: ar.register("m-v0", budget={"turns": 3})(Mistaken), "'m-v0' has budget={'turns': 3}: give ar.Budget"),  # type: ignore[arg-type]
        (lambda: ar.register("m-v0", splits="train")(Mistaken), "splits='train' is a string: give their names"),
        (lambda: type("One", (ar.ToolEnv,), {"extra_tools": a_tool}), "One.extra_tools is one tool: write a tuple"),
        (lambda: type("Static", (ar.ToolEnv,), {"f": staticmethod(a_tool)}), "Static.f has @tool below @staticmethod"),
        (lambda: type("Asked", (ar.Env,), {"f": property(a_reward)}), "Asked.f has @reward below @property"),
        (lambda: ar.tool(30), r"@ar.tool\(30\): options have names, such as @ar.tool\(timeout=30\)"),  # type: ignore[call-overload]
        (lambda: ar.reward(0.5), r"@ar.reward\(0.5\): options have names, such as @ar.reward\(weight=0.5\)"),  # type: ignore[type-var]
        (lambda: ar.reward(weight="1")(lambda self, episode: 1), "weight=1; give a finite number"),  # type: ignore[call-overload]
        (lambda: ar.Message("asistant"), "role='asistant'.*the roles are system, user, assistant, tool"),  # type: ignore[arg-type]
        (lambda: ar.Message("user", None), r"content=None.*give a str"),  # type: ignore[arg-type]
        (lambda: type("One", (ar.ToolEnv,), {"extra_tools": len}), "One.extra_tools is <built-in function len>: write"),
        (lambda: ar.tool(partial(shutil.which, path="")), r"tool\(functools.partial.*\): decorate a function"),
        (lambda: ar.Step(terminated="yes"), r"Step\(terminated='yes'\): give True or False"),  # type: ignore[arg-type]
        (lambda: ar.Step(reward="1"), r"Step\(reward='1'\): give a number"),  # type: ignore[arg-type]
        (lambda: ar.Step(reward=float("nan")), r"Step\(reward=nan\): give a finite number"),
        (lambda: ar.Step(reward=10**400), r"Step\(reward=10{39}\): give a finite number"),
        (lambda: checked_reward(10**400, "Shop.sold"), r"reward Shop.sold returned 10+; return a finite number"),
        (lambda: TaskSource(lambda index: {}), r"a task function takes \(split, index\)"),  # type: ignore[arg-type, misc]
        (lambda: TaskSource(lambda split, index: 3).get("train", 0), "return a dict"),  # type: ignore[arg-type]
        (lambda: TaskSource({"train": 3}).get("train", 0), "split 'train' is 3: give a file"),  # type: ignore[dict-item]
    ],
)
def test_declarations_name_the_mistake(declare: Callable[[], object], message: str) -> None:
    with pytest.raises((ar.AgentRLError, ValueError, TypeError), match=message):
        declare()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": None}, "policy=None is no policy: give a name"),
        ({"policy": lambda: None}, "is no policy"),
        ({"policy": {"name": 3}}, "name=3"),
        ({"policy": "oracle"}, "mistaken-v0 has none; define Mistaken.oracle.self., or choose policy=FOLDER"),
        ({"policy": "demonstrator"}, "define Mistaken.demonstrate.self, rng."),
        ({"seed": "a"}, "seed='a': give a whole number of at least 0"),
        ({"n": -1}, "n=-1: give a whole number of at least 1"),
        ({"budget": {"turns": 3}}, r"budget={'turns': 3}: give ar.Budget\(turns=N\)"),
        ({"samples": 1.5}, "samples=1.5"),
        ({"env_args": {"sied": 1}}, "mistaken-v0: no argument 'sied'"),
        (
            {"policy": {"name": "vllm", "url": "host:8000"}},
            "policy.url=host:8000 has no scheme: write http://host:8000",
        ),
    ],
)
def test_run_refuses_wrong_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ar.ConfigError, match=message):
        ar.run("mistaken-v0", **arguments)  # type: ignore[arg-type]


def test_run_refuses_bytes_in_tasks() -> None:
    class Bytes(Mistaken):
        """Its tasks can't be stored."""

    ar.register("bytes-v0", tasks={"train": [{"text": b"x"}]})(Bytes)
    with pytest.raises(ar.ConfigError, match="holds what JSON can't: a bytes"):
        ar.run("bytes-v0", policy="oracle")


def test_mcp_tools_of_one_name_are_refused() -> None:
    schema = {"type": "object", "properties": {}}
    first, second = (
        SimpleNamespace(name=n, description="Do.", input_schema=schema) for n in ("files.read", "files_read")
    )
    assert set(McpSession(McpServer("serve"))._tools([first])) == {"files_read"}
    with pytest.raises(ar.DefinitionError, match="`serve` has two tools that a model would call 'files_read'"):
        McpSession(McpServer("serve"))._tools([first, second])
    assert set(McpSession(McpServer("serve", only=["files_read"]))._tools([first, second])) == {"files_read"}


def test_blocking_async_tool_times_out() -> None:
    @ar.tool(timeout=0.01)
    async def block() -> str:
        time.sleep(0.6)  # the mistake
        return "done"

    (answer,) = asyncio.run(call_tools({"block": block}, [ar.ToolCall("1", "block")], None))
    assert answer.tool_error == "timeout" and "without an await; make it a sync function" in answer.content


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("reset", ("hi", {}), "a pair with a dict, as Gymnasium's: return it alone, without info"),
        ("reset", [{"role": "user", "content": "hi"}], "'role': 'user'}: write ar.Message(role, content)"),
        ("oracle", "hi", "such as its oracle, is a str: write a plain `def` that yields its answers"),
        ("oracle", [3], "such as its oracle, is a list: write a plain `def`"),
        ("oracle", (x for x in [3]), "a script yielded 3: yield a str or ar.Message('assistant', ...)"),
    ],
)
def test_episode_names_wrong_answers(method: str, value: object, message: str) -> None:
    body = {"__module__": f"mistaken_{message}", "oracle": lambda self: (x for x in ["hi"])}
    env = type("Wrong", (Mistaken,), body | {method: lambda *arguments: value})
    ar.register("wrong-v0", tasks=[{"n": 1}])(env)
    (episode,) = ar.run(env)
    registry._specs._parts.pop("wrong-v0")
    assert episode.error is not None and message in episode.error.message


def test_run_refuses_an_instance() -> None:
    with pytest.raises(ar.ConfigError, match="give the class or its id; every episode makes an instance of its own"):
        ar.run(Mistaken())  # type: ignore[arg-type]


# --- files ---


def test_main_reports_broken_imports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    for text, message in (
        ("def f(:", "SyntaxError"),
        ("import nothing_of_that_name", "no module 'nothing_of_that_name': pip install it"),
        ("1 / 0", f"ZeroDivisionError: division by zero ({file}, line 1)"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import agent_rl as ar\n@ar.tool(30)\ndef f(): ...", "such as @ar.tool(timeout=30)"),
    ):
        file.write_text(text)
        assert message in said(capsys, "envs", "--import", str(file))


def test_main_says_where_it_looked_for_imports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    where = f"mine/nowhere.py does not exist in {tmp_path}, the working directory; give the .py file"
    assert where in said(capsys, "envs", "--import", "mine/nowhere.py")


def test_main_shows_the_traceback_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("1 / 0")
    assert main(["envs", "--traceback", "--import", str(tmp_path / "mine.py")]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_main_reports_unusable_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    assert "name a folder" in said(capsys, "rollout", "n=1", f"out={tmp_path}/file/out")
    assert "choose a shorter name" in said(capsys, "rollout", "n=1", f"out={tmp_path}/{'x' * 300}")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")  # as os.write does, without the file's name

    monkeypatch.setattr("agent_rl.store.lines.append", full)
    err = said(capsys, "rollout", "n=1", f"out={tmp_path}/out")
    assert f"{tmp_path}/out/episodes.jsonl: No space left on device; free some space" in err


def test_main_sends_a_resumed_run_elsewhere_by_a_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*arguments: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system", "token_records.jsonl")

    monkeypatch.setattr("agent_rl.cli.training.backend_of", read_only)
    err = said(capsys, "train", f"resume={tmp_path}")
    assert "token_records.jsonl: Read-only file system; copy the folder elsewhere, and resume the copy" in err


def test_main_names_a_working_directory_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for out in ((), (f"out={tmp_path}/e.jsonl",)):
        asked = ("rollout", "env=calculator-v0", "policy=oracle", "n=1", *out)
        assert "the working directory is no longer there: cd to" in said(capsys, *asked)


def test_main_calls_the_unexpected_a_defect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_rl.runs.rollout.rollout_jobs", lambda settings: {}["x"])
    err = said(capsys, "rollout", "n=1", f"out={tmp_path}/out")
    assert "KeyError: 'x' (" in err and "test_mistakes.py, line" in err and "--traceback" in err


def test_resume_refuses_damaged_runs(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each file in turn is cut short or gone."""
    for name, message in {
        "config.yaml": "config.yaml is damaged",
        "metrics.jsonl": "metrics.jsonl:1 is damaged",
        "checkpoint/config.json": "config.json is damaged",
        "checkpoint/model.safetensors": "can't be loaded",
        "checkpoint/tokenizer.json": "can't be loaded",
        "checkpoint/trainer_state.pt": "is damaged",
    }.items():
        copy = tmp_path / name.replace("/", "-")
        shutil.copytree(folder, copy)
        (copy / name).write_bytes(b"{: [\n")
        assert message in said(capsys, "train", f"resume={copy}", "steps=99"), name
    shutil.copytree(folder, tmp_path / "gone")
    (tmp_path / "gone" / "episodes.jsonl").unlink()
    assert "there is no episode file" in said(capsys, "train", f"resume={tmp_path}/gone", "steps=99")


def test_read_metrics_names_the_damaged_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"kind": "train", "step": 1}\n[]\n')
    with pytest.raises(ar.StoreError, match=r"metrics.jsonl:2 is damaged"):
        read_metrics(tmp_path / "metrics.jsonl")


# --- runs/latest ---


def test_failed_start_leaves_latest_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = tmp_path / "runs"
    (runs / "before").mkdir(parents=True)
    (runs / "latest").symlink_to("before")

    def fail(*arguments: object, **options: object) -> None:
        raise ar.ConfigError("no")

    monkeypatch.setattr(stages, "fresh_actor", fail)
    with pytest.raises(ar.ConfigError):
        start_run(config(tmp_path, runs_dir=str(runs)), Progress())
    assert sorted(file.name for file in runs.iterdir()) == ["before", "latest"]
    assert (runs / "latest").resolve() == (runs / "before").resolve()


def test_removed_if_unused_keeps_what_was_measured(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(KeyboardInterrupt), removed_if_unused(tmp_path / "run"):
        raise KeyboardInterrupt
    assert (tmp_path / "run").exists()
