"""The sandboxes of agent_rl.testing, and the doctor's table."""

from __future__ import annotations

import pytest

from agent_rl.cli import main
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Guarantee, Sandbox, Sandboxes
from agent_rl.sandboxes.calls import ExecResult, FileAccessError, PythonResult
from agent_rl.testing import FakeSandboxes


def test_fake_sandbox_answers_and_records_calls(run):
    sandboxes = FakeSandboxes(
        on_exec=lambda argv: ExecResult(len(argv), argv[0], ""),
        on_python=lambda code: PythonResult("", "", code.upper()),
    )
    box = run(sandboxes.open(owner="me"))
    assert isinstance(sandboxes, Sandboxes)
    assert isinstance(box, Sandbox)
    assert run(box.exec(["ls", "-l"])).returncode == 2
    assert run(box.run_python("x")).value == "X"
    assert (box.calls, box.owner) == (["ls -l", "x"], "me")


def test_fake_sandbox_keeps_files(run):
    box = run(FakeSandboxes().open())
    run(box.write_file("a", b"data"))
    assert run(box.read_file("/work/a")) == b"data"
    with pytest.raises(FileAccessError, match="4 bytes"):
        run(box.read_file("a", max_bytes=3))
    with pytest.raises(FileAccessError, match="no such file"):
        run(box.read_file("b"))


def test_fake_sandbox_refuses_calls_after_close(run):
    sandboxes = FakeSandboxes()
    box = run(sandboxes.open(owner="me"))
    assert run(sandboxes.capabilities()) == dict.fromkeys(Guarantee)
    run(sandboxes.close())
    with pytest.raises(SandboxError, match="'me' was lost"):
        run(box.run_python(""))


def test_doctor_names_every_guarantee(capsys: pytest.CaptureFixture[str]):
    status = main(["sandbox", "doctor"])
    said = capsys.readouterr().out
    assert status in (0, 1)
    if "does not work here" not in said:
        assert all(guarantee in said for guarantee in Guarantee)
    assert ("nothing" in said) <= ("what to do" in said)
