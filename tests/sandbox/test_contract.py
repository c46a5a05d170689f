"""What every backend does alike: commands, a stateful interpreter, files, timeouts, cancellation, limits on output."""

from __future__ import annotations

import asyncio
import time

import pytest

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import FileAccessError, Guarantee, Limits, Sandboxes

# Commands


def test_a_command_has_a_status_and_two_outputs(box, run):
    result = run(box.exec(["sh", "-c", "echo out; echo err >&2; exit 3"]))
    assert (result.returncode, result.stdout, result.stderr) == (3, "out\n", "err\n")
    assert not (result.timed_out or result.truncated)
    assert 0 < result.seconds < 20


def test_a_command_reads_its_input_to_the_end(box, run):
    data = bytes(range(256)) * 2000
    result = run(box.exec(["sh", "-c", "wc -c; cksum </dev/null"], input=data))
    assert result.stdout.split()[0] == str(len(data))


def test_a_command_that_reads_nothing_does_not_wait(box, run):
    assert run(box.exec(["true"], input=b"x" * 1_000_000)).returncode == 0


def test_a_command_without_input_is_at_its_end(box, run):
    result = run(box.exec(["cat"], timeout=10))
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["no-such-program"], 127),
        (["/work/nothing"], 127),
        (["sh", "-c", "kill -9 $$"], -9),
        (["sh", "-c", "kill $$"], -15),
        (["sh\0x"], 126),
    ],
)
def test_how_a_command_fails(box, run, argv, status):
    assert run(box.exec(argv)).returncode == status


def test_a_file_that_is_no_program_cannot_be_run(box, run):
    run(box.write_file("text", b"hello"))
    result = run(box.exec(["./text"]))
    assert result.returncode == 126
    assert result.stderr


def test_a_command_starts_where_it_is_told(box, run):
    run(box.write_file("a/b/file", b""))
    assert run(box.exec(["ls"], cwd="a/b")).stdout == "file\n"
    assert run(box.exec(["ls"], cwd="/work/a")).stdout == "b\n"
    assert run(box.exec(["ls"], cwd="nowhere")).returncode == 126


def test_the_environment_is_what_is_given(box, run):
    result = run(box.exec(["env"], env={"KEY": "välue"}))
    names = {line.split("=")[0] for line in result.stdout.splitlines()}
    assert "KEY=välue" in result.stdout
    assert (
        {"PATH", "HOME", "LANG", "KEY"} <= names <= {"PATH", "HOME", "LANG", "KEY", "TMPDIR", "PWD", "OMP_NUM_THREADS"}
    )


@pytest.mark.parametrize("argv", [[], "ls -l"])
def test_what_is_no_command(box, run, argv):
    with pytest.raises(ConfigError, match="give a list"):
        run(box.exec(argv))


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"timeout": float("nan")}, {"max_output": -1}, {"max_output": 1 << 40}]
)
def test_options_that_have_no_meaning(box, run, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        run(box.exec(["true"], **options))


# Output


def test_the_head_and_the_tail_of_an_output_are_kept(box, run):
    result = run(box.exec(["sh", "-c", "echo first; yes | head -c 3000000; echo last"], max_output=1000))
    assert result.truncated
    assert result.stdout.startswith("first\ny\n")
    assert result.stdout.endswith("y\nlast\n")
    assert "bytes left out" in result.stdout
    assert 1000 <= len(result.stdout) < 1100


def test_an_output_of_just_the_limit_is_whole(box, run):
    result = run(box.exec(["sh", "-c", "yes | head -c 1000"], max_output=1000))
    assert (len(result.stdout), result.truncated) == (1000, False)


def test_bytes_that_are_no_text_are_escaped(box, run):
    assert run(box.exec(["printf", r"a\377b"])).stdout == r"a\xffb"


def test_python_prints_to_both_outputs_at_every_level(box, run):
    code = "import os, sys\nprint('a')\nprint('b', file=sys.stderr)\nos.write(1, b'c')\nos.system('echo d; echo e >&2')"
    result = run(box.run_python(code))
    assert (result.stdout, result.stderr) == ("a\ncd\n", "b\ne\n")


# The interpreter


def test_variables_last_from_call_to_call(box, run):
    assert run(box.run_python("import math\nx = 3\ndef f(y): return x + y")).value is None
    result = run(box.run_python("f(math.floor(4.5))"))
    assert (result.value, result.error, result.state_lost) == ("7", None, False)


def test_an_exception_has_a_traceback_with_its_lines_and_loses_nothing(box, run):
    run(box.run_python("x = 1"))
    result = run(box.run_python("def f():\n    raise KeyError('k')\nprint('before')\nf()"))
    assert result.stdout == "before\n"
    assert "raise KeyError('k')" in result.error
    assert result.error.endswith("KeyError: 'k'\n")
    assert "worker.py" not in result.error
    assert run(box.run_python("x")).value == "1"


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("x y", "SyntaxError"),
        ("x = '\0'", "null bytes"),
        ("x = '\ud800'", "SyntaxError|UnicodeEncodeError|surrogates"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "RecursionError"),
        ("input()", "EOFError"),
        ("class A:\n  def __repr__(self): raise ValueError('no')\nA()", "ValueError: no"),
        ("class E(Exception):\n  def __str__(self): raise ValueError\nraise E", "E"),
        ("__import__('sys').stdout.close(); 1 / 0", "ZeroDivisionError"),
    ],
)
def test_what_code_does_wrong_is_a_result(box, run, code, error):
    result = run(box.run_python(code))
    assert result.error is not None
    assert any(part in result.error for part in error.split("|"))
    assert not result.state_lost
    assert run(box.run_python("1 + 1")).value == "2"


@pytest.mark.parametrize(
    "code", ["import os; os._exit(3)", "import os; os.kill(os.getpid(), 9)", "import os; os.closerange(0, 999)"]
)
def test_an_interpreter_that_ends_loses_its_state_only(box, run, code):
    run(box.run_python("x = 1"))
    result = run(box.run_python(code))
    assert result.state_lost
    assert "interpreter" in result.error
    result = run(box.run_python("x"))
    assert (result.state_lost, "NameError" in result.error) == (False, True)


def test_a_fork_of_the_interpreter_does_not_answer_for_it(box, run):
    result = run(box.run_python("import os\npid = os.fork()\npid == 0 or os.waitpid(pid, 0)[1]"))
    assert result.value == "0"
    assert run(box.run_python("pid > 0")).value == "True"


def test_modules_are_found_and_main_is_main(box, run):
    run(box.write_file("helper.py", b"answer = 42"))
    run(box.run_python("import dataclasses, pickle, helper\n@dataclasses.dataclass\nclass A:\n  x: int"))
    assert run(box.run_python("pickle.loads(pickle.dumps(A(helper.answer))).x")).value == "42"


# Timeouts and cancellation


def test_a_timeout_keeps_what_was_printed_and_loses_the_state(box, run):
    run(box.run_python("x = 1"))
    start = time.monotonic()
    result = run(box.run_python("print('so far')\nwhile True: pass", timeout=0.3))
    assert time.monotonic() - start < 8
    assert (result.stdout, result.timed_out, result.state_lost, result.error) == ("so far\n", True, True, None)
    assert "NameError" in run(box.run_python("x")).error


def test_a_command_that_is_late_is_ended_and_the_interpreter_is_not(box, run):
    run(box.run_python("x = 1"))
    result = run(box.exec(["sh", "-c", "echo so far; sleep 60"], timeout=0.3))
    assert (result.returncode, result.stdout, result.timed_out) == (-9, "so far\n", True)
    assert run(box.run_python("x")).value == "1"


def test_what_a_command_leaves_behind_is_ended(box, run):
    script = "(while :; do echo . >>beat; sleep 0.01; done) >/dev/null 2>&1 & while ! test -s beat; do sleep 0.01; done"
    assert run(box.exec(["sh", "-c", script])).returncode == 0
    beats = run(box.read_file("beat"))
    time.sleep(0.1)
    assert run(box.read_file("beat")) == beats


def test_a_cancelled_call_is_ended_and_the_next_one_is_answered(box, run):
    async def cancel_one() -> None:
        call = asyncio.create_task(box.exec(["sh", "-c", "while :; do echo . >>beat; sleep 0.01; done"]))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    run(cancel_one())
    beats = run(box.read_file("beat"))
    assert beats
    time.sleep(0.1)
    assert run(box.read_file("beat")) == beats
    assert run(box.run_python("1 + 1")).value == "2"


def test_calls_run_one_after_another(box, run):
    async def all_at_once() -> list[str | None]:
        results = await asyncio.gather(*(box.run_python(f"x = [*globals().get('x', []), {i}]\nx") for i in range(5)))
        return [result.value for result in results]

    assert run(all_at_once()) == [str(list(range(i + 1))) for i in range(5)]


# Files


def test_a_file_comes_back_as_it_went(box, run):
    data = bytes(range(256)) * 4000
    run(box.write_file("folder/of/a file", data))
    assert run(box.read_file("folder/of/a file")) == data
    assert run(box.read_file("/work/folder/of/a file")) == data
    run(box.write_file("folder/of/a file", b"shorter"))
    assert run(box.read_file("folder/of/a file")) == b"shorter"
    assert run(box.exec(["cat", "folder/of/a file"])).stdout == "shorter"


@pytest.mark.parametrize(
    "path", ["nothing", "", ".", "fifo", "folder", "/dev/null", "dangling", "loop", "a\0b", "x" * 5000]
)
def test_what_is_no_regular_file_is_neither_read_nor_written(box, run, path):
    run(box.exec(["sh", "-c", "mkfifo fifo; mkdir folder; ln -s nowhere/file dangling; ln -s loop loop"]))
    with pytest.raises(FileAccessError):
        run(box.read_file(path))
    if path not in ("nothing", "dangling"):
        with pytest.raises(FileAccessError):
            run(box.write_file(path, b"data"))


def test_a_file_that_is_too_large_is_not_read(box, run):
    run(box.write_file("file", b"x" * 1001))
    with pytest.raises(FileAccessError, match="1001"):
        run(box.read_file("file", max_bytes=1000))
    assert len(run(box.read_file("file", max_bytes=1001))) == 1001


# Sandboxes


def test_two_sandboxes_share_nothing(sandboxes, box, run):
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


def test_a_closed_sandbox_says_so(sandboxes, run):
    box = run(sandboxes.open(lifetime=60))
    run(box.close())
    run(box.close())
    with pytest.raises(SandboxError, match="closed"):
        run(box.exec(["true"]))


def test_closing_ends_a_call_that_is_going_on(sandboxes, run):
    async def close_amid() -> None:
        box = await sandboxes.open(lifetime=60)
        call = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.2)
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await call

    run(close_amid())


def test_a_lifetime_ends_a_sandbox(sandboxes, run):
    box = run(sandboxes.open(lifetime=0.5))
    with pytest.raises(SandboxError):
        run(box.exec(["sleep", "60"]))
    run(box.close())


def test_limits_are_those_that_it_is_opened_with(sandboxes, run):
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
