"""The contract of every sandbox backend, as checks that a backend's author can run.

    failures = await check_sandboxes(MySandboxes())
    assert not failures, failures

Each check is a function of a fresh sandbox. The backend's guarantees are tried by the canaries of
`sandboxes.verification`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Guarantee, Limits, Sandbox, Sandboxes
from agent_rl.sandboxes.calls import FileAccessError
from agent_rl.sandboxes.verification import verify

LIFETIME = 120.0
Check = Callable[[Sandbox], Awaitable[None]]


class BrokenContractError(Exception):
    """A sandbox does something else than the interface says."""


async def check_sandboxes(sandboxes: Sandboxes) -> Mapping[str, str]:
    """Run every check on a backend; return what went wrong, by the name of the check.

    A guarantee that `capabilities` reports and its canary breaks is a failure too.
    """
    failures: dict[str, str] = {}

    async def spawn(owner: str, limits: Limits, lifetime: float) -> Sandbox:
        return await sandboxes.open(owner=owner, limits=limits, lifetime=lifetime)

    for name, check in CONTRACT.items():
        sandbox = await sandboxes.open(owner=name, lifetime=LIFETIME)
        try:
            await check(sandbox)
        except Exception as error:
            failures[name] = f"{type(error).__name__}: {error}"
        finally:
            await sandbox.close()
    claims = await sandboxes.capabilities()
    held = await verify(spawn, claims)
    for guarantee in Guarantee:
        if guarantee not in claims:
            failures[guarantee] = "capabilities() does not name it; give None where it is not kept"
        elif claims[guarantee] is not None and held[guarantee] is None:
            failures[guarantee] = f"it is reported as kept by {claims[guarantee]!r}, but its canary broke it"
    return failures


def _expect(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise BrokenContractError(f"{what}: {found!r}, not {expected!r}")


async def _refuses(what: str, call: Awaitable[object], error: type[Exception]) -> None:
    try:
        await call
    except error:
        return
    raise BrokenContractError(f"{what}: no {error.__name__}")


async def command_has_a_status_and_two_outputs(sandbox: Sandbox) -> None:
    """A command's exit status, stdout and stderr come back apart."""
    ran = await sandbox.exec(["sh", "-c", "echo out; echo err >&2; exit 3"])
    _expect("status and outputs", (ran.returncode, ran.stdout, ran.stderr), (3, "out\n", "err\n"))
    _expect("timed_out, truncated", (ran.timed_out, ran.truncated), (False, False))


async def command_reads_its_input(sandbox: Sandbox) -> None:
    """Stdin is what was given, to its end; without any, it is empty."""
    data = bytes(range(256)) * 2000
    _expect("bytes read", (await sandbox.exec(["wc", "-c"], input=data)).stdout.strip(), str(len(data)))
    _expect("without input", (await sandbox.exec(["cat"], timeout=10)).stdout, "")
    _expect("input that is not read", (await sandbox.exec(["true"], input=data)).returncode, 0)


async def command_that_cannot_run_has_a_status(sandbox: Sandbox) -> None:
    """127 for a missing program, minus the signal for a killed one."""
    _expect("a missing program", (await sandbox.exec(["no-such-program"])).returncode, 127)
    _expect("a killed program", (await sandbox.exec(["sh", "-c", "kill -9 $$"])).returncode, -9)


async def command_gets_its_folder_and_variables(sandbox: Sandbox) -> None:
    """`cwd` and `env` are obeyed."""
    await sandbox.write_file("a/b/file", b"")
    _expect("cwd", (await sandbox.exec(["ls"], cwd="a/b")).stdout, "file\n")
    _expect("env", (await sandbox.exec(["sh", "-c", 'echo "$KEY"'], env={"KEY": "välue"})).stdout, "välue\n")


async def output_is_cut_in_the_middle(sandbox: Sandbox) -> None:
    """Of a long output the head and the tail are kept."""
    ran = await sandbox.exec(["sh", "-c", "echo first; yes | head -c 3000000; echo last"], max_output=1000)
    _expect("truncated", ran.truncated, True)
    kept = ran.stdout.startswith("first\n"), ran.stdout.endswith("last\n"), len(ran.stdout) < 1100
    _expect("head, tail and length", kept, (True, True, True))


async def timeout_ends_a_command(sandbox: Sandbox) -> None:
    """A command that is late is killed, and its output is kept."""
    ran = await sandbox.exec(["sh", "-c", "echo so far; sleep 60"], timeout=0.5)
    _expect("stdout and timed_out", (ran.stdout, ran.timed_out), ("so far\n", True))


async def background_ends_with_its_command(sandbox: Sandbox) -> None:
    """A process that a command leaves running is ended."""
    beat = "(while :; do echo . >>beat; sleep 0.01; done) >/dev/null 2>&1 & while ! test -s beat; do sleep 0.01; done"
    await sandbox.exec(["sh", "-c", beat])
    beats = await sandbox.read_file("beat")
    await asyncio.sleep(0.1)
    _expect("the file that it writes to", await sandbox.read_file("beat"), beats)


async def python_keeps_its_variables(sandbox: Sandbox) -> None:
    """Variables last from call to call; the last line's value comes back, if it is an expression."""
    _expect("an assignment", (await sandbox.run_python("import math\nx = 3\ndef f(y): return x + y")).value, None)
    result = await sandbox.run_python("print('hi')\nf(math.floor(4.5))")
    _expect("output and value", (result.stdout, result.value, result.error), ("hi\n", "7", None))


async def python_reports_an_exception(sandbox: Sandbox) -> None:
    """An exception is a traceback, and loses no variables."""
    await sandbox.run_python("x = 1")
    for code, error in (
        ("1 / 0", "ZeroDivisionError"),
        ("x y", "SyntaxError"),
        ("raise SystemExit(3)", "SystemExit"),
    ):
        result = await sandbox.run_python(code)
        _expect(code, (error in str(result.error), result.state_lost), (True, False))
    _expect("x", (await sandbox.run_python("x")).value, "1")


async def python_that_is_late_loses_its_variables(sandbox: Sandbox) -> None:
    """A timeout keeps the output, ends the interpreter and says so; the next call has a new one."""
    await sandbox.run_python("x = 1")
    result = await sandbox.run_python("print('so far')\nwhile True: pass", timeout=0.5)
    found = result.stdout, result.timed_out, result.state_lost
    _expect("stdout, timed_out, state_lost", found, ("so far\n", True, True))
    _expect("x afterwards", "NameError" in str((await sandbox.run_python("x")).error), True)


async def python_that_exits_loses_its_variables(sandbox: Sandbox) -> None:
    """An interpreter that ends by itself is replaced."""
    _expect("state_lost", (await sandbox.run_python("import os; os._exit(3)")).state_lost, True)
    _expect("the next call", (await sandbox.run_python("1 + 1")).value, "2")


async def calls_run_one_after_another(sandbox: Sandbox) -> None:
    """Calls that are made at once are answered in order."""
    calls = (sandbox.run_python(f"x = [*globals().get('x', []), {i}]\nx") for i in range(5))
    values = [result.value for result in await asyncio.gather(*calls)]
    _expect("values", values, [str(list(range(i + 1))) for i in range(5)])


async def cancelled_call_is_ended(sandbox: Sandbox) -> None:
    """A cancelled command is killed, and the next call gets its own answer."""
    await sandbox.write_file("beat", b"")
    call = asyncio.create_task(sandbox.exec(["sh", "-c", "while :; do echo . >>beat; sleep 0.01; done"]))
    await asyncio.sleep(0.5)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    beats = await sandbox.read_file("beat")
    await asyncio.sleep(0.1)
    _expect("the file that it wrote to", await sandbox.read_file("beat"), beats)
    _expect("the next call", (await sandbox.run_python("1 + 1")).value, "2")


async def files_come_back_as_they_went(sandbox: Sandbox) -> None:
    """Bytes are kept, folders are made, and a shorter file replaces a longer one."""
    for data in (bytes(range(256)) * 4000, b"shorter"):
        await sandbox.write_file("folder/of/a file", data)
        _expect("a file", await sandbox.read_file("folder/of/a file") == data, True)
    _expect("the same, to a command", (await sandbox.exec(["cat", "folder/of/a file"])).stdout, "shorter")


async def files_that_are_none_are_refused(sandbox: Sandbox) -> None:
    """A missing file, a folder, a fifo and a file that is too large can't be read."""
    await sandbox.exec(["sh", "-c", "mkdir folder; mkfifo fifo; echo 12345 >long"])
    for path in ("missing", "folder", "fifo", "a\0b"):
        await _refuses(path, sandbox.read_file(path), FileAccessError)
    await _refuses("a file that is too large", sandbox.read_file("long", max_bytes=5), FileAccessError)


async def closed_sandbox_says_so(sandbox: Sandbox) -> None:
    """Closing twice does nothing; a call afterwards is a `SandboxError`."""
    await sandbox.close()
    await sandbox.close()
    await _refuses("a call", sandbox.exec(["true"]), SandboxError)


CONTRACT: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        *(command_has_a_status_and_two_outputs, command_reads_its_input, command_that_cannot_run_has_a_status),
        *(command_gets_its_folder_and_variables, output_is_cut_in_the_middle, timeout_ends_a_command),
        *(background_ends_with_its_command, python_keeps_its_variables, python_reports_an_exception),
        *(python_that_is_late_loses_its_variables, python_that_exits_loses_its_variables),
        *(calls_run_one_after_another, cancelled_call_is_ended, files_come_back_as_they_went),
        *(files_that_are_none_are_refused, closed_sandbox_says_so),
    )
}
"""Every check, by name."""
