"""Images for Docker from a registry with a password, and of a Dockerfile, on a real engine; and their bound."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.errors import SandboxError
from agent_rl.sandboxes.docker import IMAGE, DockerSandboxes, Engine
from agent_rl.sandboxes.docker.images import trim
from tests.e2e.registry import PASSWORD, USER, registry
from tests.swe_tasks import REPOSITORIES, write_tasks

pytestmark = pytest.mark.e2e


async def said(host: str, **options: str) -> str:
    """Return what is in /told of a sandbox."""
    sandboxes = DockerSandboxes(host=host, **options)  # type: ignore[arg-type]
    try:
        sandbox = await sandboxes.open()
        return (await sandbox.exec(["cat", "/told"])).stdout
    finally:
        await sandboxes.close()


def test_docker_pulls_with_the_credentials_of_docker_login(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.build_image(f"FROM {IMAGE}\nRUN echo pulled >/told\n", "mine/image:1")
    with registry(b"".join(engine.api.get_image("mine/image:1"))) as address:
        name = f"{address}/mine/image:1"
        engine.api.remove_image("mine/image:1")
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

        def log_in(password: str) -> None:
            auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
            (tmp_path / "config.json").write_text(json.dumps({"auths": {address: {"auth": auth}}}))

        for password in (None, f"{PASSWORD}?"):
            if password is not None:
                log_in(password)
            with pytest.raises(SandboxError, match=f"could not pull {name}") as refused:
                asyncio.run(said(engine.host, image=name))
            assert PASSWORD not in str(refused.value) and not engine.has_image(name)
        log_in(PASSWORD)
        assert asyncio.run(said(engine.host, image=name)) == "pulled\n"
    assert asyncio.run(said(engine.host, image=name)) == "pulled\n", "it is there"
    assert trim(engine, 0) == []
    assert name in trim(engine, 0, kept=-60.0) and not engine.has_image(name) and engine.has_image(IMAGE)


def test_docker_builds_a_dockerfile_once(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nCOPY told /told\n")
    for word in ("one", "two"):
        (tmp_path / "told").write_text(word)
        before = len(engine.image_tags("agent-rl/task:"))
        for _ in range(2):
            assert asyncio.run(said(engine.host, dockerfile=str(tmp_path))) == word
        assert len(engine.image_tags("agent-rl/task:")) == before + 1
    size = engine.image_bytes()
    assert len(trim(engine, 0, kept=-60.0)) >= 2 and engine.image_bytes() < size


NAMES = "import getpass, pwd; print(getpass.getuser(), [pwd.getpwnam(name).pw_uid for name in ('root', 'app')])"


@pytest.mark.parametrize("moved", ["", " && mv /etc/passwd /etc/ours && ln -s ours /etc/passwd"], ids=["file", "link"])
def test_docker_keeps_the_users_of_an_image(engine: Engine, tmp_path: Path, moved: str) -> None:
    (tmp_path / "Dockerfile").write_text(
        f'FROM {IMAGE}\nRUN printf app:x:10:10::/app:/bin/sh >>/etc/passwd{moved}\nRUN python3 -c "{NAMES}" >/told\n'
    )

    async def names() -> str:
        sandboxes = DockerSandboxes(host=engine.host, dockerfile=str(tmp_path))
        try:
            sandbox = await sandboxes.open()
            return (await sandbox.exec(["sh", "-c", f'cat /told; python3 -c "{NAMES}"'])).stdout
        finally:
            await sandboxes.close()

    assert asyncio.run(names()) == "root [0, 10]\nsandbox [0, 10]\n"


def test_swe_task_runs_in_its_own_image(engine: Engine, tmp_path: Path) -> None:
    made = REPOSITORIES["us/slug"]
    for path, text in made.files.items():
        (tmp_path / path).write_text(text)
    (tmp_path / "Dockerfile").write_text(f"FROM {IMAGE}\nWORKDIR /testbed\nCOPY . .\nRUN rm Dockerfile\n")
    engine.build_image(tmp_path, "mine/slug:1")
    row = json.loads(write_tasks(tmp_path / "rows").read_text().splitlines()[-1])
    (tmp_path / "row.jsonl").write_text(json.dumps({**row, "image_name": "mine/slug:1"}))
    ar.register("e2e-test/swe-v0")(ar.from_swe(tmp_path / "row.jsonl"))
    options: dict[str, ar.JSON] = {"sandbox_args": {"host": engine.host}}
    for policy, earned in {"oracle": 1.0, "nothing": 0.0}.items():
        (episode,) = ar.run("e2e-test/swe-v0", policy, env_args=options)
        assert (episode.reward, episode.error) == (earned, None), [m.content for m in episode.messages]
    assert "/testbed" in episode.messages[0].content
