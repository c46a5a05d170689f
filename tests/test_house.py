"""The house rules: exports, file lengths, names of tests and CI's, contents of the wheel, network access of tests."""

from __future__ import annotations

import ast
import importlib
import re
import shutil
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import is_local
from tree import FOLDERS, ROOT, SOURCES, files_in, python_files, run_python

MAX_LINES = 400
"""Of any file; split one by concept, never to fit a count."""
MAX_WORDS = 10
"""Of a test's name, after `test_`."""
HIDES_THE_UNIT = re.compile(
    r"test_(an?|the|all|any|both|each|every|no|none|nothing|only|some|two|three"
    r"|it|its|she|they|their|that|this|these|those|there"
    r"|how|however|what|whatever|when|where|which|who|whom|whose|why)_"
)
"""The beginning of a test's name that hides the unit under test."""


def export_problems(module: str, source: str) -> list[str]:
    """Return the differences between a package's `__all__` and the public names of its `__init__`."""
    tree = ast.parse(source)
    public = {name for name in _bound(tree, module) if not re.match(r"_(?!_)", name)}
    listed: list[str] = []
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AugAssign)) and ast.unparse(node).startswith("__all__ "):
            listed += ast.literal_eval(node.value)
    twice = sorted({name for name in listed if listed.count(name) > 1})
    missing, extra = sorted(public - set(listed)), set(listed) - public
    if "__getattr__" in public:  # lazy names: they must be there when asked for
        missing.remove("__getattr__")
        extra -= {name for name in extra if hasattr(importlib.import_module(module), name)}
    problems = {"lists twice": twice, "does not list": missing, "lists, but nothing has that name:": sorted(extra)}
    return [f"{module}.__all__ {what} {names}" for what, names in problems.items() if names]


def _bound(tree: ast.Module, module: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.level or f"{node.module}.".startswith(f"{module}.")):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name) and target.id != "__all__")


def test_packages_list_their_exports() -> None:
    packages = {module: file for module, file in SOURCES.items() if file.name == "__init__.py"}
    assert len(packages) > 5
    found = [line for module, file in packages.items() for line in export_problems(module, file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("from agent_rl.view.text import a, b\n__all__ = ['a']", "does not list ['b']"),
        ("def a(): ...\n__all__ = ['a', 'a']", "lists twice ['a']"),
        ("def a(): ...\n__all__ = ['a']\n__all__ += ['a']", "lists twice ['a']"),
        ("from agent_rl.errors import e\n__all__ = ['e']", "nothing has that name: ['e']"),
        ("class A: ...", "does not list ['A']"),
        ("X = 1\n_y = 2", "does not list ['X']"),
    ],
)
def test_wrong_export_lists_are_found(source: str, problem: str) -> None:
    (found,) = export_problems("agent_rl.view", source)
    assert problem in found


# --- files ---


def test_files_are_short() -> None:
    files = python_files(*FOLDERS, "tests", "benchmarks", "examples")
    assert not [str(file) for file in files if _lines(file) > MAX_LINES]


def test_configs_are_short() -> None:
    long = [
        str(file) for file in files_in(ROOT / "configs", symlinks=False) if file.suffix == ".yaml" and _lines(file) > 25
    ]
    assert not long, "at most 25 lines a config: fewer knobs"


def _lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_modules_have_docstrings() -> None:
    files = python_files(*FOLDERS, "tests", "benchmarks", "examples")
    mute = [str(file) for file in files if not ast.get_docstring(ast.parse(file.read_text()))]
    assert not mute


def validating_asserts(source: str) -> list[int]:
    """The lines of asserts that do more than tell the type checker a type; `python -O` drops them."""
    asserts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    return [node.lineno for node in asserts if not _narrows(node.test)]


def _narrows(test: ast.expr) -> bool:
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return all(_narrows(value) for value in test.values)
    return bool(re.match(r"(isinstance\(.*\)|[\w.\[\]]+ is not None)$", ast.unparse(test)))


def test_input_is_not_checked_by_assert() -> None:
    found = [f"{module}:{line}" for module, file in SOURCES.items() for line in validating_asserts(file.read_text())]
    assert not found, "raise, with the offending value and what to do about it"


def test_validating_asserts_are_found() -> None:
    narrowing = "assert x.y is not None\nassert isinstance(x, int) and isinstance(y, str)\n"
    assert validating_asserts(narrowing + "assert x > 0\nassert isinstance(x, int) and x") == [3, 4]


def misnamed_tests(source: str) -> list[str]:
    """Return the names of tests that do not begin with a unit, or are too long."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]
    names = [n.name for n in functions if n.name.startswith("test_")]
    return [name for name in names if HIDES_THE_UNIT.match(name) or name.count("_") > MAX_WORDS]


def test_test_names_begin_with_the_unit() -> None:
    found = {str(file): misnamed_tests(file.read_text()) for file in python_files("tests")}
    assert not {file: names for file, names in found.items() if names}, "name a test test_<unit>_<behaviour>"


def test_misnamed_tests_are_found() -> None:
    good = "def test_budget_refuses_negative_limits(): ...\nasync def test_sweep_ends(): ...\ndef the_helper(): ...\n"
    bad = ("test_what_is_no_budget", "test_budget_" + "_".join("abcdefghij"))
    assert misnamed_tests(good + "".join(f"def {name}(): ...\n" for name in bad)) == list(bad)


# --- the wheel ---


def test_ci_names_every_end_to_end_test() -> None:
    commands = (ROOT / ".ci" / "run").read_text()
    assert [file.name for file in (ROOT / "tests" / "e2e").glob("test_*.py") if file.name not in commands] == []


def test_wheel_packs_every_source_file(tmp_path: Path) -> None:
    """Built offline, from a copy, as a build in the tree would find the leftovers of the last one."""
    tree, out = tmp_path / "tree", tmp_path / "out"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    built = run_python("-c", f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})", cwd=tree)
    assert built.returncode == 0, built.stderr

    with zipfile.ZipFile(next(out.glob("*.whl"))) as wheel:
        packed = {info.filename: wheel.read(info) for info in wheel.infolist() if ".dist-info/" not in info.filename}
        assert not any(info.external_attr >> 28 == 0o12 for info in wheel.infolist()), "a symlink"
        metadata = [name for name in wheel.namelist() if ".dist-info/" in name]
        entry_points = wheel.read(next(name for name in metadata if name.endswith("entry_points.txt"))).decode()
    assert {"agent_rl/envs/search.py", "agent_rl/tools/search.py", "agent_rl/py.typed"} <= packed.keys()
    assert "agent-rl = agent_rl.cli:main" in entry_points
    assert any(name.endswith("LICENSE") for name in metadata)
    sources = {str(file.relative_to(ROOT)): file.read_bytes() for file in files_in(ROOT / "agent_rl", symlinks=True)}
    assert packed.keys() == sources.keys()
    assert packed == sources


# --- conftest's guard ---


def test_remote_hosts_are_unreachable(refused: list[object]) -> None:
    with socket.socket() as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp:
        for attempt in (
            lambda: tcp.connect(("192.0.2.1", 80)),
            lambda: udp.sendto(b"", ("192.0.2.1", 53)),
            lambda: socket.getaddrinfo("example.org", 443),
            lambda: socket.gethostbyname("example.org"),
        ):
            with pytest.raises(RuntimeError, match="without a network"):
                attempt()
    assert len(refused) == 4
    refused.clear()  # else this test fails, as every other would


def test_local_host_is_reachable() -> None:
    with socket.create_server(("localhost", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"x")


@pytest.mark.parametrize("host", ["10.0.0.1", "8.8.8.8", "example.org", b"example.org", "localhost.example.org", "::"])
def test_is_local_refuses_remote_hosts(host: object) -> None:
    assert not is_local(host)


@pytest.mark.parametrize("host", [None, "", "localhost", "127.0.0.1", "127.8.8.8", "::1", b"127.0.0.1"])
def test_is_local_accepts_local_hosts(host: object) -> None:
    assert is_local(host)
