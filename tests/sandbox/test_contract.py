"""What every backend does alike: commands, a stateful interpreter, limits on time and output, cancellation."""

from __future__ import annotations

import asyncio
import time

import pytest

from agent_rl.errors import ConfigError

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
