"""The registry: environment ids to classes; `register`, `make`, `spec`, `env_ids`."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar, cast

from agent_rl.errors import ConfigError, DefinitionError, UnknownEnvError, did_you_mean
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.env_arguments import check_names, convert
from agent_rl.gym.published import publish
from agent_rl.gym.task_files import TaskRows
from agent_rl.gym.tasks import TaskFunction, TaskSource
from agent_rl.registries import Registry, file_of

E = TypeVar("E", bound=Env)

BUILTIN = {
    name: f"agent_rl.envs.{name.partition('-v')[0]}"
    for name in (
        "calculator-v0",
        "code-v0",
        "frozenlake-v0",
        "guess-v0",
        "nim-v0",
        "python-v0",
        "research-v0",
        "search-v0",
        "shell-v0",
        "sql-v0",
        "support-v0",
        "wordnet-v0",
    )
} | {"research-wordnet-v0": "agent_rl.envs.research"}
"""The module of each built-in environment, imported when the environment is asked for."""
NAMESPACES: dict[str, str] = {
    "bfcl": "multi-turn function calling, Berkeley's leaderboard",
    "miniwob": "web pages in a real Chromium, by clicks and keys",
    "reasoning_gym": "generated puzzles with exact answers",
    "tau2": "tau2-bench: customer service with tools, a policy and a simulated user",
    "textworld": "generated text games",
}
"""The packages whose environments an adapter of `envs/adapters` registers, by namespace, with what they are."""

REMOTE = "agent_rl.remote.client"
"""The module that plays the environments of a server, whose ids are addresses."""

_ID = re.compile(r"(?:([\w.-]+)/)?([\w.-]+)-v(\d+)", re.ASCII)
_folders: set[Path] = set()
"""Of the users' files that were loaded."""
_specs: Registry[EnvSpec] = Registry("environment", builtin=BUILTIN)
for _id in BUILTIN:
    publish(_id)


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """What is registered under an id, `[namespace/]name-v<version>`."""

    namespace: str
    """Such as a user's or a package's name; empty for the built-in ones."""
    name: str
    version: int
    cls: type[Env]
    tasks: TaskSource
    budget: Budget
    nondeterministic: bool = False
    """Whether replaying an episode may give other observations; the checker and `replay verify` then don't insist."""

    @property
    def id(self) -> str:
        """What it is registered under."""
        return f"{self.namespace}/{self.name}-v{self.version}" if self.namespace else f"{self.name}-v{self.version}"

    @property
    def file(self) -> Path | None:
        """The file that the class was defined in; None in a notebook."""
        return file_of(self.cls)

    def make(self, /, **env_args: object) -> Env:
        """Create the environment of one episode.

        Raises:
            ConfigError: if the class does not take these arguments.
        """
        converted = convert(self.id, self.cls, env_args)
        try:
            return self.cls(**converted)
        except TypeError:
            check_names(self.id, self.cls, env_args)
            raise

    def check_arguments(self, env_args: Mapping[str, object]) -> None:
        """Check that the class takes these arguments, by name and type.

        Raises:
            ConfigError: if it does not.
        """
        check_names(self.id, self.cls, env_args)
        convert(self.id, self.cls, env_args)


def register(
    id: str,
    *,
    tasks: Mapping[str, TaskRows] | TaskRows | TaskFunction | None = None,
    budget: Budget | None = None,
    splits: Sequence[str] | None = None,
    nondeterministic: bool = False,
) -> Callable[[type[E]], type[E]]:
    """Register an `Env` class under a versioned id.

    Args:
        id: such as "shop-v0" or "me/shop-v0". Raise the version when scores stop being comparable.
        tasks: the rows of each split, or of "train": a .jsonl, .json, .csv or .parquet file or a saved data set's
            folder (relative to the file of the class), or an iterable of dicts, such as a Hugging Face `Dataset`; or a
            function `(split, index) -> Task` that makes any number of them; or None: the class's `default_tasks`, or
            none, for environments that draw all they need from `rng`. Training takes `train` and evaluation `eval`, a
            part of `train` if it is not named; other splits are used where they are asked for.
        budget: what an episode may use unless the caller says otherwise; the class's `default_budget` if left out.
        splits: the names of the splits of a task function; "train" and "eval" if left out.
        nondeterministic: whether the same answers may meet different observations.

    Raises:
        ConfigError: if the id has no version, or the tasks make no sense.
        DefinitionError: if the class is no `Env`, or the budget no `Budget`.
        NameCollisionError: if another class has the id; the same class, loaded again, takes its own place, as does any
            class of a notebook in the place of one that was defined there.
    """
    if not isinstance(id, str):
        raise DefinitionError(f"@ar.register on {id!r} has no id: write @ar.register('name-v0', tasks=...)")
    parts = parse_id(id)

    def add(cls: type[E]) -> type[E]:
        if not (isinstance(cls, type) and issubclass(cls, Env)):
            raise DefinitionError(f"'{id}' is registered for {cls!r}, which is no subclass of agent_rl.Env")
        own = cls.default_budget if budget is None else budget
        if not isinstance(own, Budget):
            raise DefinitionError(f"'{id}' has budget={own!r}: give ar.Budget(turns=N)")
        file = file_of(cls)
        given = cls.default_tasks if tasks is None else tasks
        source = TaskSource(given, splits=splits, base=file.parent if file else Path.cwd())
        _specs.add(id, EnvSpec(*parts, cls, source, own, nondeterministic), cls)
        publish(id, nondeterministic)
        return cls

    return add


def parse_id(id: str) -> tuple[str, str, int]:
    """Return the namespace (empty if there is none), the name and the version of an id.

    Raises:
        ConfigError: if it has another form.
    """
    match = _ID.fullmatch(id)
    if match is None:
        raise ConfigError(f"environment id {id!r} is not of the form name-v0 or namespace/name-v0")
    return match[1] or "", match[2], int(match[3])


def spec(id: str) -> EnvSpec:
    """Return what is registered under an id; without a version, the newest.

    Raises:
        UnknownEnvError: if there is nothing of that name.
        ConfigError: if it is another package's environment, and that is not installed.
    """
    namespace, slash, _ = id.partition("/")
    if slash and namespace in NAMESPACES:
        load_namespace(namespace)
    if "://" in id:
        return cast(EnvSpec, importlib.import_module(REMOTE).remote_spec(id))
    found = _specs.find(id)
    if found is None and (versions := _versions(id)):
        found = _specs.find(versions[-1])
    if found is None:
        raise UnknownEnvError(f"no environment '{id}'.{_suggest(id)}")
    return found


def make(id: str, /, **env_args: object) -> Env:
    """Create the environment of one episode.

    Raises:
        UnknownEnvError: if nothing is registered under the id.
        ConfigError: if its class does not take these arguments.
    """
    return spec(id).make(**env_args)


def load_namespace(name: str) -> None:
    """Register the environments of one of `NAMESPACES`, once.

    Raises:
        ConfigError: if there is no such namespace, or the package is not installed.
    """
    if name not in NAMESPACES:
        known = ", ".join(NAMESPACES) or "none"
        raise ConfigError(f"no namespace '{name}'.{did_you_mean(name, NAMESPACES)} There are: {known}.")
    try:
        importlib.import_module(f"agent_rl.envs.adapters.{name}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("agent_rl"):
            raise
        extra = name.replace("_", "-")
        raise ConfigError(f"{name}/... needs {error.name}: pip install 'agent-rl[{extra}]'") from error


def env_ids() -> tuple[str, ...]:
    """Return every id, sorted: built-in ones before their modules are imported, a namespace's once it is loaded."""
    return tuple(sorted(_specs))


def load_file(path: str | Path) -> ModuleType:
    """Run a user's file, so that it registers its environments; running it again replaces them.

    The file's folder joins the end of `sys.path`, so that it can import what lies beside it.

    Raises:
        ConfigError: if there is no such Python file, or what it would import from beside it is another file's module of
            that name, from another folder.
    """
    file = Path(path).resolve()
    if not file.exists():
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}, the working directory"
        raise ConfigError(f"{path} does not exist{where}; give the .py file that registers your environments")
    if file.suffix != ".py" or not file.is_file():
        raise ConfigError(f"{path} is no Python file; give the .py file that registers your environments")
    _require_own_modules(file, set())
    _folders.add(file.parent)
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    # a name of its own: two users' envs.py, or one called like an installed package, must not meet in sys.modules
    name = f"agent_rl_file_{file.stem}_{hashlib.blake2b(str(file).encode(), digest_size=4).hexdigest()}"
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ConfigError(f"{path} can't be imported as a Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _require_own_modules(file: Path, seen: set[Path]) -> None:
    """Refuse a file that would import another folder's module in the place of one of that name beside it.

    A module has one name in a process, and classes are found by it again: there can't be two.
    """
    seen.add(file)
    for name in _imported_names(file):
        places = (file.with_name(f"{name}.py"), file.parent / name / "__init__.py")
        own = next((place.resolve() for place in places if place.is_file()), None)
        if own is None or own in seen:
            continue
        found = importlib.util.find_spec(name)
        taken = Path(found.origin or "").resolve() if found is not None else own
        if taken != own and _folders & {*taken.parents[:2]}:
            raise ConfigError(f"{file} imports '{name}', {own}, but by that name there is {taken} already: rename one")
        if own.name != "__init__.py":
            _require_own_modules(own, seen)


def _imported_names(file: Path) -> set[str]:
    """Return the modules that a file imports, by the first part of their names; none of one that can't be read."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except (OSError, SyntaxError, ValueError):  # importing it says why
        return set()
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.partition(".")[0] for name in names}


@functools.cache
def load_once(path: str | Path) -> ModuleType:
    """Run a user's file as `load_file` does, unless this process has imported or is running it already."""
    file = str(Path(path).resolve())
    loaded = (module for module in list(sys.modules.values()) if vars(module).get("__file__") == file)
    return next(loaded, None) or load_file(path)


def load_all_once(paths: Iterable[str | Path]) -> None:
    """Run a user's files as `load_once` does."""
    for path in paths:
        load_once(path)


def _versions(name: str) -> list[str]:
    """Return the ids that are a name, with or without its namespace, and a version; the newest is the last."""
    ids = [id for id in _specs if id.rpartition("-v")[0] == name]
    return sorted(ids, key=lambda id: parse_id(id)[2])


def _suggest(id: str) -> str:
    if versions := _versions(id.rpartition("-v")[0]):
        return f" Its versions are: {', '.join(versions)}."
    listing = " `agent-rl envs` lists them; --import FILE loads your own."
    if ":" in id:  # which no id has
        address = "http://" + re.sub("^https?:/*", "", id)
        return f" If that is on a server, write http:// or https:// before it: {address}.{listing}"
    namespace, slash, name = id.partition("/")
    if slash and not any(known.startswith(f"{namespace}/") for known in _specs):
        return f" If '{namespace}' is a server, write its address: http://{namespace}:PORT/{name}.{listing}"
    return did_you_mean(id, _specs) + listing
