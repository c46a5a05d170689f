"""Compose files, as far as tasks with services need them: the subset that is read, everything else refused by name.

We read them ourselves, and don't ask `docker compose`: its network would let code reach what listens on the host, its
volumes and ports are the host's, and its containers outlive a trainer that is killed.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agent_rl.errors import ConfigError, in_brief

FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
MAIN = ("main", "client")
"""What Harbor and terminal-bench call the service in which the policy works: the sandbox itself."""
_KEYS = {
    *("image", "build", "environment", "command", "entrypoint", "working_dir", "user"),
    *("healthcheck", "depends_on", "tmpfs", "expose"),
}
_OF_MAIN = {"image", "build", "environment", "depends_on", "command", "container_name", "volumes", "expose"}
"""Those of the sandbox. What the harnesses say of their own container is not needed: its command, name and logs."""
_HEALTH = {"test", "interval", "timeout", "retries", "start_period", "disable"}
_CONDITIONS = ("service_started", "service_healthy")
_UNITS = {"us": 10**3, "ms": 10**6, "s": 10**9, "m": 60 * 10**9, "h": 3600 * 10**9}


@dataclass(frozen=True)
class Service:
    """A service, or what a file says of the sandbox itself."""

    name: str
    source: Path | str | None
    """A folder with a Dockerfile, or an image's name; None: a file may leave the sandbox's out."""
    environment: Mapping[str, str] = field(default_factory=dict)
    after: Mapping[str, str] = field(default_factory=dict)
    """The condition of each service that has to be there first."""
    healthcheck: Mapping[str, object] | None = None
    """As the engine takes it, times in nanoseconds."""
    tmpfs: tuple[str, ...] = ()
    """Folders that it writes to, in addition to /tmp, /run and the image's volumes."""
    config: Mapping[str, object] = field(default_factory=dict)
    """What else the engine takes, by its SDK's names."""


@dataclass(frozen=True)
class Compose:
    """What a file says."""

    main: Service
    services: tuple[Service, ...]
    """In the order in which they start."""


def find_compose(folder: Path) -> Path | None:
    """Return the compose file of a folder, if it has one."""
    return next((folder / name for name in FILES if (folder / name).is_file()), None)


def read_compose(file: Path) -> Compose:
    """Return what a compose file says.

    Raises:
        ConfigError: if it can't be read, or says what we don't do.
    """
    try:
        read = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file), resolve=False))
        named = dict(read["services"])
    except (OSError, LookupError, ValueError, TypeError, OmegaConfBaseException) as error:
        raise ConfigError(f"{file} is no compose file: {error!r}") from error
    except Exception as error:  # PyYAML's own
        raise ConfigError(f"{file} is no YAML: {in_brief(error)}") from error
    _refuse(file, "", set(read) - {"services", "version", "name"})
    found = {name: _service(file, name, about) for name, about in named.items()}
    main = next((found.pop(name) for name in MAIN if name in found), Service("main", None))
    for service in (main, *found.values()):
        if missing := set(service.after) - set(found):
            raise ConfigError(f"{file}: {service.name}: depends_on: there is no service '{min(missing)}'")
    return Compose(main, _in_order(file, found))


def _refuse(file: Path, service: str, keys: set[str]) -> None:
    if keys:
        where = f"{service}: " if service else ""
        raise ConfigError(f"{file}: {where}'{min(map(str, keys))}' is not supported; docs/sandboxes.md lists what is")


def _service(file: Path, name: str, about: object) -> Service:
    """Read one service."""
    if not isinstance(about, dict) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}", str(name)):
        raise ConfigError(f"{file}: '{name}' is no service")
    is_main = name in MAIN
    _refuse(file, name, set(about) - (_OF_MAIN if is_main else _KEYS))
    kept = _without_harness(file, name, about) if is_main else dict(about)
    environment = _environment(file, name, kept.pop("environment", None) or {}, is_main)
    if "${" in str(kept):
        raise ConfigError(f"{file}: {name}: ${{...}} is not replaced: write the value")
    try:
        return Service(
            name,
            _source(file, name, kept, is_main),
            environment,
            _after(kept.get("depends_on") or {}),
            _healthcheck(file, name, kept["healthcheck"]) if "healthcheck" in kept else None,
            tuple(_strings(kept.get("tmpfs") or ())),
            {key: _config(key, kept[key]) for key in ("command", "entrypoint", "working_dir", "user") if key in kept},
        )
    except (LookupError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{file}: {name}: {error}") from error


def _without_harness(file: Path, name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of the main service, less what harnesses say for themselves."""
    if any("${" not in str(volume) for volume in about.get("volumes") or ()):  # else the harness's own, for its logs
        _refuse(file, name, {"volumes"})
    kept = {key: value for key, value in about.items() if key not in ("command", "container_name", "volumes")}
    return {key: value for key, value in kept.items() if key not in ("image", "build") or "${" not in str(value)}


def _source(file: Path, name: str, about: Mapping[str, Any], is_main: bool) -> Path | str | None:
    build = about.get("build")
    if build is not None:
        build = {"context": build} if isinstance(build, str) else dict(build)
        _refuse(file, name, {f"build: {key}" for key in set(build) - {"context", "dockerfile"}})
        folder = Path(file.parent, str(build.get("context", "."))).resolve()
        if build.get("dockerfile", "Dockerfile") != "Dockerfile" or not (folder / "Dockerfile").is_file():
            raise ValueError(f"build: {folder} has to have a Dockerfile, of that name")
        if not folder.is_relative_to(file.parent.resolve()):
            raise ValueError(f"build: {folder} is not in the file's folder")
        return folder
    image = about.get("image")
    if not is_main and not image:
        raise ValueError("it has neither an image nor a build")
    return None if image is None else str(image)


def _environment(file: Path, name: str, given: object, is_main: bool) -> dict[str, str]:
    """Return variables, of a list or a mapping; without the harnesses' own, which have no value here."""
    lines = [str(line).split("=", 1) for line in given] if isinstance(given, list) else []
    pairs = {line[0]: line[1] if len(line) > 1 else None for line in lines}
    pairs |= dict(given) if isinstance(given, dict) else {}
    found = {}
    for variable, value in pairs.items():
        if is_main and "${" in str(value):
            continue
        if value is None or "${" in str(value):
            raise ConfigError(f"{file}: {name}: environment: {variable} has no value; the host's are not taken")
        found[str(variable)] = _plain(str(value).lower() if isinstance(value, bool) else str(value))
    return found


def _after(given: object) -> dict[str, str]:
    if not isinstance(given, dict):
        return dict.fromkeys(_strings(given), _CONDITIONS[0])
    found = {str(name): str((about or {}).get("condition", _CONDITIONS[0])) for name, about in given.items()}
    for condition in found.values():
        if condition not in _CONDITIONS:
            raise ValueError(f"depends_on: condition '{condition}' is not supported; {' and '.join(_CONDITIONS)} are")
    return found


def _healthcheck(file: Path, name: str, given: Mapping[str, Any]) -> dict[str, object]:
    _refuse(file, name, {f"healthcheck: {key}" for key in set(given) - _HEALTH})
    if given.get("disable"):
        return {"test": ["NONE"]}
    found: dict[str, object] = {}
    if "test" in given:
        test = given["test"]
        found["test"] = ["CMD-SHELL", _plain(test)] if isinstance(test, str) else _strings(test)
    found |= {key: _nanoseconds(given[key]) for key in ("interval", "timeout", "start_period") if key in given}
    return found | ({"retries": int(given["retries"])} if "retries" in given else {})


def _nanoseconds(text: object) -> int:
    """Return a time such as 1m30s or 500ms."""
    pieces = re.findall(r"(\d+(?:\.\d+)?)(us|ms|s|m|h)", str(text))
    if not pieces or "".join(f"{number}{unit}" for number, unit in pieces) != str(text):
        raise ValueError(f"healthcheck: '{text}' is no time; write 500ms, 5s or 1m30s")
    return sum(int(float(number) * _UNITS[unit]) for number, unit in pieces)


def _config(key: str, given: object) -> object:
    if key in ("command", "entrypoint"):
        return shlex.split(_plain(given)) if isinstance(given, str) else _strings(given)
    return _plain(str(given))


def _strings(given: object) -> list[str]:
    if isinstance(given, str):
        return [_plain(given)]
    if not isinstance(given, Sequence):
        raise TypeError(f"{given!r} is no list")
    return [_plain(str(each)) for each in given]


def _plain(text: str) -> str:
    """Return a text as compose takes it: a dollar sign is written twice."""
    return text.replace("$$", "$")


def _in_order(file: Path, found: Mapping[str, Service]) -> tuple[Service, ...]:
    """Return services, each behind those that it depends on."""
    left, ordered = dict(found), list[Service]()
    while left:
        ready = [name for name, service in left.items() if not set(service.after) & set(left)]
        if not ready:
            raise ConfigError(f"{file}: depends_on: {', '.join(sorted(left))} wait for each other")
        ordered += [left.pop(name) for name in ready]
    return tuple(ordered)
