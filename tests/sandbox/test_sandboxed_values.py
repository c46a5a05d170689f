"""VinePPO values the states of a sandbox as it does those of plain Python, and learns the same from them."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

import agent_rl as ar
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.trainer import StepResult, Trainer
from agent_rl.envs.calculator import Calculator, make_task
from agent_rl.gym.registry import spec
from agent_rl.gym.sandboxed import SandboxedEnv
from tests.runs import config, untimed

VINE = {"advantage": "state-values", "vine": {"continuations": 3, "max_episodes": 30}}


@ar.register(
    "sandboxed/calculator-v0", tasks=make_task, splits=("train", "eval", "dev"), budget=spec("calculator-v0").budget
)
class Boxed(SandboxedEnv, Calculator):
    """calculator-v0 by an interpreter that counts its calls, so that one without its variables would be found out."""

    extra_tools = ()
    snapshot_attributes = (*Calculator.snapshot_attributes, "made")

    async def reset(self, task: ar.Task, rng: np.random.Generator) -> str:  # type: ignore[override]
        self.made = 0
        await self.open_sandbox()
        return Calculator.reset(self, task, rng)

    @ar.tool
    async def calculator(self, operator: Literal["+", "-", "*"], left: int, right: int) -> int:
        """Compute one operation on two whole numbers.

        Args:
            operator: what to do.
            left: the first number.
            right: the second number.
        """
        code = f"calls = globals().get('calls', 0) + 1\n(calls, ({left}) {operator} ({right}))"
        calls, value = ast.literal_eval((await self.sandbox.run_python(code)).value or "()")
        self.made += 1
        assert calls == self.made, "the interpreter is not where the episode is"
        return int(value)


def trained(env: str, talker: Path, folder: Path) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Return what a step gives, and the weights after it."""
    settings = config(folder, env=env, algorithm=VINE, steps=1)
    trainer = Trainer(spec(env), load_actor(talker, slots=8, context=256), settings)
    return trainer.train_step(), trainer.actor.model.state_dict()


@pytest.mark.sandbox
def test_vineppo_learns_the_same_from_sandboxes(talker: Path, tmp_path: Path) -> None:
    (boxed, after), (plain, expected) = (
        trained(env, talker, tmp_path / env) for env in ("sandboxed/calculator-v0", "calculator-v0")
    )
    assert [e.error for e in boxed.episodes] == [None] * 12 and max(e.turns for e in boxed.episodes) > 2
    assert [e.messages for e in boxed.episodes] == [e.messages for e in plain.episodes]
    vine = [{k: v for k, v in untimed(r.metrics).items() if k.startswith("vine/")} for r in (boxed, plain)]
    assert vine[0] == vine[1] and vine[0]["vine/valued"] == 10 and vine[0]["vine/unscored"] == 0
    before = load_actor(talker).model.state_dict()
    moved = max(float((before[name] - weight).abs().max()) for name, weight in expected.items())
    for name, weight in expected.items():  # which sequences are sampled together moves log-probabilities by rounding
        torch.testing.assert_close(after[name], weight, rtol=0, atol=moved / 1000)
    assert moved > 1e-5
