"""The project's own files, for the tests of the house rules."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from conftest import TOP_LEVEL

ROOT = Path(__file__).parent.parent
FOLDERS = ("agent_rl", *TOP_LEVEL)


def python_files(*folders: str) -> list[Path]:
    """Every Python file, once: the symlinks inside agent_rl/ are not followed."""
    return sorted(
        file for folder in folders for file in files_in(ROOT / folder, symlinks=False) if file.suffix == ".py"
    )


def files_in(folder: Path, *, symlinks: bool) -> Iterator[Path]:
    """Every file of a folder, but for bytecode."""
    for parent, folders, names in os.walk(folder, followlinks=symlinks):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (Path(parent, name) for name in names)


def module_name(file: Path) -> str:
    """The name that a file is imported by: envs/search.py is agent_rl.envs.search."""
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in TOP_LEVEL:
        parts.insert(0, "agent_rl")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(file): file for file in python_files(*FOLDERS)}
"""Every module of the project, by its name."""


def run_python(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the interpreter on the project's packages, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=600)
