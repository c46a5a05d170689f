"""Task folders of Harbor, or of terminal-bench before it: `from_harbor("tasks")` makes an `Env` of those in a folder.

A task is an instruction, an image to work in, and tests that are added after the episode and write a reward to a file.
A compose file beside the Dockerfile names services, which run beside the sandbox on Docker. The image becomes one for
our sandboxes, whose root can't be written and which have no network: the folders that tasks write to are links into the
working folder, and are filled when a sandbox opens. So tests that install packages when they run have to find them in
the image.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
import math
import re
import shlex
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, cast

import numpy as np

from agent_rl.core.episode import Episode
from agent_rl.core.messages import JSON, Task
from agent_rl.envs.adapters.harbor_task import files_below, read_task
from agent_rl.envs.quiz import one_call, write_calls
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Script
from agent_rl.gym.reward import reward
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.sandboxes.base import Limits, Sandbox
from agent_rl.sandboxes.calls import ExecResult, FileAccessError
from agent_rl.sandboxes.registry import shared_backend
from agent_rl.sandboxes.terminal import MAX_OUTPUT, Terminal
from agent_rl.tools.terminal import terminal
from agent_rl.worker_threads import in_thread

_log = logging.getLogger(__name__)

FOLDERS = ("/tests", "/logs", "/solution")
"""What Harbor's scripts read and write, in addition to the image's working folder; of links into `LINKED`."""
LINKED = ".task"
MAX_REWARD = 4096
"""Bytes of a file with rewards: reading one holds up the event loop, and the policy's code may have written it."""
MAX_SAID = 256 * 1024
"""Bytes of what tests print that are kept: pytest's summary is at their end."""
_FAILED = re.compile("^(FAILED|ERROR) ", re.MULTILINE)
_PLACES = 'export TASK="$PWD/.task"; export TEST_DIR="$TASK/tests" LOGS_DIR="$TASK/logs"; '
_RUN = _PLACES + 'cd "$1" && exec "$(command -v bash || command -v sh)" -c "$2"'


class HarborEnv(SandboxedEnv):
    """Work in a container until an answer; the task's own tests give the reward.

    `oracle` runs the task's own solution, where there is one.
    """

    tasks_folder: ClassVar[Path]
    default_budget = Budget(turns=50, score_seconds=3600.0)
    limits = Limits(memory=2 << 30, processes=256, disk=256 << 20, files=65536)
    snapshot_attributes = ()
    extra_tools = terminal
    command_seconds: ClassVar[float] = 120.0
    """For one command of the policy."""
    keeps_jobs: ClassVar[bool] = False
    """Whether the policy's background jobs go on while the tests run: tasks that ask for a server need that. But such
    a job can change what the tests read and write, the reward included."""

    def __init__(self, sandbox: str = "docker", sandbox_args: Mapping[str, JSON] | None = None) -> None:
        super().__init__(sandbox, sandbox_args)
        self._chosen = sandbox, dict(sandbox_args or {})
        self.workdir, self.variables, self._has_services = ".", dict[str, str](), False

    async def reset(self, task: Task, rng: np.random.Generator) -> str:
        """Open a sandbox of the task's image; say the instruction."""
        self.place = place = read_task(self.tasks_folder / str(task["name"]))
        name, options = self._chosen
        is_docker, variables = name == "docker", dict[str, str]()
        from agent_rl.sandboxes.docker.compose import Service, find_compose, read_compose

        file = find_compose(place.context)
        if file is not None and not is_docker:
            raise ConfigError(f"the services of {file} take sandbox=docker, not {name}")
        if is_docker:
            from agent_rl.sandboxes.docker.images import IMAGE_GB
            from agent_rl.sandboxes.docker.task_image import FILL, task_image

            main = Service("main", None) if file is None else read_compose(file).main
            source, host = place.image or main.source or place.context, cast("str | None", options.get("host"))
            most = float(cast("float", options.get("image_gb", IMAGE_GB)))
            build = functools.partial(task_image, source, FOLDERS, host, place.build_timeout, most)
            image = await in_thread(build, "from_harbor: build")
            self.workdir, variables = image.workdir, {**image.variables, **main.environment}
            services: dict[str, JSON] = {} if file is None else {"compose": str(file)}
            self._backend = shared_backend(name, {**options, **services, "image": image.name})
        self._has_services = file is not None
        self.variables = {**variables, **place.variables.get("environment", {})}
        sandbox = await self.open_sandbox()
        if is_docker:
            await sandbox.exec(["sh", "-c", FILL])
        else:  # what an image would have copied lies in the working folder
            for path, data in place.surroundings.items():
                await sandbox.write_file(path, data)
        return place.instruction

    def make_terminal(self) -> Terminal:
        """Return a terminal that begins in the task's working folder, with its image's variables."""
        setup = f"{_PLACES}cd {shlex.quote(self.workdir)}"
        return Terminal(self.sandbox, setup=setup, env=self.variables, seconds=self.command_seconds)

    @reward
    async def solved(self, episode: Episode) -> float:
        """What the task's tests wrote, 0 if nothing; terminal-bench's say it by exit status and pytest's summary."""
        if not self.keeps_jobs:
            await self.terminal.close()
        if self.keeps_jobs or self._has_services or (fresh := await self._fork()) is None:
            return await self._grade(self.sandbox)
        try:
            place, other = [(await each.exec(["pwd"])).stdout for each in (self.sandbox, fresh)]
            # files may name the folder that they were in, as virtual environments do
            return await self._grade(fresh if place == other else self.sandbox)
        finally:
            await fresh.close()

    async def _fork(self) -> Sandbox | None:
        """Return a fresh sandbox with the files that the policy left; None if they can't be had."""
        name = type(self).__name__
        try:
            fresh, _ = await self.sandbox.fork(self._backend, owner=name, limits=self.limits, lifetime=self.lifetime)
        except (NotImplementedError, FileAccessError) as error:
            _log.info("%s: the tests run where the policy worked: %s", name, error)
            return None
        return fresh

    async def _grade(self, sandbox: Sandbox) -> float:
        """Run the tests in a sandbox that has the policy's files; return the reward."""
        logs = f"{LINKED}/logs/verifier"
        clear = (
            'chmod -R u+rwX "$TASK"; rm -rf "$TASK/tests" "$TASK/logs"; mkdir -p "$TASK/tests" "$TASK/logs/verifier"'
        )
        await self._run(sandbox, clear)  # whatever the policy left there
        try:
            for path, data in self.place.tests.items():
                await sandbox.write_file(f"{LINKED}/tests/{path}", data)
        except FileAccessError:
            return 0.0  # it made the place unusable
        script = f'"$TEST_DIR/{self.place.script}"'
        self.variables |= self.place.variables.get("verifier", {})
        result = await self._run(sandbox, f'chmod -R +x "$TEST_DIR"; {script}', self.place.timeout, MAX_SAID)
        if result.timed_out:
            return 0.0  # what they wrote before is no result
        if self.place.script == "run-tests.sh":
            _, _, summary = result.stdout.rpartition("short test summary info")
            return float(result.returncode == 0 and not _FAILED.search(summary))
        for name, read in (("reward.txt", _number), ("reward.json", _number_of_json)):
            with contextlib.suppress(FileAccessError):  # there is none, or it is too large
                if (found := read(await sandbox.read_file(f"{logs}/{name}", max_bytes=MAX_REWARD))) is not None:
                    return found
        return 0.0

    def oracle(self) -> Script:
        """Run the task's own solution."""
        solution = self.place.solution
        if solution is None or not solution.is_file():
            raise NotImplementedError(f"the task {self.place.folder.name} has no solution")
        below = (
            files_below(solution.parent)
            if solution.parent.name == "solution"
            else {solution.name: solution.read_bytes()}
        )
        at = '"$TASK/solution"'
        yield from write_calls(f"{at}/.packed", _tar(below))
        unpack = f"tar -xzf {at}/.packed -C {at}\n"
        given = shlex.join(f"{key}={value}" for key, value in self.place.variables.get("solution", {}).items())
        command = f"{unpack}env {given} {at}/{solution.name}"
        if self.keeps_jobs:  # what it starts with & ends with its command: that has to go on
            solved = '"$TASK/solved"'
            yield one_call("shell", command=f"{command}; touch {solved}; sleep infinity", background=True)
            yield one_call("shell", command=f"until test -e {solved}; do sleep 0.1; done")
            yield one_call("job_log", job=1)
        else:
            yield one_call("shell", command=command)
        yield "done"

    async def _run(self, sandbox: Sandbox, command: str, timeout: float = 60.0, most: int = MAX_OUTPUT) -> ExecResult:
        argv = ["sh", "-c", _RUN, "sh", self.workdir, command]
        return await sandbox.exec(argv, env=self.variables, timeout=timeout, max_output=most)


def from_harbor(folder: str | Path) -> type[HarborEnv]:
    """Return an `Env` class of the tasks below a folder, for `@ar.register`; they are its `default_tasks`.

    Args:
        folder: of tasks, or of one: a folder with a task.toml, or with terminal-bench's task.yaml.

    Raises:
        ConfigError: if there is none, or one lacks something.
    """
    root = Path(folder).resolve()
    found = {file.parent for name in ("task.toml", "task.yaml") for file in root.rglob(name)}
    if not found:
        raise ConfigError(f"{root} has no tasks: a task is a folder with a task.toml or a task.yaml")
    rows = []
    for place in (read_task(task) for task in sorted(found) if found.isdisjoint(task.parents)):  # others are its files
        tags = {key: value for key in ("difficulty", "category") if isinstance(value := place.about.get(key), str)}
        rows.append({"name": place.folder.relative_to(root).as_posix(), "instruction": place.instruction, **tags})
    members: dict[str, object] = {"tasks_folder": root, "default_tasks": rows, "__doc__": f"The tasks of {root.name}."}
    members["__module__"] = sys._getframe(1).f_globals["__name__"]
    return type("Harbor", (HarborEnv,), members)


def _tar(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def _number(found: object) -> float | None:
    """Return the finite number that a file, or a value in it, holds, or None; the policy may have written it."""
    try:
        value = float(found) if isinstance(found, bytes | int | float | str) else math.nan
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _number_of_json(text: bytes) -> float | None:
    """Return the number by the name of `reward` in a JSON object, or its first one; None if there is none."""
    try:
        rewards = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return _number(rewards.get("reward", next(iter(rewards.values()), None)) if isinstance(rewards, dict) else None)
