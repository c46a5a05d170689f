"""The contract of every backend: files in and out, and the life of a sandbox."""

from __future__ import annotations

import asyncio

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Guarantee, Limits, Sandboxes
from agent_rl.sandboxes.calls import FileAccessError

# Files


@pytest.mark.parametrize(
    "path", ["nothing", "", ".", "fifo", "folder", "/dev/null", "dangling", "loop", "a\0b", "x" * 5000]
)
def test_files_refuse_irregular_paths(box, run, path):
    run(box.exec(["sh", "-c", "mkfifo fifo; mkdir folder; ln -s nowhere/file dangling; ln -s loop loop"]))
    with pytest.raises(FileAccessError):
        run(box.read_file(path))
    if path not in ("nothing", "dangling"):
        with pytest.raises(FileAccessError):
            run(box.write_file(path, b"data"))


def test_read_file_refuses_files_over_max_bytes(box, run):
    run(box.write_file("file", b"x" * 1001))
    with pytest.raises(FileAccessError, match="1001"):
        run(box.read_file("file", max_bytes=1000))
    assert len(run(box.read_file("file", max_bytes=1001))) == 1001


def test_read_file_survives_a_path_longer_than_an_answer(box, run):
    with pytest.raises(FileAccessError, match="too long"):
        run(box.read_file("\U0001f40d" * 70_000))
    assert run(box.exec(["echo", "on"])).stdout == "on\n"


COPIES = """\
import os, shutil, tarfile
os.makedirs('folder/inner')
with open('folder/inner/file', 'w') as file: file.write('x')
os.chmod('folder/inner/file', 0o755)
os.utime('folder/inner/file', (1, 1))
with tarfile.open('folder.tar', 'w') as tar: tar.add('folder')
with tarfile.open('folder.tar') as tar: tar.extractall('unpacked')
shutil.copytree('folder', 'copied')
shutil.copy('folder/inner/file', 'one')
shutil.copy2('folder/inner/file', 'two')
[open(path).read() for path in ('unpacked/folder/inner/file', 'copied/inner/file', 'one', 'two')]"""


def test_sandbox_runs_programs_setting_modes(box, run):
    result = run(box.run_python(COPIES))
    assert (result.error, result.value) == (None, "['x', 'x', 'x', 'x']")
    script = "touch one && cp -p one three && chmod +x three && mkdir again && tar -xpf folder.tar -C again"
    script += " && if command -v git; then git init -q repository; fi"
    ran = run(box.exec(["sh", "-c", script], env={"GIT_CONFIG_NOSYSTEM": "1"}))
    assert (ran.returncode, ran.stderr) == (0, "")


# Sandboxes


def test_sandboxes_share_no_files_or_state(sandboxes, box, run):
    async def look() -> list[object]:
        other = await sandboxes.open(lifetime=60)
        try:
            await other.write_file("file", b"other's")
            await other.run_python(
                "x = 1; open('/tmp/file', 'w').close() if not __import__('os').environ.get('TMPDIR') else 0"
            )
            seen = await box.run_python("import os\n[os.listdir('.'), os.path.exists('/tmp/file'), 'x' in globals()]")
            return [seen.value, (await box.exec(["ls"])).stdout]
        finally:
            await other.close()

    assert run(look()) == ["[[], False, False]", ""]


def test_close_ends_a_running_call(sandboxes, run):
    async def close_amid() -> None:
        box = await sandboxes.open(lifetime=60)
        call = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.2)
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await call

    run(close_amid())


def test_lifetime_ends_the_sandbox(sandboxes, run):
    box = run(sandboxes.open(lifetime=2.0))
    with pytest.raises(SandboxError):
        run(box.exec(["sleep", "60"]))
    run(box.close())


def test_open_sets_the_given_limits(sandboxes, run):
    async def count(limits: Limits) -> int:
        box = await sandboxes.open(limits=limits, lifetime=60)
        result = await box.run_python("import resource\nresource.getrlimit(resource.RLIMIT_FSIZE)[0]")
        await box.close()
        return int(result.value or 0)

    assert run(count(Limits(disk=1 << 20))) == 1 << 20
    assert run(count(Limits(disk=3 << 20))) == 3 << 20


def test_capabilities_name_every_guarantee(sandboxes: Sandboxes, run):
    found = run(sandboxes.capabilities())
    assert set(found) == set(Guarantee)
    assert all(found[name] for name in ("files", "network", "signals", "kernel", "kill_all"))
