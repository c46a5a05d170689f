"""Tasks of repositories, as SWE-bench has them: `from_swe("tasks.jsonl")` makes an `Env` of the rows of a file.

A row is a repository at a commit, an issue's text, tests that fail before the issue is solved and pass afterwards
(FAIL_TO_PASS), others that have to go on passing (PASS_TO_PASS), the tests' own changes as a diff (test_patch) and a
solution (patch). The policy works in a terminal. Then the files that it changed are copied to a fresh sandbox, the
tests' files over them, and the tests are run there: nothing else of the policy's leaves its sandbox, neither processes
nor files beside the repository. But its code runs in the process of the tests, and could print what these print.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, Task
from agent_rl.envs.adapters.patches import FilePatch, patched, read_patch
from agent_rl.envs.adapters.printed_tests import MAX_LINE, all_pass, pieces_of
from agent_rl.envs.quiz import one_call, write_calls
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.reward import reward
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.gym.task_files import read_rows
from agent_rl.gym.tasks import TRAIN
from agent_rl.sandboxes.base import Limits, Sandbox
from agent_rl.sandboxes.calls import MAX_FILE, ExecResult, FileAccessError
from agent_rl.sandboxes.registry import shared_backend
from agent_rl.sandboxes.terminal import Terminal
from agent_rl.tools.terminal import terminal
from agent_rl.worker_threads import in_thread

REQUIRED = ("instance_id", "problem_statement", "base_commit", "test_patch", "FAIL_TO_PASS", "PASS_TO_PASS")
TEST = "python3 -m pytest -rA --no-header -p no:cacheprovider"
"""The command of tests, in front of the files that `test_patch` names; a row's `test_command` is taken as it is."""
FOLDER = "repo"
"""Where a repository of `repositories` lies, in the sandbox's working folder."""
PIECE = MAX_FILE // 2
LENIENT = "surrogateescape"
"""How bytes of a patch's file that are no UTF-8 come through."""
FILL_SECONDS, BUILD_SECONDS = 300.0, 600.0
MAX_OUTPUT = 2 * 1024 * 1024
"""Bytes of what tests print: half of the head, half of the tail, where pytest sums up."""
MAX_SURVEY = 8 * 1024 * 1024
"""Bytes of the list of a repository's files: of some 80,000."""
_SURVEY = """
import hashlib, json, os, sys
for top, folders, names in os.walk(sys.argv[1]):
    folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
    for name in names:
        path = os.path.join(top, name)
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as file:
                mark = "x" if os.stat(path).st_mode & 0o100 else "-"
                print(hashlib.sha256(file.read()).hexdigest() + mark, json.dumps(os.path.relpath(path, sys.argv[1])))
"""
_UNPACK = (
    f"mkdir {FOLDER} && cat .packed/* | tar -xz -C {FOLDER} && rm -r .packed; cd {FOLDER} && git init -q && "
    "git add -Af && git -c user.name=base -c user.email= commit -qm base"
)


class SweEnv(SandboxedEnv):
    """Solve an issue of a repository; its tests, some of them hidden, say whether that is done.

    `oracle` applies the row's own `patch`.
    """

    repositories: ClassVar[Path | None] = None
    default_budget = Budget(turns=100, score_seconds=3600.0)
    extra_tools = terminal
    limits = Limits(memory=4 << 30, processes=256, disk=1 << 30, files=200_000)
    snapshot_attributes = ()
    command_seconds: ClassVar[float] = 120.0
    """For one command of the policy."""
    test_seconds: ClassVar[float] = 1800.0
    """For all tests of a task."""

    def __init__(self, sandbox: str = "docker", sandbox_args: Mapping[str, JSON] | None = None) -> None:
        super().__init__(sandbox, sandbox_args)
        self._chosen = sandbox, dict(sandbox_args or {})
        self._image, self.folder, self.variables = "", FOLDER, dict[str, str]()

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Open a sandbox that has the repository; say the issue."""
        self.row = task
        name, options = self._chosen
        self._image = image_of(task) if name == "docker" else ""
        if self._image:
            from agent_rl.sandboxes.docker.images import IMAGE_GB
            from agent_rl.sandboxes.docker.task_image import task_image

            host = cast("str | None", options.get("host"))
            most = float(cast("float", options.get("image_gb", IMAGE_GB)))
            build = functools.partial(task_image, self._image, (), host, BUILD_SECONDS, most)
            image = await in_thread(build, "from_swe: image")
            self.folder, self.variables = image.workdir, image.variables
            self._backend = shared_backend(name, {**options, "image": image.name})
        elif self.repositories is None:
            raise ConfigError(
                "without Docker the repositories are needed: from_swe(..., repositories=FOLDER), or sandbox=docker"
            )
        sandbox = await self.open_sandbox()
        await self._fill(sandbox)
        self.solution = await self._after(sandbox, read_patch(str(task.get("patch") or "")))
        where = self.folder if self.folder.startswith("/") else f"the folder {self.folder}, where your shell begins"
        return f"Solve this issue of the repository in {where}. Its tests will be run.\n\n{task['problem_statement']}"

    def make_terminal(self) -> Terminal:
        """Return a terminal that begins in the repository."""
        setup = f"cd {shlex.quote(self.folder)}"
        return Terminal(self.sandbox, setup=setup, env=self.variables, seconds=self.command_seconds)

    @reward
    async def resolved(self, episode: Episode) -> bool:
        """Whether all tests pass that should, run in a fresh sandbox on the files that the policy changed."""
        changed = await self._survey(self.sandbox)
        fresh = await self._backend.open(owner=type(self).__name__, limits=self.limits, lifetime=self.lifetime)
        try:
            await self._fill(fresh)
            tests = read_patch(str(self.row["test_patch"]))
            own = {path for patch in tests for path in (patch.old, patch.new) if path is not None}
            try:
                await self._bring({path: hash for path, hash in changed.items() if path not in own}, fresh, own)
                for path, text in (await self._after(fresh, tests)).items():
                    if text is None:
                        await self._run(fresh, f"rm -f {shlex.quote(path)}", FILL_SECONDS)
                    else:
                        await fresh.write_file(f"{self.folder}/{path}", text.encode(errors=LENIENT))
            except FileAccessError:
                return False  # what the policy left can't be read, is too large, or leaves the tests no place
            command = str(self.row.get("test_command") or f"{TEST} {shlex.join(files_of(tests))}")
            output = (await self._run(fresh, f"exec 2>&1; {command}", self.test_seconds, MAX_OUTPUT)).stdout
        finally:
            await fresh.close()
        names = [*names_of(self.row, "FAIL_TO_PASS"), *names_of(self.row, "PASS_TO_PASS")]
        return await in_thread(functools.partial(all_pass, output, names), "from_swe: output")

    def oracle(self) -> Script:
        """Write the files as the row's patch leaves them."""
        for path, text in self.solution.items():
            name = shlex.quote(path)
            if text is None:
                yield one_call("shell", command=f"rm {name}")
            else:
                yield from write_calls(name, text.encode(errors=LENIENT))
        yield "done"

    async def _fill(self, sandbox: Sandbox) -> None:
        """Bring a new sandbox to the repository's state."""
        if self._image:
            from agent_rl.sandboxes.docker.task_image import FILL

            await sandbox.exec(["sh", "-c", FILL], timeout=FILL_SECONDS)
            return
        assert self.repositories is not None
        where, commit = repository_of(self.repositories, self.row), str(self.row["base_commit"])
        packed = await in_thread(functools.partial(archive, where, commit), "from_swe: archive")
        for n, start in enumerate(range(0, len(packed), PIECE)):
            await sandbox.write_file(f".packed/{n:04}", packed[start : start + PIECE])
        ran = await sandbox.exec(["sh", "-c", _UNPACK], timeout=FILL_SECONDS)
        if not await self._survey(sandbox):
            raise SandboxError(f"the repository of {self.row['instance_id']} can't be unpacked: {ran.stderr}")

    async def _survey(self, sandbox: Sandbox) -> dict[str, str]:
        """Return the hash of each of the repository's files, by path; empty if what the policy left can't be told.

        Behind it stands x for a program, otherwise -.
        """
        command = f"exec python3 -I -S -c {shlex.quote(_SURVEY)} ."
        ran = await self._run(sandbox, command, FILL_SECONDS, MAX_SURVEY)
        return {} if ran.truncated else await in_thread(functools.partial(hashes, ran.stdout), "from_swe: survey")

    async def _bring(self, left: Mapping[str, str], fresh: Sandbox, own: set[str]) -> None:
        """Have a fresh sandbox's files be those that the policy left, but for the tests' own.

        Raises:
            FileAccessError: if one can't be read or written.
        """
        base = await self._survey(fresh)
        if not base:  # nothing of the policy's has run there
            raise SandboxError(f"the files of {self.row['instance_id']} can't be listed, or are too many")
        changed = {path: hash[-1] for path, hash in left.items() if base.get(path) != hash}
        await self._on_files(fresh, "rm -f", base.keys() - left.keys() - own)
        for path in changed:
            await fresh.write_file(f"{self.folder}/{path}", await self.sandbox.read_file(f"{self.folder}/{path}"))
        await self._on_files(fresh, "chmod -x", changed)
        await self._on_files(fresh, "chmod +x", {path for path, mark in changed.items() if mark == "x"})

    async def _on_files(self, sandbox: Sandbox, command: str, paths: Collection[str]) -> None:
        """Run a command on files of the repository."""
        if paths:
            argv = ["xargs", "-0", *command.split(), "--"]
            await sandbox.exec(argv, input=os.fsencode("\0".join(paths)), cwd=self.folder, timeout=FILL_SECONDS)

    async def _after(self, sandbox: Sandbox, patches: Sequence[FilePatch]) -> dict[str, str | None]:
        """Return the texts that patches make of a sandbox's files, by path."""
        paths = [patch.old for patch in patches if patch.old is not None]
        before = {path: (await sandbox.read_file(f"{self.folder}/{path}")).decode(errors=LENIENT) for path in paths}
        return patched(patches, before)

    async def _run(self, sandbox: Sandbox, command: str, seconds: float, most: int = MAX_LINE) -> ExecResult:
        """Run a command in the repository; keep so much of its output."""
        argv = ["sh", "-c", f"cd {shlex.quote(self.folder)} && {command}"]
        return await sandbox.exec(argv, env=self.variables, timeout=seconds, max_output=most)


def from_swe(file: str | Path, *, repositories: str | Path | None = None) -> type[SweEnv]:
    """Return an `Env` class of the tasks in a file, for `@ar.register`; they are its `default_tasks`.

    Args:
        file: SWE-bench's rows: a JSON object a line, or another file of tasks; `image_name` or `docker_image` has the
            repository, as its working folder.
        repositories: a folder of clones, each by its name (owner/name, or owner__name), for rows without an image, and
            for sandboxes that are no containers.

    Raises:
        ConfigError: if a line is no row, lacks something, or is of a repository that is not there.
    """
    rows = read_rows(Path(file).resolve(), TRAIN, Path())
    below = Path(repositories).resolve() if repositories is not None else None
    for row in rows:
        check_row(row, below)
    members: dict[str, object] = {"repositories": below, "default_tasks": rows, "__doc__": f"The tasks of {file}."}
    members["__module__"] = sys._getframe(1).f_globals["__name__"]
    return type("Swe", (SweEnv,), members)


def check_row(row: Mapping[str, JSON], repositories: Path | None) -> None:
    """Check a row.

    Raises:
        ConfigError: if it lacks something.
    """
    name = row.get("instance_id")
    if missing := [key for key in REQUIRED if key not in row]:
        raise ConfigError(f"the row of {name} has no {', '.join(missing)}")
    if not names_of(row, "FAIL_TO_PASS"):
        raise ConfigError(f"{name}: FAIL_TO_PASS names no test, so that doing nothing would solve it")
    for key in ("patch", "test_patch"):
        read_patch(str(row.get(key) or ""))
    if repositories is not None:
        repository_of(repositories, row)
    elif not image_of(row):
        raise ConfigError(f"{name} has no image_name: give a folder of clones, from_swe(..., repositories=FOLDER)")


def names_of(row: Mapping[str, JSON], key: str) -> list[str]:
    """Return the names of tests: a list, or JSON of one.

    Raises:
        ConfigError: if it is neither.
    """
    value = row[key]
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{row['instance_id']}: {key}={value!r}; give a list of the names of tests")
    return found


def image_of(row: Mapping[str, JSON]) -> str:
    """Return the image that has a row's repository; empty if it names none."""
    return str(row.get("image_name") or row.get("docker_image") or "")


def repository_of(below: Path, row: Mapping[str, JSON]) -> Path:
    """Return the clone that a row is of.

    Raises:
        ConfigError: if it isn't there.
    """
    name = str(row.get("repo") or "")
    for folder in (below / name, below / name.replace("/", "__")):
        if name and (folder / ".git").exists():
            return folder
    raise ConfigError(f"{row['instance_id']}: there is no clone of repo={name!r} in {below}")


@functools.lru_cache(maxsize=32)
def archive(repository: Path, commit: str) -> bytes:
    """Return a clone's files at a commit, as a packed tar: all of them, as they are, whatever it exports.

    Raises:
        ConfigError: if it has no such commit.
    """
    git = functools.partial(subprocess.run, cwd=repository, capture_output=True, text=True)
    objects = git(["git", "rev-parse", "--git-path", "objects"]).stdout.strip()
    found = git(["git", "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}"])
    if found.returncode:
        raise ConfigError(f"{repository} has no commit {commit!r}: {found.stderr.strip()}")
    with tempfile.TemporaryDirectory() as bare:  # its attributes come before those of the files
        git(["git", "init", "-q", "--bare", "--template=", bare], check=True)
        Path(bare, "info").mkdir()
        Path(bare, "info", "attributes").write_text("* -export-ignore -export-subst\n")
        env = {**os.environ, "GIT_DIR": bare, "GIT_ALTERNATE_OBJECT_DIRECTORIES": str(repository / objects)}
        packed = ["git", "archive", "--format=tar.gz", found.stdout.strip()]
        return subprocess.run(packed, capture_output=True, check=True, env=env).stdout


def files_of(patches: Sequence[FilePatch]) -> list[str]:
    """Return the files of Python that a diff leaves, without new ones that are empty."""
    left = (patch for patch in patches if patch.hunks or patch.old is not None)
    return [patch.new for patch in left if patch.new is not None and patch.new.endswith(".py")]


def hashes(said: str) -> dict[str, str]:
    """Return the hashes of files, by path, that a survey printed; empty if it can't have been one that printed that."""
    found = {}
    for line in (line for piece in pieces_of(said.removesuffix("\n")) for line in piece.split("\n")):
        try:
            path = json.loads(line[66:])
        except (ValueError, RecursionError):
            return {}
        if not isinstance(path, str) or path.startswith("/") or ".." in path.split("/"):
            return {}
        found[path] = line[:65]
    return found
