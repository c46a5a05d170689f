"""Files of a container's own in /etc, on a double of an engine: who has a name there, and when they can be had."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from agent_rl.errors import SandboxError
from agent_rl.sandboxes.docker import Engine
from agent_rl.sandboxes.docker.container import MAX_USERS, uid_of
from agent_rl.sandboxes.docker.etc import HOSTS, PREFIX, Etc, collect_files

THEIRS = {"/etc/passwd": b"root:x:0:0::/root:/bin/sh\nsandbox:x:7:7::/:/bin/sh", "/etc/group": b""}
"""Of the image; it knows the name, too."""


class Creating:
    """An engine that sees none of this process's files, or labels its own."""

    host = "unix:///nowhere"

    def __init__(self, *, sees: bool, labels: bool = False) -> None:
        self.sees, self.labels = sees, labels
        self.created: list[Mapping[str, Any]] = []
        self.files: list[dict[str, bytes]] = []
        """Of each container, the mounted ones."""
        self.looked_into: list[str] = []

    def has_selinux(self) -> bool:
        return self.labels

    def image_files(self, image: str, paths: Sequence[str], labels: Mapping[str, str]) -> Mapping[str, bytes]:
        assert tuple(paths) == tuple(THEIRS) and labels == {"a": "b"}
        self.looked_into.append(image)
        return THEIRS

    def create(self, image: str, argv: list[str], host_config: Mapping[str, Any], **config: object) -> str:
        if not self.sees and "Mounts" in host_config:
            raise SandboxError("bind source path does not exist: /tmp/x")
        self.created.append({**host_config, **config})
        mounts = host_config.get("Mounts", ())
        self.files.append({mount["Target"]: Path(mount["Source"]).read_bytes() for mount in mounts})
        return "c1"


def created(engine: Creating, *, times: int = 1, runtime: str | None = None, network: str = "none") -> list[bool]:
    """Return of each container whether it is made without a network of the engine's."""
    etc = Etc(cast(Engine, engine), runtime)
    for _ in range(times):
        given = {"user": 1, "labels": {"a": "b"}}
        with etc.create("image", ["true"], {"NetworkMode": network}, **given) as container:  # type: ignore[arg-type]
            assert container == "c1"
    assert all(made["NetworkMode"] == network and made["user"] == "1:1" for made in engine.created)
    return [made.get("network_disabled", False) and "Mounts" in made for made in engine.created]


def test_container_has_files_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    engine = Creating(sees=True)
    assert created(engine, times=2) == [True, True]
    mounts = [mount for made in engine.created for mount in made["Mounts"]]
    assert [mount["Target"] for mount in mounts] == ["/etc/passwd", "/etc/group", "/etc/hosts"] * 2
    assert all(mount["ReadOnly"] for mount in mounts) and len({mount["Source"] for mount in mounts}) == 6
    assert [files["/etc/hosts"] for files in engine.files] == [HOSTS, HOSTS] and not list(tmp_path.iterdir())
    assert engine.looked_into == ["image"]


def test_container_names_its_users_before_the_images() -> None:
    engine = Creating(sees=True)
    created(engine)
    (files,) = engine.files
    ours, found, after = files["/etc/passwd"].partition(THEIRS["/etc/passwd"])
    assert found and not after
    users = {line.split(":")[0]: line.split(":")[1:] for line in ours.decode().splitlines()}
    assert users.pop("sandbox") == ["x", "1", "1", "", "/work", "/bin/sh"]
    assert [int(user[1]) for user in users.values()] == [uid_of(1, number) for number in range(1, MAX_USERS + 1)]
    assert {user[4] for user in users.values()} == {"/"}, "nobody but root can write that"
    groups = [line.split(":")[::2] for line in files["/etc/group"].decode().splitlines()]
    assert groups == [["sandbox", "1"], *([name, user[1]] for name, user in users.items())]


def test_container_uses_the_engines_network_where_needed() -> None:
    assert created(Creating(sees=False), times=2) == [False, False]
    assert created(Creating(sees=True, labels=True)) == [False]
    assert created(Creating(sees=True), runtime="runsc") == [False]
    assert created(Creating(sees=True), network="container:keeper") == [False]
    far = Creating(sees=True)
    far.host = "tcp://127.0.0.1:1"
    assert created(far) == [False]


@pytest.mark.parametrize(("network", "runtime"), [("container:keeper", None), ("none", "runsc")])
def test_container_of_another_network_has_names(network: str, runtime: str | None) -> None:
    engine = Creating(sees=True)
    created(engine, network=network, runtime=runtime)
    assert [set(files) for files in engine.files] == [{"/etc/passwd", "/etc/group"}]


def test_collect_files_removes_old_ones_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    old, new = (tmp_path / f"{PREFIX}{name}" for name in ("old", "new"))
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    collect_files()
    assert list(tmp_path.iterdir()) == [new]
