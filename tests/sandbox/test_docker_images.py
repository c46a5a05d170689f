"""Images that are pulled and built for Docker: each once, and within a bound of disk; on a double of an engine."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agent_rl.errors import ConfigError, SandboxError
from agent_rl.sandboxes.docker import DockerSandboxes
from agent_rl.sandboxes.docker.images import IN_USE, digest_of, provide, trim

pytest.importorskip("docker")
NOW = datetime.now(UTC).timestamp()
LIMITS = {"seconds": 1.0, "gigabytes": 1.0}


class Registry:
    """The SDK's client of an engine that keeps images in memory: by name, the bytes and when it was last tagged."""

    def __init__(self, **ages: float) -> None:
        self.found = {name.replace("__", ":").replace("_", "/"): (400e6, NOW - age) for name, age in ages.items()}
        self.used = set[str]()
        self.done = list[str]()

    def version(self) -> dict[str, Any]:
        return {"Components": [{"Name": "Engine"}]}

    def info(self) -> dict[str, Any]:
        return {"SecurityOptions": ["name=seccomp,profile=default"]}

    def images(self, name: str | None = None) -> list[dict[str, Any]]:
        return [{"RepoTags": [tag]} for tag in self.found if name in (None, tag)]

    def pull(self, name: str, stream: bool, decode: bool) -> Any:
        self.done.append(f"pull {name}")
        if "secret" in name:
            yield {"error": "no basic auth credentials"}
        self.found[name] = (400e6, NOW)

    def build(self, path: str, tag: str, **_: object) -> Any:
        self.done.append(f"build {tag}")
        self.found[tag] = (400e6, NOW)
        yield {"stream": "done"}

    def tag(self, name: str, repository: str, version: str, force: bool) -> None:
        self.found[f"{repository}:{version}"] = (0.0, NOW) if f"{repository}:{version}" != name else (400e6, NOW)

    def df(self) -> dict[str, float]:
        return {"LayersSize": sum(size for size, _ in self.found.values())}

    def inspect_image(self, name: str) -> dict[str, Any]:
        stamp = datetime.fromtimestamp(self.found[name][1], UTC).strftime("%Y-%m-%dT%H:%M:%S.123456789Z")
        return {"Id": name, "RepoTags": [name], "Metadata": {"LastTagTime": stamp}, "Config": {}}

    def containers(self, all: bool, filters: dict[str, str]) -> list[str]:
        return [name for name in self.used if name == filters["ancestor"]]

    def remove_image(self, name: str) -> None:
        del self.found[name]
        self.done.append(f"remove {name}")

    def close(self) -> None:
        return


def engine_of(registry: Registry) -> Any:
    engine = DockerSandboxes(host="unix:///nowhere/docker.sock").engine
    engine._api = registry
    return engine


def test_provide_pulls_a_missing_image_once() -> None:
    registry = Registry(python__3=9.0)
    engine = engine_of(registry)
    assert [provide(engine, name, **LIMITS) for name in ("python:3", "new:1", "new:1")] == [
        "python:3",
        "new:1",
        "new:1",
    ]
    assert registry.done == ["pull new:1"]
    assert {f"agent-rl/pulled:{digest_of('new:1')}"} == {name for name in registry.found if "pulled" in name}
    assert provide(engine, "agent-rl/sandbox:latest", **LIMITS) and registry.done == ["pull new:1"]
    with pytest.raises(SandboxError, match="could not pull secret:1: no basic auth"):
        provide(engine, "secret:1", **LIMITS)


def test_provide_builds_a_folder_again_when_it_changes(tmp_path: Path) -> None:
    registry = Registry()
    engine = engine_of(registry)
    (tmp_path / "Dockerfile").write_text("FROM python:3\n")
    first = provide(engine, tmp_path, **LIMITS)
    assert provide(engine, tmp_path, **LIMITS) == first and first.startswith("agent-rl/task:")
    (tmp_path / "Dockerfile").write_text("FROM python:4\n")
    second = provide(engine, tmp_path, **LIMITS)
    assert registry.done == [f"build {first}", f"build {second}"] and first != second


def test_trim_removes_what_was_used_longest_ago() -> None:
    day = 86400.0
    registry = Registry(
        **{"theirs__1": 9 * day, "agent-rl_sandbox__latest": 9 * day, "agent-rl_task__new": 1.0},
        **{"agent-rl_task__held": 5 * day, "agent-rl_task__old": 4 * day, "agent-rl_pulled__older": 3 * day},
        **{"agent-rl_task-sandbox__b": 2 * day},
    )
    registry.used.add("agent-rl/task:held")
    engine = engine_of(registry)
    assert trim(engine, 3e9) == []
    assert trim(engine, 2e9) == ["agent-rl/task:old", "agent-rl/pulled:older"]
    assert trim(engine, 0) == ["agent-rl/task-sandbox:b"]
    assert trim(engine, 0, kept=0.0) == ["agent-rl/task:new"] and IN_USE > 60
    assert set(registry.found) == {"theirs:1", "agent-rl/sandbox:latest", "agent-rl/task:held"}


def test_provide_notes_the_use_of_ours(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM python:3\n")
    registry = Registry()
    engine = engine_of(registry)
    name = provide(engine, tmp_path, **LIMITS)
    registry.found[name] = (400e6, NOW - 9e6)
    registry.found["agent-rl/task:other"] = (400e6, NOW - 8e6)
    provide(engine, tmp_path, **LIMITS)
    assert trim(engine, 0) == ["agent-rl/task:other"]


def test_docker_options_of_images_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="both image='mine:1' and dockerfile"):
        DockerSandboxes(image="mine:1", dockerfile=str(tmp_path))
    with pytest.raises(ConfigError, match="give a folder that has a Dockerfile"):
        DockerSandboxes(dockerfile=str(tmp_path))


def test_open_asks_again_for_an_image_that_went(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(python__3=1.0)
    sandboxes = DockerSandboxes(host="unix:///nowhere/docker.sock", image="python:3")
    sandboxes.engine._api = registry

    def create(*_: object, **__: object) -> str:
        raise SandboxError("no such image")

    monkeypatch.setattr(sandboxes.engine, "labelled", lambda label: {})
    monkeypatch.setattr(sandboxes.engine, "create", create)

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(SandboxError, match="no such image"):
                await sandboxes.open()
            registry.found.clear()
        await sandboxes.close()

    asyncio.run(main())
    assert registry.done == ["pull python:3"]
