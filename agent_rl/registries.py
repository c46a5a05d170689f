"""Registries: named parts of one kind, built in, from a user's file or from an installed package.

A part is registered by a decorator when its module is imported. Built-in parts are listed with their module, which is
imported when the name is asked for; a user's file is imported by `--import` or `load_file`; an installed package names
its module in the entry point group `agent_rl.plugins` (or `agent_rl.envs`), which is imported at the first look-up of
a name that is not there yet.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from agent_rl.errors import ConfigError, NameCollisionError, did_you_mean

T = TypeVar("T")

ENTRY_POINTS = ("agent_rl.plugins", "agent_rl.envs")
"""The entry point groups of installed packages: modules that register something when they are imported."""

_SESSION = " in __main__"
"""How `where_of` ends for what was defined in a notebook or at a prompt: a script has a file."""


class Registry(Generic[T]):
    """Named parts of one kind; looking up a wrong name says which there are."""

    def __init__(self, kind: str, *, builtin: Mapping[str, str] | None = None) -> None:
        """Start with the built-in names, each with the module that registers it; messages call a part by the kind."""
        self.kind = kind
        self._builtin = dict(builtin or {})
        self._parts: dict[str, tuple[T, str]] = {}
        """Each part, and where it is from."""

    def add(self, name: str, part: T, owner: object) -> None:
        """Register a part under a name; `owner`, the function or class, may be loaded again and takes its own place.

        In a notebook, whatever was defined there under the name is replaced, and a line says so.

        Raises:
            NameCollisionError: if another function or class has the name.
        """
        if name not in self._parts and (module := self._builtin.get(name)) and module not in sys.modules:
            importlib.import_module(module)  # else the order of imports would decide whose name it is
        new = where_of(owner)
        old = self._parts[name][1] if name in self._parts else None
        if old is not None and old.endswith(_SESSION) and new.endswith(_SESSION):
            print(f"{self.kind} '{name}' is replaced by the {new.removesuffix(_SESSION)} just defined")
        elif old not in (None, new):
            raise NameCollisionError(f"{self.kind} '{name}' is registered twice: by {old}, and by {new}; rename one")
        self._parts[name] = (part, new)

    def __getitem__(self, name: str) -> T:
        """Return a part.

        Raises:
            ConfigError: if there is none of that name; it names the closest.
        """
        part = self.find(name)
        if part is None:
            known = self.names()
            raise ConfigError(f"no {self.kind} '{name}'.{did_you_mean(name, known)} There are: {', '.join(known)}")
        return part

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def find(self, name: str) -> T | None:
        """Return a part, after importing its module if it has one; None if there is none of that name."""
        if name not in self._parts and name in self._builtin:
            importlib.import_module(self._builtin[name])
        if name not in self._parts:
            load_plugins()
        return self._parts[name][0] if name in self._parts else None

    def names(self) -> tuple[str, ...]:
        """Return every name: built in, in order, then the others as they were registered."""
        load_plugins()
        return tuple(dict.fromkeys([*self._builtin, *self._parts]))

    def where(self, name: str) -> str:
        """Return the function or class that a name was registered with, and its file."""
        return self._parts[name][1]


_plugins_loaded = False


def load_plugins() -> None:
    """Import the plugins of installed packages, once; a broken one is skipped with a warning.

    Raises:
        NameCollisionError: if two packages register one name: the order of imports must not decide what it means.
    """
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True  # before the loop: a plugin may look names up while it is imported
    broken: list[str] = []
    for group in ENTRY_POINTS:
        for entry_point in importlib.metadata.entry_points(group=group):
            try:
                entry_point.load()
            except NameCollisionError:
                _plugins_loaded = False
                raise
            except Exception as error:
                broken.append(f"plugin '{entry_point.name}' is skipped: {type(error).__name__}: {error}")
    for message in broken:  # after the loop: where warnings are errors, the first would hide the plugins behind it
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def file_of(part: object) -> Path | None:
    """Return the file that a function or class was defined in; None in a notebook."""
    file = getattr(sys.modules.get(getattr(part, "__module__", "")), "__file__", None)
    return Path(file).resolve() if file else None


def where_of(part: object) -> str:
    """Return a function's or class's name and file, for people."""
    name = getattr(part, "__qualname__", repr(part))
    return f"{name} in {file_of(part) or getattr(part, '__module__', 'this session')}"
