"""The backends of the suites, by name: how to make each, or the reason of its absence.

To join, a backend needs an entry in `BACKENDS`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Limits, Sandboxes
from agent_rl.sandboxes.local.backend import LocalSandboxes

LIMITS = Limits(memory=192 << 20, processes=32, cpus=1.0, disk=2 << 20, files=256)
DEFAULT = "jail"
"""The backend of the ordinary suite: the users' default."""
SUITES = tuple(
    f"tests/sandbox/test_{name}.py"
    for name in (
        *("contract", "contract_files", "processes", "hostile_processes", "terminal", "earlier_inputs", "attacks"),
        *("endings", "grading"),
    )
)
"""The files that are run on a backend with a server, too."""
UNPRIVILEGED = 65534


def _as_user(uid: int) -> tuple[str, ...]:
    return ("setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups")


DOCKER_HOST, E2B_ADDRESS = "AGENT_RL_DOCKER_HOST", "AGENT_RL_E2B_ADDRESS"
REMOTE_ADDRESS = "AGENT_RL_SANDBOXES_ADDRESS"
E2B_KEY = "e2b_" + "0" * 40
"""The key of `e2b_server`."""


@dataclass(frozen=True)
class Backend:
    """A backend, and its facts for the suites."""

    name: str
    make: Callable[[], Sandboxes]
    """Skips the test, loudly, if there is no such backend here."""
    refused: Callable[[], bool] = lambda: False
    """Whether the kernel refuses its primitives, tried without code of ours: only then may it be missing."""
    uid: int | None = None
    """The user whose processes the sandbox's code could signal; None: ours."""
    has_sockets: bool = True
    """Whether code has sockets, in a network of its own."""
    has_users: bool = False
    """Whether calls can have another user."""
    needs: str | None = None
    """The environment variable of its server's address; None: it has no server."""
    run_by: str = ""
    """What pytest is told to start the server and run the suites on it."""
    its_own: Mapping[str, str] = field(default_factory=dict)
    """What code may use there of what it leaves alone in a local sandbox, by name, each with the reason."""
    differs: Mapping[str, str] = field(default_factory=dict)
    """The tests that it skips, by name, each with the reason of the difference."""

    def elsewhere(self) -> bool:
        """Whether its server is missing, so that its suites are not run."""
        return self.needs is not None and self.needs not in os.environ


def readable_python() -> str:
    """Return an interpreter that every user can start."""
    for path in (sys.executable, shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")):
        if path is not None:
            real = Path(path).resolve()
            if all(folder.stat().st_mode & 1 for folder in (real, *real.parents)):
                return str(real)
    pytest.skip("there is no Python that other users can run")


def _local(tier: str) -> LocalSandboxes:
    _need_linux()
    python = None if tier == "jail" else readable_python()
    return LocalSandboxes(LIMITS, tier=tier, python=python)


def unprivileged(tier: str, uid: int = UNPRIVILEGED) -> LocalSandboxes:
    """Return local sandboxes of a trainer that is another user than root."""
    _need_linux()
    if os.geteuid() != 0:
        pytest.skip(f"needs root, to become another user; the backend '{tier}' is this one already")
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv, of util-linux")
    return LocalSandboxes(LIMITS, tier=tier, python=readable_python(), launcher=_as_user(uid))


_NAMESPACES = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc", "--net", "--ipc", "--uts")
_LANDLOCK_ABI = "import ctypes; print(ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1))"


def _refused(tier: str, launcher: Sequence[str] = ()) -> bool:
    if tier == "landlock":
        ran = subprocess.run([sys.executable, "-c", _LANDLOCK_ABI], capture_output=True, text=True, check=True)
        return int(ran.stdout) < 6
    if shutil.which("unshare") is None:
        return True  # perhaps
    return subprocess.run([*launcher, *_NAMESPACES, "true"], capture_output=True).returncode != 0


def _docker() -> Sandboxes:
    from agent_rl.sandboxes.docker import DockerSandboxes

    return DockerSandboxes(host=os.environ[DOCKER_HOST], limits=LIMITS)


def _e2b(interpreter: str) -> Sandboxes:
    from agent_rl.sandboxes.e2b import E2BSandboxes

    address = os.environ[E2B_ADDRESS]
    os.environ.update(E2B_API_URL=address, E2B_SANDBOX_URL=address, E2B_HTTP_VERSION="1.1")
    return E2BSandboxes(interpreter=interpreter, api_key=E2B_KEY)


def _remote() -> Sandboxes:
    from agent_rl.sandboxes.remote import RemoteSandboxes

    return RemoteSandboxes(os.environ[REMOTE_ADDRESS], limits=LIMITS)


def _need_linux() -> None:
    if sys.platform != "linux":
        pytest.skip("local sandboxes need Linux")


_OF_LANDLOCK = {
    "test_code_is_a_user_with_a_name": "what names users is the host's /etc/passwd, which code can't read",
}
_OF_THE_TEMPLATE = {"test_open_sets_the_given_limits": "limits are those of E2B's template"}
_OF_CONTAINERS = {
    "watch files": "the kernel counts watches by user, and a container's is its own",
    "hold more of the user's pages of pipes": "the kernel counts them by user, too",
    "lease a file": "code owns no files but those of its container",
    "open many terminals": "they are of a file system of its own, which the engine gives no bound; SECURITY.md says so",
    **dict.fromkeys(
        (
            "read its disk past its memory",
            "read its disk by a flag that is set later",
            "open files by a structure that no filter can see",
        ),
        "runc itself may need openat2 under the filter; SECURITY.md says so",
    ),
}
_OF_JUPYTER = {
    "test_capabilities_name_every_guarantee": "code can become root in E2B's template, so kill_all is not promised",
    "test_timeout_ends_a_fork_storm": "what Python leaves running ends with a timeout, not with the next command",
    "test_run_python_captures_output_of_every_level": "Jupyter keeps no order between Python and its subprocesses",
    "test_run_python_ignores_answers_of_forks": "the fork of a kernel is another kernel, and never ends",
    "test_run_python_returns_errors_of_the_code[x = '\\x00'-null bytes]": "IPython takes NUL in code",
    "test_run_python_returns_errors_of_the_code[input()-nobody to answer]": "IPython has another error for input()",
}
BACKENDS = {
    backend.name: backend
    for backend in (
        Backend("jail", lambda: _local("jail"), lambda: _refused("jail")),
        Backend(
            "jail-unprivileged",
            lambda: unprivileged("jail"),
            lambda: _refused("jail", _as_user(UNPRIVILEGED)),
            uid=UNPRIVILEGED,
        ),
        *(
            Backend(
                name,
                partial(make, "landlock"),
                lambda: _refused("landlock"),
                uid=uid,
                has_sockets=False,
                differs=_OF_LANDLOCK,
            )
            for name, make, uid in (("landlock", _local, None), ("landlock-unprivileged", unprivileged, UNPRIVILEGED))
        ),
        Backend("remote", _remote, needs=REMOTE_ADDRESS, run_by="tests/adapters/test_sandbox_server.py"),
        Backend(
            "docker",
            _docker,
            has_users=True,
            needs=DOCKER_HOST,
            run_by="-m e2e tests/e2e/test_docker.py",
            its_own=_OF_CONTAINERS,
        ),
        *(
            Backend(
                name,
                partial(_e2b, interpreter),
                needs=E2B_ADDRESS,
                run_by="-m e2e tests/e2e/test_e2b.py",
                differs=_OF_THE_TEMPLATE | differs,
            )
            for name, interpreter, differs in (("e2b", "agent", {}), ("e2b-jupyter", "jupyter", _OF_JUPYTER))
        ),
    )
}


@contextlib.contextmanager
def skip_if_refused() -> Iterator[None]:
    """Skip the test if no sandbox works here."""
    try:
        yield
    except SandboxError as error:
        pytest.skip(f"the kernel refuses: {error}")
