"""The backends by name, made once per process for all episodes that ask for the same."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError, did_you_mean
from agent_rl.sandboxes.base import Sandboxes
from agent_rl.sandboxes.pool import WarmPool

BACKENDS = {
    "local": "agent_rl.sandboxes.local:LocalSandboxes",
    "docker": "agent_rl.sandboxes.docker:DockerSandboxes",
    "e2b": "agent_rl.sandboxes.e2b:E2BSandboxes",
    "fake": "agent_rl.sandboxes.fake:FakeSandboxes",
}
"""Where each is, imported when it is asked for: they need one SDK or another."""

_NONE: Mapping[str, JSON] = {}
_shared: dict[str, Sandboxes] = {}


def make_backend(name: str, options: Mapping[str, JSON] = _NONE) -> Sandboxes:
    """Make a backend.

    Args:
        name: local, docker or e2b; fake for tests, which protects from nothing.
        options: the backend's own; for any of them, `warm` is the number of sandboxes to keep open ahead of their use
            and `most` the number that may be open.

    Raises:
        ConfigError: if there is no such backend, it does not take these options, or what it needs is missing.
    """
    if name not in BACKENDS:
        raise ConfigError(f"no sandbox '{name}'.{did_you_mean(name, BACKENDS)} There are: {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    make = cast(Callable[..., Sandboxes], getattr(importlib.import_module(module), attribute))
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

    It lives as long as the process, from one event loop to the next; what it holds ends with the process at the latest.

    Raises:
        ConfigError: as `make_backend` does.
    """
    key = json.dumps([name, dict(options)], sort_keys=True)
    if key not in _shared:
        _shared[key] = make_backend(name, options)
    return _shared[key]
