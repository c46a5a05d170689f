"""agent_rl.sandboxes.local: its processes end with their owner, nothing leaks, and unmet guarantees are refused."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agent_rl.cli import main
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Guarantee, Limits
from agent_rl.sandboxes.doctor import REFUSALS, remedy
from agent_rl.sandboxes.local import backend as local
from agent_rl.sandboxes.local import cgroups
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.sandboxes.verification import verify
from tests.sandbox.backends import LIMITS, readable_python, skip_if_refused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="local sandboxes need Linux")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def started(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def descendants(of: int) -> set[int]:
    """All descendants of a process, adopted ones included."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = parent_of(int(stat.parent.name))
    found: set[int] = set()
    while more := {pid for pid, parent in parents.items() if parent in found | {of}} - found:
        found |= more
    return found


def leftovers() -> dict[str, object]:
    """The possible leftovers of a sandbox on this machine."""
    gc.collect()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "mounts": Path("/proc/self/mounts").read_text().count(" /tmp "),  # the mount point of a jail's root
        "cgroups": sorted(
            str(path)
            for hierarchy in cgroups.find()
            for pid in descendants(os.getpid())
            for path in (hierarchy.path / "agent-rl").glob(f"{pid}.*")
        ),
        "folders": sorted(
            path
            for pid in descendants(os.getpid())
            for path in Path(tempfile.gettempdir()).glob(f"agent-rl-box-{pid}.*")
        ),
        "processes": len(descendants(os.getpid())),
    }


async def cycle(sandboxes: LocalSandboxes, count: int) -> None:
    for i in range(count):
        box = await sandboxes.open(owner=str(i), lifetime=60)
        assert (await box.run_python("6 * 7")).value == "42"
        await box.close()


@pytest.mark.parametrize("count", [30, pytest.param(150, marks=pytest.mark.e2e)])
def test_local_sandboxes_leave_no_leftovers(jails, run, count):
    run(cycle(jails, 3))
    before = leftovers()
    run(cycle(jails, count))
    assert leftovers() == before


def test_leftovers_detect_an_open_sandbox(jails, run):
    before = leftovers()
    box = run(jails.open(lifetime=60))
    during = leftovers()
    run(box.close())
    assert during["descriptors"] != before["descriptors"]
    assert during["processes"] != before["processes"]
    assert leftovers() == before


def wait_for_the_end(pids: set[int]) -> set[int]:
    """Return the processes that still run after five seconds."""
    until = time.monotonic() + 5
    while (alive := {pid for pid in pids if is_running(pid)}) and time.monotonic() < until:
        time.sleep(0.02)
    return alive


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


TRAINER = """
import asyncio, sys, time
from agent_rl.sandboxes.local.backend import LocalSandboxes

async def main():
    sandboxes = LocalSandboxes(require=(), tier=sys.argv[1], python=sys.argv[3])
    boxes = [await sandboxes.open(owner=str(i)) for i in range(2)]
    for box in boxes:
        await box.run_python("import os, time\\nif os.fork() == 0:\\n    os.setsid()\\n    time.sleep(100)")
    print("ready", flush=True)
    if sys.argv[2] == "leave":
        sys.stdin.read()
        return
    if sys.argv[2] == "block":
        time.sleep(100)
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.mark.parametrize("tier", ["jail", pytest.param("landlock", marks=pytest.mark.sandbox)])
@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT", "SIGTERM", "leave", "block"])
def test_local_sandboxes_end_with_their_trainer(how, tier):
    """For a trainer that is killed or interrupted, ends without closing, or blocks its event loop."""
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, tier, how, readable_python()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert trainer.stdin is not None and trainer.stdout is not None
    with trainer.stdin, trainer.stdout:
        if trainer.stdout.readline() != b"ready\n":
            trainer.wait()
            pytest.skip(f"no {tier} here")
        family = descendants(trainer.pid)
        assert len(family) >= 6
        if how == "leave":
            trainer.stdin.close()
        else:
            trainer.send_signal(signal.SIGKILL if how == "block" else signal.Signals[how])
        trainer.wait()
    assert wait_for_the_end(family) == set()


@pytest.mark.parametrize("tier", ["jail", "landlock"])
def test_sandboxes_end_with_their_zygote(run, tier):
    sandboxes = LocalSandboxes(LIMITS, require=(), tier=tier, python=readable_python())
    with skip_if_refused():
        box = run(sandboxes.open(lifetime=60))
    run(box.run_python("import os\nos.fork()"))
    children = {pid for pid in descendants(os.getpid()) if parent_of(pid) == os.getpid()}
    zygote = max(children, key=started)  # other fixtures may have theirs
    family = descendants(zygote) | {zygote}
    assert len(family) >= 4
    os.kill(zygote, signal.SIGKILL)
    assert wait_for_the_end(family) == set()
    with pytest.raises(SandboxError, match="the zygote of the local sandboxes is gone"):
        run(box.exec(["true"]))
    run(box.close())
    run(cycle(sandboxes, 1))
    assert not [path for hierarchy in cgroups.find() for path in (hierarchy.path / "agent-rl").glob(f"{zygote}.*")]
    run(sandboxes.close())


@pytest.mark.parametrize("tier", ["jail", "landlock"])
def test_sets_have_one_order(run, tier):
    """However an interpreter was started: a snapshot is restored by running its code again."""

    async def orders() -> set[str | None]:
        sandboxes = LocalSandboxes(LIMITS, require=(), tier=tier, python=readable_python())
        found = set()
        for is_first in (True, False):
            box = await sandboxes.open(lifetime=60)
            if not is_first:
                await box.write_file("x", b"")
            found.add((await box.run_python("*{str(i) for i in range(99)}, hash('a')")).value)
            assert (await box.run_python("import os; [name for name in os.environ if 'HASH' in name]")).value == "[]"
        await sandboxes.close()
        return found

    with skip_if_refused():
        assert len(run(orders())) == 1


def test_local_sandbox_works_in_another_event_loop(jails):
    with asyncio.Runner() as first:
        box = first.run(jails.open(lifetime=60))
        first.run(box.run_python("x = 1"))
    with asyncio.Runner() as second:
        assert second.run(box.run_python("x")).value == "1"
        second.run(box.close())


def test_local_refuses_unmet_requirements(run):
    async def open_one() -> None:
        sandboxes = LocalSandboxes(tier="unsafe", allow_unsafe=True, require={Guarantee.FILES, Guarantee.NETWORK})
        try:
            await sandboxes.open()
        finally:
            await sandboxes.close()

    with pytest.raises(SandboxError, match="can't guarantee files, network here"):
        run(open_one())


def test_verify_drops_false_claims(run):
    """Canaries die where nothing is guaranteed."""

    async def examine() -> dict[Guarantee, str | None]:
        sandboxes = LocalSandboxes(LIMITS, tier="unsafe", allow_unsafe=True)
        found = await verify(lambda owner, limits, lifetime: sandboxes.open(owner=owner, lifetime=lifetime), claims)
        await sandboxes.close()
        return dict(found)

    kept = {Guarantee.PROCESSES, Guarantee.CPU, Guarantee.MEMORY, Guarantee.KILL_ALL}  # as it happens
    claims = {guarantee: "a claim" for guarantee in Guarantee if guarantee not in kept}
    assert set(run(examine()).values()) == {None}


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"tier": "gaol"}, "choose one of jail"), ({"tier": "unsafe"}, "allow_unsafe=True")],
)
def test_local_refuses_unknown_tiers_and_unsafe(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        LocalSandboxes(**options)


def test_local_refuses_a_missing_interpreter(run):
    with pytest.raises(SandboxError, match="does not start"):
        run(LocalSandboxes(python="/no/python", require=()).open())


def test_cgroups_collect_removes_leftovers_of_dead_zygotes(tmp_path: Path):
    hierarchy = cgroups.Hierarchy(tmp_path, ("pids",), 1)
    (tmp_path / "agent-rl" / "1.1-7").mkdir(parents=True)
    (tmp_path / "agent-rl" / "2.2-7").mkdir()
    assert cgroups.collect([hierarchy], alive=lambda mark: mark == "2.2") == 1
    assert [path.name for path in (tmp_path / "agent-rl").iterdir()] == ["2.2-7"]


def test_installed_packages_are_hidden(jails, run):
    base = "{'base': sys.base_prefix}"  # from Python 3.14 on, a virtual environment's packages are the path else
    code = f"import os, sys, sysconfig\nos.listdir(sysconfig.get_path('purelib', vars={base}))"

    async def look() -> str | None:
        box = await jails.open(lifetime=60)
        seen = await box.run_python(code)
        await box.close()
        return seen.value

    there = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code.replace("\n", "\nprint(") + ")"],
        capture_output=True,
        text=True,
    )
    if there.stdout in ("", "[]\n"):  # Debian's folder may be missing
        pytest.skip("this interpreter has no packages of its own")
    assert run(look()) == "[]"


IMPORT = """
import os, sys
from dataclasses import replace
from pathlib import Path
from agent_rl.sandboxes.local import landlock, syscalls
from agent_rl.sandboxes.local.spec import Spec

library = Path(sys.argv[1])
os.__file__ = str(library / "os.py")
spec = Spec(slot=0, memory=1 << 30, processes=9, cpus=1, disk=1 << 20, files=9, lifetime=9, home="/tmp/none/work")
spec = replace(spec, read_only=(str(library),), hidden=(str(library / "site-packages"),))
syscalls.prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
landlock.confine(replace(spec, visible=landlock.visible(spec)))
print(sorted(os.listdir(library)), (library / "os.py").read_text())
try: print((library / "site-packages" / "answers").read_text())
except PermissionError: print("hidden")
"""


def test_landlock_imports_beside_hidden_packages(tmp_path: Path):
    """As of an interpreter of pyenv's, uv's or conda's, whose packages are in a folder of its library."""
    (tmp_path / "site-packages").mkdir()
    for name in ("os.py", "site-packages/answers"):
        (tmp_path / name).write_text("text")
    ran = subprocess.run([sys.executable, "-c", IMPORT, str(tmp_path)], capture_output=True, text=True)
    if "landlock_create_ruleset" in ran.stderr:
        pytest.skip(f"the kernel refuses: {ran.stderr[-200:]}")
    assert ran.stdout == "['os.py', 'site-packages'] text\nhidden\n", ran.stderr


def test_limits_reach_the_cgroup(jails, run):
    async def look() -> set[tuple[str, str]]:
        box = await jails.open(limits=Limits(memory=100 << 20, processes=20), lifetime=60)
        values = {
            (name, file.read_text().strip())
            for hierarchy in cgroups.find()
            for name in ("pids.max", "memory.limit_in_bytes", "memory.max", "memory.kmem.tcp.limit_in_bytes")
            for file in (hierarchy.path / "agent-rl").glob(f"*-*/{name}")
        }
        await box.close()
        return values

    values = run(look())
    if not values:
        pytest.skip("no cgroup can be written to here")
    expected = {name: "28" if name == "pids.max" else str(100 << 20) for name, _ in values}
    assert set(expected.items()) <= values


INTERPRETERS = sorted(
    {path.resolve() for path in Path(sys.base_prefix).parent.glob("3.1[0-9]*/bin/python3")}
    | {Path(path).resolve() for minor in range(10, 16) if (path := shutil.which(f"python3.{minor}", path=os.defpath))}
)
"""Interpreters of this machine that can run the agent, from this one's folder and the PATH."""


@pytest.mark.parametrize("python", INTERPRETERS, ids=lambda python: python.name)
def test_jail_runs_every_interpreter(run, python: Path):
    async def main() -> str | None:
        sandboxes = LocalSandboxes(LIMITS, tier="jail", require=(), python=str(python))
        try:
            box = await sandboxes.open(lifetime=60)
            return (
                await box.run_python("import sys\nf'python{sys.version_info.major}.{sys.version_info.minor}'")
            ).value
        finally:
            await sandboxes.close()

    try:
        said = run(main())
    except SandboxError as error:
        if "jail" not in str(error) or not any(sign in str(error) for sign in REFUSALS):
            raise
        pytest.skip(f"the kernel refuses: {error}")
    assert said == repr(python.name)


def test_remedy_blames_jail_crashes_on_agent_rl(run, tmp_path: Path):
    """As Python 3.13 did: its first process ends by a signal, before it can say why."""
    folder = Path(local.__file__).parents[1]
    copy = shutil.copytree(folder, tmp_path / "sandboxes")
    calls = copy / "local" / "syscalls.py"
    calls.write_text(calls.read_text().replace("    if pid == 0:\n", "    if pid == 0:\n        os.abort()\n", 1))
    sandboxes = LocalSandboxes(LIMITS, tier="jail", require=())
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SandboxError, match="was killed by signal") as caught:
        patch.setattr(local, "BOOT", copy / "local" / "boot.py")
        run(sandboxes.open())
    assert "flaw of agent_rl" in remedy("jail", str(caught.value))


@pytest.mark.parametrize(
    ("does", "why"), [("sys.exit('no such\\nreason')", "reason"), ("0", "it ended at once")], ids=["says", "is silent"]
)
def test_zygote_that_ends_is_the_reason(
    does: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    boot = tmp_path / "boot.py"
    boot.write_text(f"import sys\n{does}\n")
    monkeypatch.setattr(local, "BOOT", boot)
    assert main(["sandbox", "doctor"]) == 1
    assert f"jail does not work here: {why}\n" in capsys.readouterr().out
