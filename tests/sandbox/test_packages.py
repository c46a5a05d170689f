"""agent_rl.sandboxes.local.packages: built once by pip on the host, importable in sandboxes, and not writable there."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.base import Sandbox
from agent_rl.sandboxes.local import packages
from agent_rl.sandboxes.local.backend import LocalSandboxes
from agent_rl.sandboxes.registry import make_backend
from tests.sandbox.backends import LIMITS, readable_python, skip_if_refused

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="local sandboxes need Linux")


def make_wheel(folder: Path, name: str, code: str, requires: str = "") -> Path:
    """Make a wheel of one module."""
    info = f"{name}-1.0.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{path},,\n" for path in [*files, f"{info}/RECORD"])
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return path


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """A folder that other users can reach, for wheels and what is built of them; pip finds nothing elsewhere."""
    with tempfile.TemporaryDirectory(prefix="agent-rl-packages-") as name, pytest.MonkeyPatch.context() as patch:
        Path(name).chmod(0o755)
        patch.setenv("XDG_CACHE_HOME", name)
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", name)
        make_wheel(Path(name), "greeter", "def greet():\n    return 'hello from a package'\n")
        yield Path(name)


@pytest.fixture(scope="module", params=["jail", pytest.param("landlock", marks=pytest.mark.sandbox)])
def local(request: pytest.FixtureRequest, cache: Path, runner: asyncio.Runner) -> Iterator[LocalSandboxes]:
    python = readable_python() if request.param == "landlock" else None
    made = LocalSandboxes(LIMITS, require=(), tier=request.param, python=python, packages=["greeter"])
    with skip_if_refused():
        runner.run(made.claims())
    yield made
    runner.run(made.close())


@pytest.fixture
def box(local: LocalSandboxes, runner: asyncio.Runner) -> Iterator[Sandbox]:
    opened = runner.run(local.open(lifetime=60))
    yield opened
    runner.run(opened.close())


def test_packages_are_imported_in_interpreter_and_scripts(box, run):
    assert run(box.run_python("import greeter; greeter.greet()")).value == "'hello from a package'"
    run(box.write_file("script.py", b"import greeter\nprint(greeter.greet())\n"))
    result = run(box.exec(["python3", "script.py"]))
    assert result.stdout == "hello from a package\n", result.stderr


TAMPER = """
import json, os
from pathlib import Path
file, tried = Path(FILE), {}
def attempt(name, act, *arguments):
    try:
        act(*arguments)
        tried[name] = "done"
    except OSError as error:
        tried[name] = error.errno
attempt("overwrite", file.write_text, "evil = True")
attempt("create", file.with_name("evil.py").write_text, "evil = True")
attempt("bytecode", (file.parent / "__pycache__" / "evil.pyc").write_text, "evil")
attempt("link", file.with_name("linked.py").symlink_to, "/work/evil.py")
attempt("rename", file.rename, file.with_name("renamed.py"))
attempt("remove", file.with_name("renamed.py" if tried["rename"] == "done" else file.name).unlink)
json.dumps(tried)
"""


def test_packages_cannot_be_changed_from_inside(local, box, run):
    file = run(box.run_python("import greeter; greeter.__file__")).value
    tried = run(box.run_python(TAMPER.replace("FILE", file))).value
    assert tried is not None and "done" not in json.loads(tried[1:-1]).values(), tried
    other = run(local.open(lifetime=60))
    assert run(other.run_python("import greeter; greeter.greet()")).value == "'hello from a package'"
    run(other.close())


def test_packages_twin_is_changed_where_nothing_protects_it(tmp_path):
    (tmp_path / "__pycache__").mkdir()
    file = tmp_path / "greeter.py"
    file.write_text("")
    scope: dict[str, object] = {}
    exec(TAMPER.replace("FILE", repr(str(file))), scope)
    assert scope["tried"] == dict.fromkeys(["overwrite", "create", "bytecode", "link", "rename", "remove"], "done")


def test_packages_of_the_trainer_stay_hidden(box, run):
    assert "ModuleNotFoundError" in (run(box.run_python("import pytest")).error or "")


def test_provide_builds_a_folder_once(cache, monkeypatch):
    built = []

    def install(names, python, folder):
        built.append(names)
        folder.mkdir()
        (folder / "module.py").write_text("")

    monkeypatch.setattr(packages, "_install", install)
    found: list[Path] = []
    provide = lambda: found.append(packages.provide(("once",), sys.executable, cache))  # noqa: E731
    threads = [threading.Thread(target=provide) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and built == [("once",)]
    assert packages.provide(("once", "more"), sys.executable, cache) != found[0]
    assert not list(cache.glob("building-*"))


def test_provide_counts_a_wheel_by_its_contents(cache, tmp_path):
    wheel = make_wheel(tmp_path, "changing", "version = 1")
    first = packages._key((str(wheel),), sys.executable)
    make_wheel(tmp_path, "changing", "version = 2")
    assert packages._key((str(wheel),), sys.executable) != first
    assert packages._key((f"changing @ file://{wheel}",), sys.executable) != first


@pytest.mark.sandbox
def test_open_names_the_package_that_pip_refuses(cache, run, monkeypatch):
    sandboxes = LocalSandboxes(LIMITS, require=(), packages=["greeter", "no-such-package"])
    with pytest.raises(SandboxError, match=r"can't install no-such-package for.*No matching distribution") as failed:
        run(sandboxes.open())
    assert str(failed.value).count("\n") <= 2
    monkeypatch.setattr(packages, "_install", lambda *_: pytest.fail("pip was asked again"))
    with pytest.raises(SandboxError, match="no-such-package"):
        run(sandboxes.open())
    assert not list((cache / "agent-rl" / "packages").glob("building-*"))


@pytest.mark.parametrize(
    ("given", "said"),
    [("numpy", "no list"), ([1], "no list"), (["--index-url=x"], "no requirement"), ([" "], "no requirement")],
)
def test_local_sandboxes_refuse_what_is_no_list_of_packages(given, said):
    with pytest.raises(ConfigError, match=said):
        make_backend("local", {"packages": given})


def test_complaint_names_the_failed_package():
    said = "  error: subprocess-exited-with-error\nERROR: Failed building wheel for pandas\n[notice] pip is old\n"
    complaint = packages._complaint(("numpy", "pandas==2.3"), said)
    assert "can't install pandas==2.3 for" in complaint and "ERROR: Failed building wheel for pandas" in complaint


def test_cache_folder_is_reachable_for_other_users_under_root(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    folder = packages.cache_folder()
    assert folder.is_relative_to("/var/cache" if os.geteuid() == 0 else Path.home())
