"""The parts of the docker and e2b backends that need neither an engine nor a service."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import re
import struct
import subprocess
import sys
import tarfile
from importlib.machinery import SourcelessFileLoader
from pathlib import Path
from types import CodeType
from typing import IO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.cli import main
from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.agent.frames import Frames, pack
from agent_rl.sandboxes.base import Limits
from agent_rl.sandboxes.client import remote
from agent_rl.sandboxes.docker import DockerSandboxes, image
from agent_rl.sandboxes.docker.container import (
    EXPIRES,
    OVERHEAD,
    PROCESS,
    Demultiplexer,
    any_user,
    confinement,
    identity,
    is_orphan,
    labels,
)
from agent_rl.sandboxes.docker.seccomp import ALLOWED, seccomp_profile
from agent_rl.sandboxes.e2b import E2BSandboxes
from agent_rl.sandboxes.local.seccomp import ADVICE, SYNCS
from agent_rl.sandboxes.registry import make_backend

# The stream

Pieces = st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=20)), max_size=8)


@given(Pieces, st.integers(1, 9))
def test_stdout_is_extracted_from_any_chunks(pieces: list[tuple[int, bytes]], step: int) -> None:
    sent = b"".join(struct.pack(">BxxxL", kind, len(data)) + data for kind, data in pieces)
    stream = Demultiplexer()
    got = b"".join(stream.feed(sent[i : i + step]) for i in range(0, len(sent), step))
    assert got == b"".join(data for kind, data in pieces if kind == 1)
    assert bool(stream.complaint) == any(data for kind, data in pieces if kind == 2)


# The profile

DANGEROUS = """
add_key bpf clone3 chroot fsopen init_module io_setup io_uring_setup kcmp kexec_load keyctl mount mq_open personality
name_to_handle_at open_by_handle_at open_tree perf_event_open pidfd_getfd pivot_root process_vm_readv process_vm_writev
ptrace fsync reboot setns settimeofday socketcall swapon sync syslog umount2 unshare userfaultfd
"""
NEEDED = (
    "brk clone close execve exit_group fork futex getrandom ioctl kill mmap openat pipe2 poll prctl read wait4 write"
)


def test_seccomp_profile_allows_python_and_no_danger() -> None:
    profile = json.loads(seccomp_profile())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    allowed = {
        name for r in profile["syscalls"] if r["action"] == "SCMP_ACT_ALLOW" and "args" not in r for name in r["names"]
    }
    assert not allowed & set(DANGEROUS.split()) and not allowed & {"socket", "clone"}
    assert set(NEEDED.split()) - {"clone", "ioctl", "mmap", "prctl"} <= allowed == set(ALLOWED.split())
    assert all(entry["subArchitectures"] == [] for entry in profile["archMap"])


def test_seccomp_profile_checks_arguments() -> None:
    rules = [r for r in json.loads(seccomp_profile())["syscalls"] if "args" in r]
    sockets = [r["args"] for r in rules if r["names"] == ["socket"]]
    assert {args[0]["value"] for args in sockets} == {1, 2, 10}
    kinds = {(args[0]["value"], args[1]["valueTwo"]) for args in sockets if args[0]["value"] != 1}
    assert kinds == {(family, kind) for family in (2, 10) for kind in (1, 2)}  # of streams and datagrams
    (clone,) = [r["args"][0] for r in rules if r["names"] == ["clone"]]
    assert clone["op"] == "SCMP_CMP_MASKED_EQ" and clone["valueTwo"] == 0
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert clone["value"] & flag
    assert not clone["value"] & 0x10100  # threads share memory and are of one group
    for name, at, huge in (("mmap", 3, 0x40000), ("memfd_create", 1, 4)):
        assert [r["args"] for r in rules if r["names"] == [name]] == [[{**clone, "index": at, "value": huge}]]


def test_seccomp_profile_pretends_to_write_out() -> None:
    """With the calls that the local filter answers so, as an honest program stops where `fsync` fails."""
    rules = json.loads(seccomp_profile())["syscalls"]
    (lies,) = [set(rule["names"]) for rule in rules if "fsync" in rule["names"]]
    assert lies == {*SYNCS, *ADVICE}
    assert [rule["errnoRet"] for rule in rules if "fsync" in rule["names"]] == [0]
    told = {rule["args"][0]["valueTwo"]: rule.get("errnoRet") for rule in rules if rule["names"] == ["msync"]}
    assert told == {0: None, 4: 0}


BY_MODULES = [0x5412, 0x541C, 0x5423, 0x8940, 0x8941, 0x8982, 0x8983, 0x89A0, 0x89A1]
"""Requests of terminals, bridges and VLANs, most of which have the host load a module."""


@pytest.mark.parametrize(
    ("call", "at", "refused"),
    [
        *(("prctl", 0, [22, 62, 78]), ("setrlimit", 0, [4]), ("prlimit64", 1, [4]), ("madvise", 2, [20, 21])),
        *(("setsockopt", 1, [1, 6]), ("ioctl", 1, BY_MODULES)),
    ],
)
def test_seccomp_profile_compares_lower_halves(call: str, at: int, refused: list[int]) -> None:
    """As the kernel does of an int: a higher bit must lead past no rule."""
    rules = [r["args"] for r in json.loads(seccomp_profile())["syscalls"] if r["names"] == [call] and "args" in r]
    looking = [test for args in rules for test in args if test["index"] == at]
    tests = [test for test in looking if test["op"] == "SCMP_CMP_MASKED_EQ"]
    for value in (*range(90), 0x5401, *BY_MODULES, 1 << 31):
        for upper in (0, 1 << 32, 1 << 63):
            allowed = any((upper | value) & test["value"] == test["valueTwo"] for test in tests)
            assert allowed is (value not in refused), (value, upper)
    assert all(test in tests or test["op"] == "SCMP_CMP_EQ" for test in looking)


# A container


def test_confinement_sets_the_container_limits() -> None:
    limits = Limits(memory=2**28, processes=5, cpus=0.5, disk=2**20, files=7)
    config = confinement(limits, 4242)
    assert config["Memory"] == config["MemorySwap"] == 2**28 + 3 * 2**20 + OVERHEAD
    assert config["NanoCpus"] == 500_000_000 and config["ReadonlyRootfs"] is True and config["CapDrop"] == ["ALL"]
    mounted = config["Tmpfs"]
    assert isinstance(mounted, dict) and set(mounted) == {"/work", "/tmp", "/dev/shm"}
    assert all("uid=4242" in m and "nr_inodes=7" in m and "nosuid" in m for m in mounted.values())
    assert f"size={2**20}" in mounted["/work"] and f"size={2**20}" in mounted["/tmp"]
    assert any_user() > 2**20
    sysctls = config["Sysctls"]
    assert isinstance(sysctls, dict) and sysctls["net.ipv4.tcp_wmem"] == sysctls["net.ipv4.tcp_rmem"]


def test_is_orphan_checks_process_and_expiry() -> None:
    mine = labels("me", 60)
    assert not is_orphan(mine)
    assert is_orphan({**mine, EXPIRES: "1"})
    here, pid, started = identity(os.getpid()).rsplit("/", 2)
    assert is_orphan({**mine, PROCESS: f"{here}/{pid}/1{started}"})  # the number was given to another
    assert is_orphan({**mine, PROCESS: f"{here}/4194305/1"})
    assert not is_orphan({**mine, PROCESS: f"other{here}/4194305/1"})


# The image


def test_libraries_of_finds_libc() -> None:
    (libc,) = [file for file in image.libraries_of([Path(sys.executable)]) if file.name.startswith("libc.so")]
    assert libc.exists()


@pytest.mark.sandbox
def test_write_root_packs_programs_without_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "PROGRAMS", "sh cat no-such-program")
    with tarfile.open(tmp_path / "image.tar", "w") as tar:
        image.write_root(tar)
    with tarfile.open(tmp_path / "image.tar") as tar:
        entries = {entry.name: entry for entry in tar}
        cached = next(name for name in entries if re.search(r"/json/__pycache__/scanner\.", name))
        (tmp_path / "scanner.pyc").write_bytes(cast(IO[bytes], tar.extractfile(cached)).read())
    names = set(entries)
    assert (
        "py_make_scanner"
        in cast(CodeType, SourcelessFileLoader("", str(tmp_path / "scanner.pyc")).get_code("")).co_names
    )
    assert {"work", "tmp", "proc", "dev", "etc/passwd", "usr/local/bin/cat", "usr/local/bin/python3"} <= names
    assert {"json", "unittest"} <= {Path(name).parent.name for name in names if name.endswith("/__init__.py")}
    assert any("libc.so" in name for name in names)
    assert not [name for name in names if "site-packages/" in name or "/test/" in name]
    assert entries.pop("tmp").mode == 0o1777
    assert all(entry.uid == 0 and not entry.mode & 0o7022 for entry in entries.values())
    for name in names - {"."}:
        assert str(Path(name).parent) in names, "a folder that is not listed gets whatever mode the engine likes"


# The agent in it


@pytest.mark.parametrize("magic", [importlib.util.MAGIC_NUMBER, b"none"])
def test_agent_starts_from_bytecode_or_from_source(magic: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    sources, _, codes = remote._modules()
    monkeypatch.setattr(remote, "_modules", lambda: (sources, magic, codes if magic != b"none" else b"?"))
    command = [sys.executable, "-I", "-S", "-B", "-c", remote.ENTRY]
    sent = remote.greeting(60) + pack({"op": "end", "id": 7})
    ran = subprocess.run(command, input=sent, capture_output=True, env={}, timeout=60)
    frames = Frames()
    frames.feed(ran.stdout)
    assert frames.pop() == ({"ready": True}, b"") and (frames.pop() or ({},))[0]["id"] == 7, ran.stderr


# Missing parts


def test_docker_and_e2b_name_missing_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("docker", "docker.errors", "e2b", "e2b_code_interpreter"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"agent-rl\[docker\]"):
        asyncio.run(DockerSandboxes().open())
    with pytest.raises(ConfigError, match=r"agent-rl\[e2b\]"):
        E2BSandboxes(api_key="x")
    with pytest.raises(ConfigError, match=r"agent-rl\[e2b\]"):
        E2BSandboxes(api_key="x", interpreter="jupyter")


def test_make_backend_chooses_the_e2b_template() -> None:
    for module in ("e2b", "e2b_code_interpreter"):
        pytest.importorskip(module)
    for options, template in (({}, "base"), ({"interpreter": "jupyter"}, "code-interpreter-v1")):
        made = make_backend("e2b", {"api_key": "x", **options})
        assert isinstance(made, E2BSandboxes) and made.template == template
    mine = make_backend("e2b", {"api_key": "x", "interpreter": "jupyter", "template": "mine"})
    assert isinstance(mine, E2BSandboxes) and mine.template == "mine"
    with pytest.raises(ConfigError, match=r"interpreter='ipython'; choose one of agent, jupyter"):
        make_backend("e2b", {"api_key": "x", "interpreter": "ipython"})


def test_build_image_reports_a_missing_engine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    monkeypatch.setattr(image, "write_root", lambda tar: None)
    assert main(["sandbox", "build-image"]) == 1
    assert "nothing.sock" in capsys.readouterr().err
    with pytest.raises(SandboxError, match=r"nothing\.sock"):
        asyncio.run(DockerSandboxes().open())
    gc.collect()  # a socket left open fails this test, not a later one


def test_agent_is_sent_whatever_the_locale_is() -> None:
    ascii_only = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    sent = "import sys; from agent_rl.sandboxes.client import remote; sys.stdout.buffer.write(remote.greeting(9.0))"
    done = subprocess.run([sys.executable, "-c", sent], env=ascii_only, stdout=subprocess.PIPE, check=True)
    sources, *_ = remote._modules()
    assert all(text.encode() in done.stdout for text in sources.values()) and "→" in sources["agent.agent"]
