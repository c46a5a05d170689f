"""The backends by name: built in, registered by a user's file, or by an installed package.

    @register_sandbox("mine")
    def mine(memory_mb: int = 256) -> Sandboxes:
        return DockerSandboxes(image="mine:1", limits=Limits(memory=memory_mb << 20))

A backend is made once per process, for all episodes that ask for the same one with the same options.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.registries import Registry
from agent_rl.sandboxes.base import Sandboxes
from agent_rl.sandboxes.pool import WarmPool

MakeSandboxes = Callable[..., Sandboxes]
M = TypeVar("M", bound=MakeSandboxes)
SANDBOXES: Registry[MakeSandboxes] = Registry(
    "sandbox",
    builtin={
        name: f"agent_rl.sandboxes.{name}.backend" for name in ("local", "docker", "e2b", "modal", "daytona", "remote")
    },
)

_NONE: Mapping[str, JSON] = {}
_shared: dict[str, Sandboxes] = {}
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _shared.clear())  # what serves a backend is its own process's


def register_sandbox(name: str) -> Callable[[M], M]:
    """Register a backend by a name that `env_args.sandbox` takes.

    What is decorated makes the backend: its class, or a function. Its parameters are the options that
    `env_args.sandbox_args` takes.

    Raises:
        NameCollisionError: if another backend has the name.
    """

    def add(make: M) -> M:
        SANDBOXES.add(name, make, make)
        return make

    return add


def make_backend(name: str, options: Mapping[str, JSON] = _NONE) -> Sandboxes:
    """Make a backend.

    Args:
        name: local, docker, e2b, modal, daytona, remote, or a registered one.
        options: the backend's own; for any of them, `warm` is the number of sandboxes to keep open ahead of their use
            and `most` the number that may be open.

    Raises:
        ConfigError: if there is no such backend, it does not take these options, or something that it needs is missing.
    """
    make = SANDBOXES[name]
    own = {option: value for option, value in options.items() if option not in ("warm", "most")}
    pool = {option: value for option, value in options.items() if option not in own}
    try:
        inspect.signature(make).bind(**own)
        inspect.signature(WarmPool).bind(None, **{"warm": 1, **pool})
    except TypeError as error:
        takes = ", ".join([*inspect.signature(make).parameters, "warm", "most"])
        raise ConfigError(f"the {name} sandbox, given {dict(options)}: {error}. It takes: {takes}") from None
    backend = make(**own)
    return WarmPool(backend, **cast(dict[str, Any], {"warm": 1, **pool})) if pool else backend


def shared_backend(name: str, options: Mapping[str, JSON] = _NONE) -> Sandboxes:
    """Return this process's backend of that name and those options, made when it is first asked for.

    It lives as long as the process, from one event loop to the next; a forked process makes its own.

    Raises:
        ConfigError: as `make_backend` does.
    """
    key = json.dumps([name, dict(options)], sort_keys=True)
    if key not in _shared:
        _shared.setdefault(key, make_backend(name, options))  # another thread may have been faster
    return _shared[key]
