"""The worker as a program of its own: as a fork of the agent, it would have in its memory what the agent has read.

It loads the bytecode of its modules from a file without a name, as code can't see those of agent_rl.
"""

from __future__ import annotations

import functools
import importlib
import marshal
import os
import sys
from typing import TYPE_CHECKING, NoReturn, cast

from .frames import write_all

if TYPE_CHECKING:  # of agents that wait, this would take memory
    from importlib.abc import InspectLoader

_MODULES = ("frames", "plots", "worker")
"""What the worker consists of, in the order of the imports."""
_FILE = 5
"""The descriptor of the bytecode; those of `interpreter.start` are below."""
_MAIN = f"""
import sys
sys.path[:] = filter(None, sys.path)  # nothing of the folder that it starts in
import marshal, os, types
with open({_FILE}, "rb") as file:
    name, sys.path[:], environment, codes = marshal.load(file)
os.environ.clear()
os.environ.update(environment)
package = sys.modules[name] = types.ModuleType(name)
for part, code in codes.items():
    module = sys.modules[name + "." + part] = types.ModuleType(name + "." + part)
    module.__package__ = name
    setattr(package, part, module)
    exec(code, module.__dict__)
module.serve(4, 3)
"""


@functools.cache
def codes() -> dict[str, object]:
    """Return the bytecode by module; it has to be called once where agent_rl's files can be read."""
    found: dict[str, object] = {}
    for part in _MODULES:
        name = f"{__package__}.{part}"
        spec = importlib.import_module(name).__spec__
        found[part] = cast("InspectLoader", spec.loader if spec else None).get_code(name)
    return found


def file() -> int:
    """Return the descriptor of a new file with what the program loads, to be given to it as number 5.

    Raises:
        OSError: if there can't be one.
    """
    fd = os.memfd_create("worker")
    write_all(fd, marshal.dumps((__package__, sys.path, dict(os.environ), codes())))
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def become() -> NoReturn:
    """Become the program, in a Python that was started as this one: with the same order of sets, if that is fixed."""
    flags = ["-I" if sys.flags.isolated else "-s", *(["-S"] if sys.flags.no_site else [])]
    order = {} if sys.flags.hash_randomization else {"PYTHONHASHSEED": "0"}
    own = {name: os.environ[name] for name in ("LANG", "MALLOC_ARENA_MAX")}  # the others are in the file
    os.execve(sys.executable, [sys.executable, *flags, "-B", "-c", _MAIN], own | order)
