"""The Landlock tier inside a container with the engine's default options.

The engine's own seccomp profile and capabilities, no network; from the image that `build_image` makes, with this
repository and the packages of this interpreter mounted read-only. The suites that run inside are those that run here.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from agent_rl.sandboxes.docker import IMAGE, Engine
from agent_rl.sandboxes.local import landlock
from tests.e2e.dockerd import Dockerd
from tests.e2e.skips import not_run
from tests.sandbox.backends import SUITES

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).resolve().parents[2]
ADVISED = ("seccomp=unconfined", "systempaths=unconfined")
MINUTES = 10
HERE = [suite for suite in SUITES if "processes" not in suite and "terminal" not in suite]
"""Processes that are a `python3` of their own can't find its library below the mounted interpreter."""


@dataclass(frozen=True)
class Contained:
    """A container with the engine's default options, except its user and `host`."""

    engine: Engine
    user: str
    host: Mapping[str, object] = field(default_factory=dict)

    def run(self, *arguments: str) -> tuple[int, str]:
        """Run Python in a fresh one; return its status and its output."""
        binds = [f"{ROOT}:/repo:ro", f"{sysconfig.get_path('purelib')}:/packages:ro"]
        binds.append("/usr/lib:/usr/lib:ro")  # targets of the packages' links
        api = self.engine.api
        container = api.create_container(
            IMAGE,
            [os.path.realpath(sys.executable), *arguments],
            user=self.user,
            working_dir="/repo",
            environment={"PYTHONPATH": "/repo:/packages", "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "200"},
            host_config={"NetworkMode": "none", "Binds": binds, **self.host},
        )["Id"]
        try:
            api.start(container)
            status = api.wait(container, timeout=60 * MINUTES)["StatusCode"]
            return status, api.logs(container).decode(errors="replace")
        finally:
            api.remove_container(container, force=True, v=True)


@pytest.fixture(params=["0", "65534"], ids=["root", "nobody"])
def contained(dockerd: Dockerd, request: pytest.FixtureRequest) -> Iterator[Contained]:
    if landlock.abi() < landlock.MIN_ABI:
        not_run(f"Landlock inside a container: this kernel has Landlock {landlock.abi()}; {landlock.MIN_ABI} is needed")
    engine = Engine(dockerd.host)
    yield Contained(engine, request.param)
    engine.close()


def test_landlock_passes_the_suites_in_a_container(contained: Contained, capsys: pytest.CaptureFixture[str]) -> None:
    """Each user's own sandboxes; those of root for another user are as outside a container, where they are tested.

    As in CI, one that fails is run once more, and said: some hold clocks, on a machine that does other things.
    """
    which = ["-k", "landlock and not unprivileged", "--tb=short", "--reruns=1", "-rR"]
    status, output = contained.run("-m", "pytest", "-m", "sandbox", *HERE, *which)
    print(output)
    with capsys.disabled():
        print(*re.findall(r"^RERUN .*", output, re.MULTILINE), sep="\n")
    assert status == 0
    assert int(re.findall(r"(\d+) passed", output)[-1]) > 200, "the suites were skipped"


def test_attacks_succeed_in_a_container_without_landlock(contained: Contained) -> None:
    """The attacks that a container does not stop by itself."""
    status, output = contained.run("-m", "pytest", "-m", "sandbox", "tests/sandbox/test_attacks.py", "-k", "twin")
    print(output)
    assert status in (0, 1)
    assert int(re.findall(r"(\d+) passed", output)[-1]) > 70


def kept(output: str) -> dict[str, dict[str, str]]:
    """Return what keeps each guarantee, by tier, as the doctor prints it."""
    _, *parts = re.split(r"^(jail|landlock) +kept by.*$", output, flags=re.MULTILINE)
    rows = re.compile(r"^(\w+) {2,}(\S.*?)(?: {2,}|$)", re.MULTILINE)
    return {tier: dict(rows.findall(table)) for tier, table in zip(parts[::2], parts[1::2], strict=True)}


def test_doctor_explains_missing_jail_in_a_container(contained: Contained) -> None:
    status, output = contained.run("-m", "agent_rl", "sandbox", "doctor")
    print(output)
    assert status == 1, "something is not guaranteed"
    assert re.search(r"jail does not work here: .*namespaces: Operation not permitted", output)
    assert all(option in output for option in ADVISED)
    assert kept(output).keys() == {"landlock"}
    assert [guarantee for guarantee, how in kept(output)["landlock"].items() if how == "nothing"] == ["disk"]


def test_doctor_advice_makes_jails_work(contained: Contained) -> None:
    # a client's options for systempaths=unconfined
    options: dict[str, Sequence[str]] = {"SecurityOpt": ADVISED[:1], "MaskedPaths": [], "ReadonlyPaths": []}
    _, output = replace(contained, host=options).run("-m", "agent_rl", "sandbox", "doctor")
    print(output)
    assert "nothing" not in kept(output)["jail"].values()
