"""Allowed imports between modules, and imports without torch."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import TOP_LEVEL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from tree import ROOT, SOURCES, run_python

from agent_rl.gym.registry import NAMESPACES

CORE = {
    "agent_rl",
    "gymnasium",
    "hydra",
    "omegaconf",
    "jinja2",
    "lazy_loader",
    "markupsafe",
    "numpy",
    "pydantic",
    "pydantic_core",
    "regex",
    "rich",
    "zstandard",
}
"""What `pip install agent-rl` brings, by import name: [project.dependencies], and what these are built on."""
HEAVY = {
    *("torch", "transformers", "peft", "tokenizers", "renderers", "safetensors", "httpx", "matplotlib", "bitsandbytes"),
    *("verl", "vllm", "ray", "docker", "e2b", "modal", "daytona", "mcp", "openai", "tensorboard"),
}
NEEDS_TORCH = (
    *("agent_rl.algorithms", "agent_rl.backends", "agent_rl.moe", "agent_rl.engines.embedded", "agent_rl.runs"),
    *("agent_rl.engines.vllm.receiver", "agent_rl.engines.vllm.synced", "agent_rl.grid"),
)
"""The packages that may import whatever [train] brings; all others work in a core install."""

ADAPTERS = tuple(f"agent_rl.envs.adapters.{name}" for name in NAMESPACES)
"""Imported when an environment of their package is asked for, so that they import the package as they are."""
EXTRAS = ("agent_rl.view.tui",)
"""Imported when what needs the extra of their name is asked for."""

BENEATH_SANDBOXES = tuple(
    f"agent_rl.{name}"
    for name in ("core", "errors", "registries", "worker_threads", "concurrency", "config", "sandboxes", "serving")
)
KNOWS_SANDBOXES = ("agent_rl", "agent_rl.gym.sandboxed", "agent_rl.judge.rules", "agent_rl.cli", "agent_rl.testing")
"""The only modules of the machinery that import the sandboxes."""

FLOORS = (
    *("errors", "version", "lazy", "worker_threads", "concurrency", "config_mistakes", "config", "registries"),
    *("seeds", "pacing", "grid"),
    *("core", "serving", "sandboxes", "gym", "moe", "engines", "rendering", "policy", "rollout", "checks"),
    *("store", "remote", "judge", "replay", "formats", "stats", "view"),
    *("configs", "algorithms", "runs"),
    *("backends.group_sampling", "backends.embedded", "backends.verl", "backends.settings", "backends.run", "backends"),
    *("testing", "tools", "envs", "api", "", "cli", "__main__"),
)
"""The rooms, from the ground up; "" is what `import agent_rl` exports. A room imports from those below it only."""


@dataclass(frozen=True)
class Import:
    """One imported name, in full: `from a import b` is a.b."""

    name: str
    line: int
    eager: bool
    """Whether importing the file imports it: not in a function, not under TYPE_CHECKING."""

    def under(self, *packages: str) -> bool:
        return any(f"{self.name}.".startswith(f"{package}.") for package in packages)


def imports_of(tree: ast.AST, package: str, eager: bool = True) -> Iterator[Import]:
    """Every import statement of a file; `package` is what its relative imports start from."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: 1 - node.level or None] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            yield from (Import(f"{source}.{alias.name}", node.lineno, eager) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from imports_of(ast.Module([child], []), package, eager=False)
            yield from imports_of(ast.Module(node.orelse, []), package, eager)
        else:
            deferred = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from imports_of(node, package, eager and not deferred)


def import_violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What a module imports and should not."""
    folder = ".".join(module.split(".")[:2])
    light = not f"{module}.".startswith(tuple(f"{name}." for name in (*NEEDS_TORCH, *ADAPTERS, *EXTRAS)))
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for imported in imports_of(ast.parse(source), package):
        top = imported.name.split(".")[0]
        if imported.under(*TOP_LEVEL):
            why = f"is agent_rl.{top}"
        elif folder == "agent_rl.sandboxes":
            allowed = BENEATH_SANDBOXES
            why = (
                "a sandbox knows the core and errors only" if top == "agent_rl" and not imported.under(*allowed) else ""
            )
        elif folder == "agent_rl.tools":
            why = "tools don't know environments" if imported.under("agent_rl.envs") else ""
        elif imported.under("agent_rl.sandboxes") and (module in KNOWS_SANDBOXES or folder in KNOWS_SANDBOXES):
            why = ""
        elif folder != "agent_rl.envs" and imported.under("agent_rl.envs", "agent_rl.tools", "agent_rl.sandboxes"):
            why = "the machinery reaches built-ins by the registry"
        else:
            why = ""
        if not why and imported.under("verl") and not f"{module}.".startswith("agent_rl.backends.verl."):
            why = "only agent_rl.backends.verl knows verl"
        if not why and light and imported.eager and top not in CORE | sys.stdlib_module_names:
            why = "a core install lacks it: import it in the function that needs it"
        if why:
            found.append(f"{module}:{imported.line} imports {imported.name}: {why}")
    return found


def test_modules_import_allowed_packages_only() -> None:
    found = []
    for module, file in SOURCES.items():
        found += import_violations(module, file.read_text(), is_package=file.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("agent_rl.rollout.pool", "from agent_rl.envs import search"),
        ("agent_rl.rollout.pool", "from agent_rl import tools"),
        ("agent_rl.rollout.pool", "def f():\n    import agent_rl.sandboxes.local as s"),
        ("agent_rl.rollout.pool", "from ..envs.search import Search"),
        ("agent_rl.gym.registry", "from ..tools import search"),
        ("agent_rl.gym.registry", "from .. import envs"),
        ("agent_rl.gym.registry", "if TYPE_CHECKING:\n    from agent_rl.envs.search import Search"),
        ("agent_rl.sandboxes.local", "from agent_rl import Env"),
        ("agent_rl.sandboxes.local", "from agent_rl.gym.tool import tool"),
        ("agent_rl.sandboxes.local", "import agent_rl"),
        ("agent_rl.tools.python", "from agent_rl.envs import search"),
        ("agent_rl.envs.search", "from tools.search import SearchIndex"),
        ("agent_rl.envs.search", "import configs"),
        ("agent_rl.envs.search", "class A:\n    import torch"),
        ("agent_rl.view.text", "try:\n    import torch\nexcept ImportError:\n    torch = None"),
        ("agent_rl.view.curve", "from matplotlib.figure import Figure"),
        ("agent_rl.store.codec", "if TYPE_CHECKING:\n    pass\nelse:\n    import torch"),
        ("agent_rl.algorithms.batch", "def f():\n    from verl.trainer import main_ppo"),
        ("agent_rl.backends.embedded.model", "import verl"),
    ],
)
def test_import_violations_finds_forbidden_imports(module: str, source: str) -> None:
    assert len(import_violations(module, f"import os\n{source}\n")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("agent_rl.gym.registry", "importlib.import_module('agent_rl.envs')"),
        ("agent_rl.gym.registry", "from agent_rl.toolshed import x\ndef f():\n    import toolz"),
        (
            "agent_rl.sandboxes.local",
            "from agent_rl.core.messages import Task\nfrom agent_rl.errors import SandboxError",
        ),
        ("agent_rl.tools.python", "from agent_rl import tool\nfrom agent_rl.sandboxes import local"),
        ("agent_rl.envs.search", "from agent_rl.tools.search import SearchIndex"),
        ("agent_rl.view.curve", "def f():\n    from matplotlib.figure import Figure"),
        ("agent_rl.view.curve", "if TYPE_CHECKING:\n    from torch import Tensor"),
        ("agent_rl.algorithms.batch", "import torch"),
        ("agent_rl.backends.verl.driver.run", "import verl"),
    ],
)
def test_import_violations_passes_allowed_imports(module: str, source: str) -> None:
    assert import_violations(module, source) == []


def floor_of(module: str) -> int:
    """The number of the room that a module is in."""
    inside = module.removeprefix("agent_rl").removeprefix(".")
    return next((i for i, room in enumerate(FLOORS) if f"{inside}.".startswith(f"{room}.")), -1)


def arrows() -> dict[str, dict[str, int]]:
    """Return the imports of each module, lazy ones included, as line by module; a name counts for its module."""
    found: dict[str, dict[str, int]] = {}
    for module, file in SOURCES.items():
        package = module if file.name == "__init__.py" else module.rpartition(".")[0]
        for imported in imports_of(ast.parse(file.read_text()), package):
            target = imported.name if imported.name in SOURCES else imported.name.rpartition(".")[0]
            if target in SOURCES and target != module:
                found.setdefault(module, {})[target] = imported.line
    return found


def test_rooms_import_downward_only() -> None:
    homeless = sorted(module for module in SOURCES if floor_of(module) < 0)
    assert not homeless, "a new room needs a place in FLOORS"
    upward = {
        (module, target)
        for module, targets in arrows().items()
        for target in targets
        if floor_of(target) > floor_of(module) >= 0
    }
    assert not upward


def test_modules_have_no_circle() -> None:
    circle = circle_of(arrows())
    assert not circle, " → ".join(circle)


def circle_of(imports: Mapping[str, Iterable[str]]) -> list[str]:
    """Return the modules of a circle of imports, lazy ones included; none if there is no circle."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_circle_of_finds_circles() -> None:
    assert circle_of({"a": ["b"], "b": ["c"], "c": ["a"]})
    assert not circle_of({"a": ["b", "c"], "b": ["c"]})


def test_constraints_pin_every_requirement() -> None:
    """What `pip install '.[EXTRA]'` asks for is pinned, in a version that it allows; [verl] by constraints-verl.txt."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [need for extra, needs in extras.items() if extra != "verl" for need in needs]
    own = [(Requirement(need), ("", "-adapters")) for need in (*project["dependencies"], *asked)]
    locks = {where: pinned(f"constraints{where}.txt") for where in ("", "-adapters", "-verl")}
    for need, places in [*own, *((Requirement(need), ("-verl",)) for need in extras["verl"])]:
        versions = {locks[where][name] for where in places if (name := canonicalize_name(need.name)) in locks[where]}
        if need.name != "agent-rl":
            assert versions, f"{need} is pinned nowhere"
            assert all(need.specifier.contains(version) for version in versions), f"{need}, but {versions}"


def pinned(lock: str) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)(?:\[[\w,-]+\])?==([^\s;]+)", (ROOT / lock).read_text(), re.MULTILINE)
    return {canonicalize_name(name).removesuffix("-cpu"): version for name, version in lines}


def test_core_matches_the_declared_dependencies() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    distributions = (re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"])
    declared = {name.removesuffix("-core").replace("-", "_") for name in distributions}
    assert declared | {"agent_rl", "omegaconf", "markupsafe", "pydantic_core"} == CORE


BLOCKED = f"""
import importlib, sys, warnings
warnings.simplefilter("error", RuntimeWarning)  # what the registry says of a plugin that does not load
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"{{name}} is blocked")
sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    importlib.import_module(name)
import agent_rl
print(*agent_rl.env_ids())
print("at top level:", *(name for name in {TOP_LEVEL!r} if name in sys.modules))
"""


def test_light_modules_import_without_torch() -> None:
    heavy = tuple(f"{name}." for name in (*NEEDS_TORCH, *ADAPTERS, *EXTRAS))
    light = [name for name in SOURCES if not f"{name}.".startswith(heavy)]
    assert {"agent_rl.store.episodes", "agent_rl.view.text", "agent_rl.rollout.pool", "agent_rl.policy"} <= set(light)
    ran = run_python("-c", BLOCKED, *(name for name in light if not name.endswith("__main__")))
    assert ran.returncode == 0, ran.stderr
    ids, top_level = ran.stdout.splitlines()
    assert {"calculator-v0", "search-v0"} <= set(ids.split())
    assert top_level.strip() == "at top level:"  # though the working directory has folders of these names


LIGHT = """
from agent_rl.cli import main
for line in ("algorithms", "train --config", "train --explain algorithm=ppo", "train --dry-run"):
    assert main(line.split()) == 0
for line in ("lr=3", "algorithm=GRPO", "hardware=gpu_80gb", "env=calculater", "steps=many",
             "start_from=nowhere --dry-run", "backend=verl env=calculater start_from=x", "name=a/b",
             "runs_dir=/dev/null/runs", "resume=nowhere", "episodes=nowhere algorithm=dpo"):
    assert main(["train", *line.split()]) == 1
"""


def test_command_line_needs_no_torch_until_it_trains(tmp_path: Path) -> None:
    ran = run_python("-c", BLOCKED + LIGHT, cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    said = [line.partition("agent-rl: ")[2] for line in ran.stderr.splitlines() if line.startswith("agent-rl: ")]
    wrong = ("optimizer.lr", "Did you mean 'grpo'", "backend=verl", "calculator-v0", "steps='many'", "nowhere", "or-v0")
    wrong += ("a folder's name", "a part of the path is a file", "is no run", "no episode file")
    assert all(word in line for word, line in zip(wrong, said, strict=True)), said
    assert ran.stdout.count("grpo") > 1 and "Tasks per step" in ran.stdout


MISTYPED = """
import sys
from agent_rl.cli import main
for line in ("tran", "--stepz", "sandbox doctr", "completion fish", "view", "stats", "diff", "train --dry_run=3"):
    try:
        raise AssertionError(main(line.split()))
    except SystemExit as stop:
        assert stop.code == 2, line
assert main(["init", "json"]) == 1
print(*(name for name in ("torch", "transformers", "hydra", "numpy", "pydantic", "rich") if name in sys.modules))
"""


def test_wrong_values_of_a_rollout_need_no_hydra() -> None:
    lines = ["rollout env=calculater-v0", "rollout n=x", "check calculater-v0", "check calculator-v0 n=x"]
    played = f"print(*(main(line.split()) for line in {lines}), 'hydra' in sys.modules)"
    ran = run_python("-c", f"import sys; from agent_rl.cli import main; {played}")
    assert ran.stdout.split() == ["1", "1", "1", "1", "False"], ran.stderr


def test_mistyped_commands_import_nothing_heavy() -> None:
    ran = run_python("-c", MISTYPED)
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr


@pytest.mark.parametrize("name", ["agent_rl.algorithms.batch", "matplotlib.figure"])
def test_blocked_import_fails(name: str) -> None:
    ran = run_python("-c", BLOCKED, name)
    assert ran.returncode == 1
    assert "is blocked" in ran.stderr


def test_top_level_files_do_not_shadow_ours(tmp_path: Path) -> None:
    for name in TOP_LEVEL:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    ran = run_python("-c", BLOCKED, "agent_rl.tools.search", "agent_rl.configs", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "search-v0" in ran.stdout
