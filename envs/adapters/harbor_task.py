"""What a task's folder says, of Harbor, or of terminal-bench before it: instruction, image, tests and solution."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError

PARTS = ("environment", "verifier", "solution")
"""The tables of a task.toml that may have variables."""
OWN = ("task.yaml", "solution.sh", "solution.yaml", "tests")
"""What a task of terminal-bench has beside the files of its image, and shows no policy."""
_OF_HOST = re.compile(r"\$\{[^}:]+(?::-(.*))?\}", re.DOTALL)


@dataclass(frozen=True)
class TaskFolder:
    """What a task's folder says, in either layout."""

    folder: Path
    instruction: str
    context: Path
    """The folder of the Dockerfile."""
    image: str = ""
    """An image in place of the one that the Dockerfile makes."""
    script: str = "test.sh"
    """What grades, among the tests."""
    solution: Path | None = None
    """The script that solves the task."""
    timeout: float = 600.0
    """Seconds that grading may take."""
    build_timeout: float = 600.0
    variables: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Of `environment`, `verifier` and `solution`, beside the image's."""
    about: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def tests(self) -> dict[str, bytes]:
        """The files that grade, by their path below /tests."""
        script = self.folder / self.script
        return files_below(self.folder / "tests") | ({self.script: script.read_bytes()} if script.is_file() else {})

    @property
    def surroundings(self) -> dict[str, bytes]:
        """The files that an image would copy, by their path; in the older layout, the task's own lie beside them."""
        own = {*OWN, self.script} if self.context == self.folder else set[str]()
        return {path: data for path, data in files_below(self.context).items() if path.split("/")[0] not in own}


def read_task(folder: Path) -> TaskFolder:
    """Return what a task's folder says.

    Raises:
        ConfigError: if it lacks something.
    """
    from yaml import YAMLError  # type: ignore[import-untyped]

    try:
        if (folder / "task.toml").is_file():
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
            environment, verifier = (settings.get(name, {}) for name in ("environment", "verifier"))
            found = TaskFolder(
                folder,
                (folder / "instruction.md").read_text(encoding="utf-8").strip(),
                folder / "environment",
                environment.get("docker_image", ""),
                solution=folder / "solution" / "solve.sh",
                timeout=float(verifier.get("timeout_sec", 600.0)),
                build_timeout=float(environment.get("build_timeout_sec", 600.0)),
                variables={part: _variables(settings.get(part, {}).get("env", {})) for part in PARTS},
                about=dict(settings.get("metadata", {})),
            )
        else:
            settings = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(folder / "task.yaml")))
            found = TaskFolder(
                folder,
                str(settings["instruction"]).strip(),
                folder,
                script="run-tests.sh",
                solution=folder / "solution.sh",
                timeout=float(settings.get("max_test_timeout_sec", 600.0)),
                about=settings,
            )
    except (OSError, LookupError, ValueError, TypeError, AttributeError, YAMLError) as error:
        raise ConfigError(f"{folder} is no task: {error!r}") from error
    if found.script not in found.tests:
        raise ConfigError(f"{folder} is no task: it has no tests/{found.script}, which grades")
    return found


def files_below(folder: Path) -> dict[str, bytes]:
    """Return the files below a folder, by their path in it."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()
    }


def _variables(given: Mapping[str, object]) -> dict[str, str]:
    """Return the variables of a table; of `${NAME:-other}` what is there without the host's, which stay on it.

    Raises:
        ValueError: if a value is no text.
    """
    if wrong := [f"{key}={value!r}" for key, value in given.items() if not isinstance(value, str)]:
        raise ValueError(f"env has {wrong[0]}, which is no text: put it in quotes")
    texts = {key: str(value) for key, value in given.items()}
    found = {key: there[1] if (there := _OF_HOST.fullmatch(value)) else value for key, value in texts.items()}
    return {key: value for key, value in found.items() if value is not None}
