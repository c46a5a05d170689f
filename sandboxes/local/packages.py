"""Packages for local sandboxes: pip fills a folder on the host, once; all sandboxes that ask for the same can read it.

A folder is named by a hash of what was asked for, the interpreter and the platform. It is built beside its place, under
a lock, and then moved there: it is whole or not there. Nothing of this runs in a sandbox, and no sandbox can write it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from agent_rl.errors import ConfigError, SandboxError

PIP_TIMEOUT = 3600.0
"""Seconds that pip may take: it may have to compile."""
_IDENTITY = "import sys, sysconfig; print(sys.implementation.cache_tag, sysconfig.get_config_var('SOABI'))"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")


def check_requirements(packages: Sequence[str]) -> tuple[str, ...]:
    """Return a list of requirements, as pip takes them, in order and without repetitions.

    Raises:
        ConfigError: if it is no list of them.
    """
    if isinstance(packages, str) or not all(isinstance(package, str) for package in packages):
        raise ConfigError(f"packages={packages!r} is no list of requirements; give [numpy, 'pandas==2.3.3']")
    for package in packages:
        if not package.strip() or package.lstrip().startswith("-"):
            raise ConfigError(f"packages: {package!r} is no requirement; pip's options belong into its configuration")
    return tuple(sorted({package.strip() for package in packages}))


def provide(packages: Sequence[str], python: str, cache: Path | None = None) -> Path:
    """Return the folder with these packages, built if it is not there yet, which takes as long as pip does.

    Args:
        packages: from `check_requirements`.
        python: the interpreter that will import them.
        cache: where such folders are; `cache_folder()` if left out.

    Raises:
        SandboxError: if pip can't install them, with the last of what it says; or the interpreter doesn't start.
        OSError: if the folder can't be written.
    """
    python = os.path.realpath(shutil.which(python) or python)
    folder = (cache or cache_folder()) / _key(packages, python)
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _lock(folder.with_suffix(".lock")):
        if not folder.is_dir():  # another one has built it meanwhile
            with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as place:
                built = Path(place, "packages")
                _install(packages, python, built)
                built.chmod(0o755)
                built.rename(folder)
    return folder


def cache_folder() -> Path:
    """Return where the folders are: in $XDG_CACHE_HOME, else ~/.cache, or /var/cache for root, whose home is closed."""
    usual = Path("/var/cache") if os.geteuid() == 0 else Path("~/.cache").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or usual, "agent-rl", "packages")


def _key(packages: Sequence[str], python: str) -> str:
    """Return a folder's name; a requirement that is a file on this machine counts with its contents."""
    try:
        asked = subprocess.run([python, "-I", "-S", "-c", _IDENTITY], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SandboxError(f"packages: the sandboxes' Python, {python}, does not start: {error}") from error
    files = [Path(package.partition("@")[2].strip().removeprefix("file://") or package) for package in packages]
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "" for file in files]
    text = json.dumps([asked.stdout.split(), sys.platform, os.uname().machine, list(packages), digests])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(packages: Sequence[str], python: str, folder: Path) -> None:
    """Run pip, with its own configuration, for an interpreter that may have none itself."""
    other = [] if python == os.path.realpath(sys.executable) else ["--python", python]
    argv = [sys.executable, "-m", "pip", *other, "--disable-pip-version-check", "--no-input", "install", "--no-user"]
    try:
        ran = subprocess.run(
            [*argv, "--target", str(folder), *packages],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=PIP_TIMEOUT,
            umask=0o022,  # the code of a sandbox may be another user
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"packages={list(packages)}: pip took more than {PIP_TIMEOUT:g} s") from error
    if ran.returncode:
        raise SandboxError(_complaint(packages, ran.stderr))


def _complaint(packages: Sequence[str], said: str) -> str:
    """Return why there are no packages: which one, and the last line of what pip says of it."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "nothing")
    named = [package for package in packages if (name := _NAME.match(package)) and name[0].lower() in last.lower()]
    return (
        f"packages: pip can't install {', '.join(named or packages)} for the sandboxes: {last:.500}. `{sys.executable} "
        "-m pip install --dry-run` with the same shows all of it"
    )
