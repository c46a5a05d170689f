"""The contract of every backend: commands, a stateful interpreter, limits on time and output, cancellation."""

from __future__ import annotations

import pytest

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.agent.agent import ENVIRONMENT
from agent_rl.testing import CONTRACT


@pytest.mark.parametrize("check", CONTRACT.values(), ids=CONTRACT)
def test_backend_keeps_the_contract(check, box, run):
    run(check(box))


# Commands


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
def test_exec_returns_the_failure_status(box, run, argv, status):
    assert run(box.exec(argv)).returncode == status


def test_exec_fails_for_a_text_file(box, run):
    run(box.write_file("text", b"hello"))
    result = run(box.exec(["./text"]))
    assert result.returncode == 126
    assert result.stderr


def test_exec_starts_in_cwd(box, run):
    run(box.write_file("a/b/file", b""))
    assert run(box.exec(["ls"], cwd="a/b")).stdout == "file\n"
    assert run(box.exec(["ls"], cwd="/work/a")).stdout == "b\n"
    assert run(box.exec(["ls"], cwd="nowhere")).returncode == 126


@pytest.mark.parametrize("script", ["wc -c", "(sleep 0.2; wc -c)"])
def test_exec_feeds_input_beyond_a_pipe(box, run, script):
    result = run(box.exec(["sh", "-c", script], input=b"x" * 1_000_000))
    assert (result.returncode, result.stdout.strip()) == (0, "1000000")


def test_exec_ends_with_input_that_nobody_reads(box, run):
    assert run(box.exec(["true"], input=b"x" * 1_000_000)).returncode == 0


def test_exec_passes_the_given_environment(box, run):
    result = run(box.exec(["env"], env={"KEY": "välue"}))
    names = {line.split("=")[0] for line in result.stdout.splitlines()} - {"GIT_CONFIG_NOSYSTEM"}  # Landlock's
    assert "KEY=välue" in result.stdout
    usual, ours = {"PATH", "HOME", "LANG", "KEY"}, {"TMPDIR", "PWD", *ENVIRONMENT, "MPLCONFIGDIR"}
    assert usual <= names <= usual | ours


@pytest.mark.parametrize("argv", [[], "ls -l"])
def test_exec_refuses_malformed_commands(box, run, argv):
    with pytest.raises(ConfigError, match="give a list"):
        run(box.exec(argv))


@pytest.mark.parametrize(
    "options", [{"timeout": 0}, {"timeout": float("nan")}, {"max_output": -1}, {"max_output": 1 << 40}]
)
def test_exec_refuses_meaningless_options(box, run, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        run(box.exec(["true"], **options))


# Output


def test_exec_keeps_output_at_the_limit_whole(box, run):
    result = run(box.exec(["sh", "-c", "yes | head -c 1000"], max_output=1000))
    assert (len(result.stdout), result.truncated) == (1000, False)


def test_exec_escapes_invalid_utf8(box, run):
    assert run(box.exec(["printf", r"a\377b"])).stdout == r"a\xffb"


def test_run_python_captures_output_of_every_level(box, run):
    code = "import os, sys\nprint('a')\nprint('b', file=sys.stderr)\nos.write(1, b'c')\nos.system('echo d; echo e >&2')"
    result = run(box.run_python(code))
    assert (result.stdout, result.stderr) == ("a\ncd\n", "b\ne\n")


# The interpreter


def test_run_python_returns_tracebacks_and_keeps_state(box, run):
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
        (" 1", "IndentationError"),
        ("x = '\0'", "null bytes"),
        ("x = '\ud800'", "SyntaxError|UnicodeEncodeError|surrogates"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "RecursionError"),
        ("input()", "nobody to answer"),
        ("class A:\n  def __repr__(self): raise ValueError('no')\nA()", "ValueError: no"),
        ("class E(Exception):\n  def __str__(self): raise ValueError\nraise E", "E"),
        ("__import__('sys').stdout.close(); 1 / 0", "ZeroDivisionError"),
    ],
)
def test_run_python_returns_errors_of_the_code(box, run, code, error):
    result = run(box.run_python(code))
    assert result.error is not None
    assert any(part in result.error for part in error.split("|"))
    assert not result.state_lost
    assert run(box.run_python("1 + 1")).value == "2"


def test_run_python_runs_no_part_of_malformed_code(box, run):
    result = run(box.run_python("print('ran')\n(yield)"))
    assert result.stdout == "" and "outside function" in result.error


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "import os; os.closerange(0, 999)",
        "import os, time; os.fork() or time.sleep(60); os._exit(3)",
        "import os; os.system('sleep 60 &'); os._exit(3)",
    ],
)
def test_run_python_survives_the_end_of_its_interpreter(box, run, code):
    run(box.run_python("x = 1"))
    result = run(box.run_python(code))
    assert result.state_lost
    assert "interpreter" in result.error
    result = run(box.run_python("x"))
    assert (result.state_lost, "NameError" in result.error) == (False, True)


def test_run_python_awaits_on_one_loop(box, run):
    begun = "import asyncio\nasync def f():\n  await asyncio.sleep(.01)\n  return 7\ntask = asyncio.create_task(f())\n"
    result = run(box.run_python(begun + "await asyncio.sleep(0)\n[await f() for _ in range(2)]"))
    assert (result.error, result.value) == (None, "[7, 7]")
    assert run(box.run_python("await task")).value == "7"
    assert "ZeroDivisionError" in run(box.run_python("async def g(): 1 / 0\nawait g()")).error


def test_run_python_compiles_without_features_of_ours(box, run):
    assert run(box.run_python("def f(x: int): ...\nf.__annotations__['x']")).value == "<class 'int'>"


def test_run_python_ignores_answers_of_forks(box, run):
    result = run(box.run_python("import os\npid = os.fork()\npid == 0 or os.waitpid(pid, 0)[1]"))
    assert result.value == "0"
    assert run(box.run_python("pid > 0")).value == "True"


def test_run_python_finds_modules_and_main(box, run):
    run(box.write_file("helper.py", b"answer = 42"))
    run(box.run_python("import dataclasses, pickle, helper\n@dataclasses.dataclass\nclass A:\n  x: int"))
    assert run(box.run_python("pickle.loads(pickle.dumps(A(helper.answer))).x")).value == "42"


# Timeouts and cancellation


def test_exec_timeout_spares_the_interpreter(box, run):
    run(box.run_python("x = 1"))
    assert run(box.exec(["sleep", "60"], timeout=0.3)).timed_out
    assert run(box.run_python("x")).value == "1"


# Users

WHO = """
import getpass, grp, os, pwd
del os.environ["HOME"]
print(getpass.getuser(), pwd.getpwnam("sandbox").pw_uid == os.getuid(), grp.getgrgid(os.getgid()).gr_name)
print(os.path.expanduser("~"))
"""


def test_code_is_a_user_with_a_name(box, run, backend):
    assert run(box.exec(["python3", "-c", WHO])).stdout == "sandbox True sandbox\n/work\n"
    assert run(box.exec(["whoami"])).stdout == "sandbox\n"
    if backend.has_users:
        assert run(box.exec(["whoami"], user="tests")).stdout == "sandbox1\n"


def test_calls_of_another_user_are_apart_or_refused(box, run, backend):
    if not backend.has_users:
        for call in (box.exec, box.start):
            with pytest.raises(ConfigError, match=r"user='tests': a sandbox of this kind has one user"):
                run(call(["true"], user="tests"))
        return
    run(box.write_file("given", b"7"))
    script = "umask 77; echo hidden > $HOME/file; cat given; echo; echo no > given; id -u; echo $HOME"
    read, other, home = run(box.exec(["sh", "-c", script], user="tests")).stdout.split()
    server = run(box.start(["sleep", "60"], user="tests"))
    spied = (
        f"id -u; cat {home}/file; cat given; kill -9 -1; for p in /proc/[0-9]*; do kill -9 ${{p#/proc/}}; done; true"
    )
    first = run(box.exec(["sh", "-c", spied])).stdout.split()
    assert read == "7" and first == [first[0], "7"] and first[0] != other
    again = run(box.exec(["sh", "-c", "id -u; cat $HOME/file"], user="tests")).stdout.split()
    assert again == [other, "hidden"] and run(server.poll()) is None
    third = run(box.exec(["sh", "-c", f"id -u; cat {home}/file"], user="third"))
    assert third.stdout.split()[0] not in (first[0], other) and third.returncode == 1


def test_exec_takes_no_user_of_the_image(box, run, backend):
    for name in ("root", "0", "Tests", "", "a b", "-u"):
        with pytest.raises(ConfigError, match="user="):
            run(box.exec(["true"], user=name))
