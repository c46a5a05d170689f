"""Tasks of Harbor's, terminal-bench's and SWE-bench's shape on a real Docker engine, each attempted in three ways.

`tasks/` has three of each shape, with hidden tests and a solution as real ones have. Beside these is wrong.sh, an
attempt that passes what the task shows, says so, and is wrong. Three of the tasks have services.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.envs.quiz import one_call
from agent_rl.gym.env import Script
from agent_rl.policy.scripted import Scripted
from agent_rl.sandboxes.docker import Engine
from agent_rl.sandboxes.docker.compose import find_compose
from tests.e2e.dockerd import Dockerd
from tests.e2e.skips import missing
from tests.e2e.tools_image import build_tools_image, whats_missing
from tests.swe_tasks import commit, diff

pytestmark = pytest.mark.e2e

TASKS = Path(__file__).parent / "tasks"
FOLDERS = sorted(folder for shape in ("harbor", "terminal_bench") for folder in (TASKS / shape).iterdir())
ISSUES = sorted((TASKS / "swe").iterdir())
LEAVES_A_SERVER = ("silent-server",)


@pytest.fixture(scope="module", autouse=True)
def tools(dockerd: Dockerd, tmp_path_factory: pytest.TempPathFactory) -> None:
    if reason := whats_missing():
        missing(f"the tasks on Docker: {reason}")
    build_tools_image(Engine(dockerd.host), tmp_path_factory.mktemp("tools"))


def attempts(engine: Engine, env: type[ar.Env], name: str, wrong: Callable[[ar.Env, int], Script]) -> None:
    """Play a task as its solution does, not at all, and wrongly; compare what each earns."""
    name = f"e2e-test/{name}-v0"
    ar.register(name)(env)
    options: dict[str, ar.JSON] = {"sandbox_args": {"host": engine.host}}
    for policy, earned in (("oracle", 1.0), ("nothing", 0.0), (Scripted(wrong), 0.0)):
        (episode,) = ar.run(name, policy, env_args=options)
        said = [message.content for message in episode.messages]
        assert (episode.reward, episode.error) == (earned, None), (str(episode.error), said)
    assert any("looks right" in str(text) for text in said), said


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_docker_task_tells_a_solution_from_others(engine: Engine, folder: Path) -> None:
    def wrong(env: ar.Env, seed: int) -> Script:
        env.place = replace(env.place, solution=folder / "wrong.sh")  # type: ignore[attr-defined]
        yield from env.oracle()

    members = {"keeps_jobs": folder.name in LEAVES_A_SERVER}
    attempts(engine, type("Task", (ar.from_harbor(folder),), members), folder.name, wrong)


def test_docker_tasks_have_services() -> None:
    contexts = [folder / "environment" if folder.parent.name == "harbor" else folder for folder in FOLDERS]
    assert (len(FOLDERS), len(ISSUES)) == (6, 3)
    assert sum(find_compose(context) is not None for context in contexts) == 3


def texts(folder: Path) -> dict[str, str]:
    """Return a folder's files, by their paths in it."""
    files = (file for file in sorted(folder.rglob("*")) if file.is_file() and "__pycache__" not in file.parts)
    return {file.relative_to(folder).as_posix(): file.read_text() for file in files}


@pytest.mark.parametrize("folder", ISSUES, ids=lambda folder: folder.name)
def test_docker_issue_tells_a_solution_from_others(engine: Engine, folder: Path, tmp_path: Path) -> None:
    def wrong(env: ar.Env, seed: int) -> Script:
        yield one_call("shell", command=(folder / "wrong.sh").read_text())
        yield "done"

    before, image = texts(folder / "repo"), f"tests/{folder.name}:1"
    row = {
        **json.loads((folder / "row.json").read_text()),
        "instance_id": f"us__{folder.name}-1",
        "problem_statement": (folder / "issue.md").read_text(),
        "base_commit": commit(tmp_path / "repo", before),
        "patch": diff(before, texts(folder / "solution")),
        "test_patch": diff(before, texts(folder / "hidden")),
        "image_name": image,
    }
    (tmp_path / "row.jsonl").write_text(json.dumps(row))
    shutil.copy(folder / "Dockerfile", tmp_path)
    engine.build_image(tmp_path, image)
    attempts(engine, ar.from_swe(tmp_path / "row.jsonl"), folder.name, wrong)
