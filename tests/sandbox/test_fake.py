"""The sandboxes of agent_rl.testing, and the doctor's table."""

from __future__ import annotations

import pytest

from agent_rl.cli import main
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Sandbox, Sandboxes
from agent_rl.sandboxes.calls import ExecResult, FileAccessError, PythonResult
from agent_rl.sandboxes.local.backend import LocalSandboxes, NoneWorksError
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


@pytest.mark.parametrize("works", [("jail",), ("landlock",), ()])
def test_doctor_advises_only_what_is_needed(
    works: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A machine with a jail needs no Landlock; one with Landlock alone is better off with a jail."""

    async def capabilities(self: LocalSandboxes) -> Capabilities:
        (tier,) = self._tiers
        if tier in works:
            return dict.fromkeys(Guarantee, tier)
        why = {"jail": "unshare: Operation not permitted", "landlock": "the kernel has Landlock 0; 6 is needed"}
        raise NoneWorksError.of({tier: why[tier]})

    monkeypatch.setattr(LocalSandboxes, "capabilities", capabilities)
    monkeypatch.setenv("COLUMNS", "500")
    assert main(["sandbox", "doctor"]) == (0 if works else 1)
    said = capsys.readouterr().out
    assert "no local sandbox works here" not in said and "allow_unsafe" not in said
    assert ("unshare: Operation not permitted\nto have it, allow user namespaces" in said) == ("jail" not in works)
    assert ("6 is needed\nto have it, run Linux 6.12" in said) == (not works) == ("use another backend" in said)
    assert ("6 is needed\nit is not needed: sandboxes here are of the kind jail" in said) == (works == ("jail",))
