"""Compose files: what is read of them, and that everything else is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.docker import DockerSandboxes
from agent_rl.sandboxes.docker.compose import find_compose, read_compose

HARBOR = """
services:
  main:
    build: {context: "${CONTEXT_DIR}"}
    image: ${MAIN_IMAGE_NAME}
    container_name: ${NAME}
    command: ["sh", "-c", "sleep infinity"]
    environment: ["TEST_DIR=${TEST_DIR}", "MODE=fast"]
    volumes: ["${HOST_LOGS:-/tmp}:/logs"]
    depends_on: {api: {condition: service_healthy}}
  api:
    build: ./api
    environment: {A: 1, B: true, C: cost$$}
    depends_on: [db]
    healthcheck: {test: "curl -f http://localhost", interval: 1m30s, timeout: 500ms, retries: 3}
  db:
    image: postgres:16
    command: postgres -c 'shared_buffers=1 MB'
    tmpfs: /var/cache
    user: "70"
"""


def written(folder: Path, text: str) -> Path:
    (folder / "api").mkdir(exist_ok=True)
    (folder / "api" / "Dockerfile").write_text("FROM scratch\n")
    (folder / "docker-compose.yaml").write_text(text)
    return folder / "docker-compose.yaml"


def test_compose_file_of_a_task_is_read(tmp_path: Path) -> None:
    file = written(tmp_path, HARBOR)
    assert find_compose(tmp_path) == file and find_compose(tmp_path / "api") is None
    found = read_compose(file)
    assert found.main.source is None and found.main.environment == {"MODE": "fast"}
    assert found.main.after == {"api": "service_healthy"} and not found.main.config
    db, api = found.services
    assert (db.name, db.source, db.tmpfs) == ("db", "postgres:16", ("/var/cache",))
    assert db.config == {"command": ["postgres", "-c", "shared_buffers=1 MB"], "user": "70"}
    assert (api.source, api.after) == (tmp_path / "api", {"db": "service_started"})
    assert api.environment == {"A": "1", "B": "true", "C": "cost$"}
    check = {"test": ["CMD-SHELL", "curl -f http://localhost"], "interval": 90 * 10**9, "timeout": 5 * 10**8}
    assert api.healthcheck == {**check, "retries": 3}


REFUSED = {
    "volumes": "services: {db: {image: a, volumes: [/etc:/host]}}",
    "privileged": "services: {db: {image: a, privileged: true}}",
    "network_mode": "services: {db: {image: a, network_mode: host}}",
    "cap_add": "services: {main: {cap_add: [SYS_ADMIN]}}",
    "'volumes'": "services: {main: {volumes: [/etc:/host]}}",
    "'secrets'": "{services: {db: {image: a}}, secrets: {}}",
    "build: args": "services: {db: {build: {context: api, args: {A: b}}}}",
    "Dockerfile": "services: {db: {build: {context: api, dockerfile: Other}}}",
    "has to have a Dockerfile": "services: {db: {build: none}}",
    "file's folder": "services: {db: {build: ../away}}",
    "neither an image nor a build": "services: {db: {}}",
    "TOKEN has no value": "services: {db: {image: a, environment: [TOKEN]}}",
    "KEY has no value": "services: {db: {image: a, environment: {KEY: '${KEY}'}}}",
    "is not replaced": "services: {db: {image: 'a:${TAG}'}}",
    "no service 'none'": "services: {db: {image: a, depends_on: [none]}}",
    "wait for each other": "services: {a: {image: a, depends_on: [b]}, b: {image: a, depends_on: [a]}}",
    "condition 'done' is not": "services: {a: {image: a}, b: {image: a, depends_on: {a: {condition: done}}}}",
    "is no time": "services: {db: {image: a, healthcheck: {test: a, interval: 5}}}",
    "healthcheck: start_interval": "services: {db: {image: a, healthcheck: {start_interval: 5s}}}",
    "is no service": "services: {'../x': {image: a}}",
    "no compose file": "version: 3",
    "no YAML": "services: {",
}


@pytest.mark.parametrize("said", REFUSED)
def test_compose_refuses_the_rest_by_name(tmp_path: Path, said: str) -> None:
    (tmp_path.parent / "away").mkdir(exist_ok=True)
    (tmp_path.parent / "away" / "Dockerfile").write_text("FROM scratch\n")
    file = written(tmp_path, REFUSED[said])
    with pytest.raises(ConfigError, match=said) as caught:
        DockerSandboxes(compose=str(file))
    assert str(file) in str(caught.value) and str(caught.value).count("\n") == 0


def test_compose_takes_the_engines_own_runtime(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="runtime='runsc'"):
        DockerSandboxes(compose=str(written(tmp_path, "services: {db: {image: a}}")), runtime="runsc")
