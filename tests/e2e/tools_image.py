"""An image with what tasks need beside Python: git, Redis and pytest, of this machine's own files."""

from __future__ import annotations

import shutil
import sysconfig
import tarfile
from importlib.metadata import files
from pathlib import Path

from agent_rl.sandboxes.docker import IMAGE, Engine
from agent_rl.sandboxes.docker.image import libraries_of
from tests.debian import has_program

TAG = "tests/tools:1"
PROGRAMS = {"git": "git", "redis-server": "redis-server", "redis-cli": "redis-tools"}
"""Each with Debian's package of it."""
PACKAGES = ("pytest", "pluggy", "iniconfig", "packaging", "pygments")
COMPILED = (
    "cd /tmp && echo 'def test_nothing(tmp_path): pass' >test_it.py && python3 -m pytest -q test_it.py && rm -r *"
)
"""Leaves the bytecode of what pytest loads, which each run would have to compile anew."""


def whats_missing() -> str | None:
    """Return a program that is not here, if any, and its package."""
    lacking = [name for name, package in PROGRAMS.items() if not has_program(name, package=package)]
    return f"{lacking[0]} is missing: apt-get install {PROGRAMS[lacking[0]]}" if lacking else None


def build_tools_image(engine: Engine, folder: Path) -> None:
    """Build the image, on top of the base image; what it is made of is left in a folder."""
    with tarfile.open(folder / "tools.tar", "w", dereference=True) as tar:
        programs = [Path(str(shutil.which(name))) for name in PROGRAMS]
        for file in programs:
            tar.add(file, f"/usr/local/bin/{file.name}")
        for file in libraries_of(programs):
            tar.add(file, str(file))
        site = Path(sysconfig.get_path("stdlib"), "site-packages")
        for file in (file for name in PACKAGES for file in files(name) or () if ".." not in file.parts):
            tar.add(file.locate(), str(site / file))
    (folder / "Dockerfile").write_text(f"FROM {IMAGE}\nADD tools.tar /\nRUN git --version && {COMPILED}\n")
    engine.build_image(folder, TAG, timeout=300)
