"""Runtimes of an engine, and Podman, which is refused by name; tests/e2e/test_docker_runtimes.py has gVisor."""

from __future__ import annotations

import types

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.docker import Engine
from agent_rl.sandboxes.docker.container import confinement
from agent_rl.sandboxes.docker.runtime import OVERHEAD, THREADS, check_engine, with_runtime


def engine(name: str) -> Engine:
    made = Engine("unix:///nowhere")
    made._api = types.SimpleNamespace(
        version=lambda: {"Components": [{"Name": name}]}, info=lambda: {"Runtimes": {"runsc": {}, "runc": {}}}
    )
    return made


def test_runtime_adds_what_its_kernel_takes() -> None:
    usual = confinement(Limits(), 1)
    assert with_runtime(None, usual) == usual
    own = with_runtime("runsc", usual)
    assert own["Runtime"] == "runsc" and own["Memory"] == own["MemorySwap"] == usual["Memory"] + OVERHEAD
    assert own["PidsLimit"] == usual["PidsLimit"] + THREADS
    assert {name for name in own if own[name] != usual.get(name)} == {"Runtime", "Memory", "MemorySwap", "PidsLimit"}


def test_missing_runtime_names_those_of_the_engine() -> None:
    pytest.importorskip("docker")
    check_engine(engine("Engine"), None)
    check_engine(engine("Engine"), "runsc")
    with pytest.raises(SandboxError, match=r"no runtime 'sysbox'; it has runc, runsc\. .*--add-runtime sysbox="):
        check_engine(engine("Engine"), "sysbox")


@pytest.mark.parametrize(
    ("runtime", "shim", "take"),
    [
        ("kata", '"io.containerd.kata.v2"', "set runtime=kata, or leave"),
        ("kata-fc", '"io.containerd.kata-fc.v2"', "set runtime=kata-fc, or leave"),
        (
            "firecracker",
            '"io.containerd.kata-fc.v2"',
            "set runtime=kata-fc (Kata on Firecracker: Docker has none of that name)",
        ),
    ],
)
def test_machine_runtimes_are_refused_with_the_way_out(runtime: str, shim: str, take: str) -> None:
    pytest.importorskip("docker")
    with pytest.raises(SandboxError, match=rf"no runtime '{runtime}'; it has runc, runsc\. Install Kata") as refused:
        check_engine(engine("Engine"), runtime)
    assert shim in str(refused.value) and take in str(refused.value)


def test_podman_is_refused_with_the_reason() -> None:
    pytest.importorskip("docker")
    with pytest.raises(SandboxError, match=r"Podman's, .*no seccomp profile"):
        check_engine(engine("Podman Engine"), None)
