"""A base image for sandboxes made offline, from the interpreter that is running: no registry, no network.

It holds this interpreter with its standard library and the bytecode of that, a shell and the usual small programs of
this machine, and the shared libraries of all of these; no package of yours. Who has a registry can build the
`Dockerfile` beside this file instead, and add packages to it.
"""

from __future__ import annotations

import importlib.util
import io
import marshal
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.docker.engine import Engine

IMAGE = "agent-rl/sandbox:latest"

PROGRAMS = """
awk base64 basename bash cat chmod cmp cp cut date dd df diff dirname du echo env expr false file find grep gunzip gzip
head id ln ls md5sum mkdir mkfifo mktemp mv nl od paste patch printf ps pwd readlink realpath rm rmdir sed seq sh
sha256sum sleep sort split stat tac tail tar tee test timeout touch tr true uname uniq wc which whoami xargs yes
"""
"""Taken from this machine where it has them."""

_LEFT_OUT = re.compile(
    r"/(site-packages|dist-packages|tests?|__pycache__|idlelib|tkinter|ensurepip|turtledemo|lib2to3|pydoc_data|config-.*)/|/_tkinter\."
)
"""Folders of the standard library: other people's packages, tests, what needs a screen, what builds extensions."""
_UNCHECKED = 1
"""In the head of a file of bytecode: a hash, which isn't looked at, stands there for the source's time."""
_LIBRARY = re.compile(r"(?:=> )?(/\S+) \(0x")

_FILES = {
    "/etc/passwd": "root:x:0:0::/:/bin/sh\nsandbox:x:1000:1000::/work:/bin/sh\n",
    "/etc/group": "root:x:0:\nsandbox:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
}
_FOLDERS = {"/dev", "/proc", "/sys", "/tmp", "/work"}


def build_image(engine: Engine, tag: str = IMAGE) -> str:
    """Import the image into a Docker engine; return the id it got.

    Raises:
        ConfigError: if this is not Linux, or `ldd` is missing.
        SandboxError: if the engine can't be reached, or refuses the image.
    """
    if sys.platform != "linux" or not shutil.which("ldd"):
        raise ConfigError("an image is made of this machine's files, which takes Linux and ldd; build the Dockerfile")
    with tempfile.TemporaryDirectory(prefix="agent-rl-image-") as folder:
        file = Path(folder, "image.tar")
        with tarfile.open(file, "w", format=tarfile.GNU_FORMAT) as tar:
            write_root(tar)
        return engine.import_image(file, tag)


def write_root(tar: tarfile.TarFile) -> None:
    """Write the image's root file system."""
    interpreter = Path(os.path.realpath(sys.executable))
    programs = [Path(found) for name in PROGRAMS.split() if (found := shutil.which(name, path="/bin:/usr/bin"))]
    library = Path(sysconfig.get_path("stdlib"))
    modules = [file for file in _files_under(library) if not _LEFT_OUT.search(str(file))]
    linked = libraries_of([interpreter, *programs, *(file for file in modules if file.suffix == ".so")])
    where = Path("/etc/ld.so.cache")  # says where this machine's libraries are
    copied = {str(file): file for file in [interpreter, *modules, *linked, *([where] if where.exists() else [])]}
    copied |= {f"/usr/local/bin/{program.name}": program for program in programs}
    compiled = {importlib.util.cache_from_source(str(file)): file for file in modules if file.suffix == ".py"}
    links = {link: f"/usr/local/bin/{Path(link).name}" for link in ("/bin/sh", "/bin/bash", "/usr/bin/env")}
    links |= {f"/usr/local/bin/{name}": str(interpreter) for name in ("python3", "python")}
    _add_folders(tar, (*copied, *compiled, *links, *_FILES))
    for name, text in _FILES.items():
        _add(tar, name, data=text.encode())
    for name, file in copied.items():
        _add(tar, name, data=file.read_bytes(), mode=0o755 if os.access(file, os.X_OK) else 0o644)
    for name, file in compiled.items():
        _add(tar, name, data=_bytecode(file))
    for name, target in links.items():
        _add(tar, name, tarfile.SYMTYPE, target=target)


def _add_folders(tar: tarfile.TarFile, names: Iterable[str]) -> None:
    """Write the folders that some files lie in, and those of every machine, outer ones first."""
    for folder in sorted(_FOLDERS.union(str(folder) for name in names for folder in Path(name).parents)):
        _add(tar, folder, tarfile.DIRTYPE, mode=0o1777 if folder == "/tmp" else 0o755)


def _bytecode(file: Path) -> bytes:
    """Return a module's bytecode as a file that Python takes without a look at the source.

    Nothing in a container can keep what it compiles, so each would compile all that it imports: the agent's imports
    take four times as long then.
    """
    code = SourceFileLoader("", str(file)).get_code("")
    return importlib.util.MAGIC_NUMBER + struct.pack("<I8x", _UNCHECKED) + marshal.dumps(code)


def libraries_of(files: Iterable[Path]) -> list[Path]:
    """Return the shared libraries that programs and extensions load, as `ldd` finds them."""
    listed = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False)  # 1: one is static
    return sorted({Path(name) for name in _LIBRARY.findall(listed.stdout)})


def _files_under(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())


def _add(
    tar: tarfile.TarFile,
    name: str,
    kind: bytes = tarfile.REGTYPE,
    *,
    data: bytes = b"",
    target: str = "",
    mode: int = 0,
) -> None:
    entry = tarfile.TarInfo(name.strip("/") or ".")
    entry.type, entry.size, entry.linkname = kind, len(data), target
    entry.mode = mode or (0o755 if kind == tarfile.DIRTYPE else 0o644)
    tar.addfile(entry, io.BytesIO(data))
