"""Functions for a microVM, sent as source text one by one: each imports what it uses."""

# no `from __future__ import annotations`: where a function is sent to, its annotations are looked at
from typing import Any


def prepare(shell: "Any", work: str, user: str) -> None:
    """Make a kernel answer as the agent's interpreter does, and give up the rights of root.

    Args:
        shell: IPython's.
        work: where it shall be.
        user: who it shall be, if it is root.
    """
    import ctypes
    import os
    import pwd

    from IPython.core.formatters import PlainTextFormatter, catch_format_error

    class Repr(PlainTextFormatter):  # type: ignore[misc] # IPython is not here, but there
        @catch_format_error  # type: ignore[untyped-decorator]
        def __call__(self, value: object) -> str:
            text = repr(value)  # once more in quotes where there are some: the service takes a pair away
            return f"'{text}'" if text[:1] == text[-1:] and text[:1] in {"'", '"'} else text

    shell.display_formatter.formatters["text/plain"] = Repr(parent=shell.display_formatter)
    show = shell._showtraceback
    shell._showtraceback = lambda kind, error, lines: show(kind, error, [line.rstrip("\n") + "\n" for line in lines])
    shell.run_line_magic("colors", "NoColor")
    shell.InteractiveTB.set_mode("Plain")
    shell.history_manager.enabled = False  # its file is root's
    os.chdir(work)
    if os.geteuid() == 0:
        entry = pwd.getpwnam(user)
        os.setgroups([])
        os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
        os.environ.update(HOME=entry.pw_dir, USER=user, LOGNAME=user)
        ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)  # no_new_privs: sudo gives nothing


def sweep(user: str) -> None:
    """Kill every process of a user.

    Raises:
        SystemExit: if some are still there after many attempts.
    """
    import os
    import pwd
    import time
    from pathlib import Path

    entry = pwd.getpwnam(user)

    def lives(status: Path) -> bool:
        try:
            fields = dict(line.split(":", 1) for line in status.read_text(errors="replace").splitlines() if ":" in line)
        except OSError:
            return False
        return int(fields["Uid"].split()[0]) == entry.pw_uid and fields["State"].split()[0] not in {"Z", "X"}

    for _ in range(200):
        pid = os.fork()
        if pid == 0:  # as the user, as one call then kills all of them at once; some may be making others
            os.setgroups([])
            os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
            os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
            try:
                os.kill(-1, 9)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        if not any(map(lives, Path("/proc").glob("[0-9]*/status"))):
            return
        time.sleep(0.01)
    raise SystemExit(f"processes of {user} can't be killed")
