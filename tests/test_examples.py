"""examples/: each runs as its docstring says, from public names only."""

from __future__ import annotations

import ast
import asyncio
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tree import ROOT, python_files

import agent_rl as ar
from agent_rl.backends.embedded.run import start_run
from agent_rl.cli import main
from agent_rl.core.episode import group_episodes
from agent_rl.gym.registry import load_once
from agent_rl.rollout import score_groups
from agent_rl.runs.metrics import read_metrics
from agent_rl.view.progress import Progress
from tests.doubles import example_episode
from tests.runs import config

EXAMPLES = python_files("examples")


def example(name: str) -> ModuleType:
    return load_once(ROOT / "examples" / name)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_example_says_how_to_run_it(file: Path) -> None:
    described = ast.get_docstring(ast.parse(file.read_text())) or ""
    assert re.search(rf"^    (python|agent-rl) .*examples/{file.name}", described, re.MULTILINE)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_example_uses_public_names_only(file: Path) -> None:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "agent_rl":
            names = {alias.name for alias in node.names}
            exported = getattr(importlib.import_module(str(node.module)), "__all__", names)
            assert names <= set(exported) and not any(name[0] == "_" for name in names), f"{file.name}:{node.lineno}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ar":
            assert node.attr in ar.__all__, f"{file.name}:{node.lineno}"


@pytest.mark.sandbox
def test_grpo_in_one_file_learns() -> None:
    curve = example("grpo_in_one_file.py").main(steps=20)
    print("success by step:", curve)
    assert sum(curve[:4]) / 4 < 0.6  # two tries at four doors: 44 %
    assert sum(curve[-4:]) / 4 > 0.75


def test_grpo_in_one_file_masks_unsampled_tokens() -> None:
    grpo = example("grpo_in_one_file.py")
    renderer = ar.load_renderer(ar.train_tokenizer([*grpo.KEYS, *grpo.DOORS]))
    episodes = ar.run("doors-v0", ar.demonstrator(renderer), n=4, samples=2)
    ids, mask, _ = grpo.rows_of(episodes)
    for row, episode in enumerate(episodes):
        (trajectory,) = episode.trajectories
        assert ids[row, : len(trajectory)].tolist() == trajectory.token_ids.tolist()
        padding = [False] * (ids.shape[1] - len(trajectory))
        assert mask[row].bool().tolist() == [*trajectory.loss_mask.tolist(), *padding]


def test_shop_is_solved_by_its_oracle() -> None:
    example("shop.py")
    sizes = {split: ar.spec("shop-v0").tasks.size(split) for split in ("train", "eval")}
    assert sizes == {"train": 48, "eval": 16}
    for split in sizes:
        assert ar.evaluate("shop-v0", "oracle", split=split).success.value == 1


def test_shop_is_often_not_solved_by_its_demonstrations() -> None:
    example("shop.py")
    assert 0.3 < ar.evaluate("shop-v0", "demonstrator", split="train").success.value < 0.8


def test_shop_holds_tasks_out() -> None:
    shop = example("shop.py")
    splits = [{task["item"] for task in shop.tasks_of(split)} for split in ("train", "eval")]
    assert len(set.union(*splits)) == sum(map(len, splits)) == len(shop.PRICES) * len(shop.COLOURS)


def test_shop_can_be_rolled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "examples" / "shop.py")
    out = tmp_path / "episodes.jsonl"
    assert main(["rollout", "--import", file, "env=shop-v0", "policy=oracle", "split=train", "n=4", f"out={out}"]) == 0
    assert "100" in capsys.readouterr().out and len(out.read_text().splitlines()) == 4


def test_shop_can_be_trained_on(tmp_path: Path) -> None:
    example("shop.py")
    run = start_run(config(tmp_path, env="shop-v0", steps=1), Progress())
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"] == [1]


@pytest.mark.sandbox
def test_own_objective_can_be_trained_with(tmp_path: Path) -> None:
    example("own_objective.py")
    own = {"advantage": "over-median", "objective": {"name": "soft-clip", "width": 0.1}, "aggregation": "token-mean"}
    run = start_run(config(tmp_path, algorithm=own, steps=2), Progress())
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"]
    assert len(rows) == 2 and any(row["train/samples"] for row in rows)


def test_own_objective_ignores_one_lucky_episode() -> None:
    scores, groups = torch.tensor([0.0, 0.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 0, 0, 1, 1, 1])
    assert example("own_objective.py").over_median(scores, groups).tolist() == [0, 0, 1, 0, -1, 0]


@pytest.fixture(scope="module")
def readme() -> None:
    """Register the environments of the README's blocks, as they are."""
    text, scope = (ROOT / "README.md").read_text(), {"__name__": "readme"}
    for first_line in ("import agent_rl as ar", r'@ar.register\("brief-shop-v0".*?'):
        (block,) = re.findall(rf"```python\n({first_line}\n.*?)```", text, re.DOTALL)
        exec(re.sub(r'"((brief-)?shop-v0)"', r'"readme/\1"', block), scope)


@pytest.mark.usefixtures("readme")
def test_readme_has_the_shop_in_short() -> None:
    """The block of the README makes an environment that can be run."""

    async def ask(env: ar.Env) -> tuple[ar.Message, ...]:
        call = ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", "price", {"item": "red lamp"}),))
        step = env.step(call)
        assert not isinstance(step, ar.Step)
        return (await step).observation

    assert [m.content for m in asyncio.run(ask(ar.make("readme/shop-v0")))] == ["22"]


@pytest.mark.usefixtures("readme")
def test_readme_has_a_group_reward_that_prefers_the_briefest() -> None:
    texts = ("20.0", "It is 20.0.", "The lamp is 20.0.")
    said = [(ar.Message("user", "How much?"), ar.Message("assistant", text)) for text in texts]
    episodes = [example_episode(f"e{i}", messages=messages, env_args={}) for i, messages in enumerate(said)]
    (group,) = asyncio.run(score_groups(group_episodes(episodes), ar.spec("readme/brief-shop-v0")))
    assert [e.rewards[-1] for e in group.episodes] == [ar.Reward("brevity", n / 3, 0.2, "group") for n in (2, 1, 0)]
