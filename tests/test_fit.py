"""agent_rl.rollout.fit: openings and oracles against the tokens of an episode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import agent_rl as ar
from agent_rl.backends.embedded import fresh
from agent_rl.backends.embedded.run import start_run
from agent_rl.backends.embedded.warm_start import demonstrate
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver.run import check_fit as check_verl_fit
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message
from agent_rl.errors import ConfigError, RenderError
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env
from agent_rl.gym.registry import spec
from agent_rl.rendering import train_tokenizer
from agent_rl.rollout import fit
from agent_rl.rollout.fit import check_fit, check_policy_fit
from agent_rl.rollout.job import Job
from agent_rl.runs.metrics import read_metrics
from agent_rl.view.progress import Progress
from tests.doubles import CALL, Dice, dice_spec, play, small_renderer, token_policy
from tests.runs import config

RENDERER = small_renderer()


class Solved(Dice):
    """Has an oracle; rewards are not asked for it."""

    def oracle(self) -> Iterator[Message | str]:
        yield CALL
        yield "6"

    async def score(self, episode: Episode, *more: object) -> tuple[ar.Reward, ...]:
        raise AssertionError


OPENING = len(RENDERER.prompt([Message("user", "roll")], Dice().tools))


def jobs(cls: type[Env] = Dice, tokens: int | None = None, n: int = 2, **task: object) -> list[Job]:
    spec = dice_spec(cls=cls, budget=Budget(tokens=tokens))
    return [Job(spec, {"n": i, **task}, i, group_id=str(i // 2)) for i in range(n)]


def check(tokens: int | None, cls: type[Env] = Dice, context: int | None = None, n: int = 2) -> str | None:
    return check_fit(jobs(cls, tokens, n), RENDERER, context, "rollout.context")


@pytest.mark.parametrize(
    ("tokens", "context", "setting"), [(OPENING, 999, "budget.tokens"), (999, OPENING, "rollout.context")]
)
def test_opening_without_room_is_refused(tokens: int, context: int, setting: str) -> None:
    said = (
        f"env=dice-v0: an opening takes {OPENING} (at most {OPENING}) tokens of this policy, and {setting}={OPENING} "
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}leaves no room for a reply: set {setting} higher$"):
        check(tokens, context=context)


def test_check_without_oracle_judges_openings_only() -> None:
    assert check(OPENING + 1) is None and check(None) is None


def test_oracle_over_budget_is_a_warning() -> None:
    whole = len(RENDERER.prompt([Message("user", "roll")], Dice().tools) + RENDERER.reply(CALL))
    warning = check(whole, Solved)
    assert warning is not None
    need = re.search(r"the oracle itself needs (\d+) \(at most \1\) tokens of this policy, and budget", warning)
    assert need and warning.endswith(
        f"budget.tokens={whole} cuts 1 of 1 episodes: set budget.tokens={2 * int(need[1])} or so"
    )
    assert check(int(need[1]), Solved) is None and check(int(need[1]) - 1, Solved) is not None


def test_check_measures_first_tasks_once_each() -> None:
    Dice.closed.clear()
    check(999, n=99)
    assert len(Dice.closed) == fit.CHECKED


def test_check_gives_up_on_slow_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "SECONDS", 0.01)
    assert check_fit(jobs(Dice, OPENING, hang="reset"), RENDERER, None, "rollout.context") is None


def test_scripts_have_no_tokens_to_check() -> None:
    assert check_policy_fit(jobs(tokens=1), play("6")) is None
    with pytest.raises(ConfigError, match=r"budget\.tokens=1 leaves no room"):
        check_policy_fit(jobs(tokens=1), token_policy("6"))


def test_run_with_oversized_openings_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"budget\.tokens=9 leaves no room"):
        ar.run("calculator-v0", token_policy("6"), n=3, budget=Budget(tokens=9))
    with pytest.raises(ConfigError, match=r"budget\.tokens=9 leaves no room"):
        ar.evaluate("calculator-v0", token_policy("6"), split="eval", n=3, budget=Budget(tokens=9))


def test_run_with_oversized_oracle_is_warned() -> None:
    with pytest.warns(RuntimeWarning, match=r"the oracle itself needs \d+ .* cuts \d of 3 episodes: set budget.tokens"):
        ar.run("calculator-v0", token_policy(*"666"), n=3, budget=Budget(tokens=60))


def test_embedded_training_compares_before_first_step(tmp_path: Path) -> None:
    settings = config(tmp_path, budget={"tokens": 9})
    with pytest.raises(ConfigError, match=r"budget\.tokens=9 leaves no room"):
        start_run(settings, Progress())
    assert read_metrics(tmp_path / "runs" / "latest" / "metrics.jsonl") == []


@pytest.mark.parametrize("env", ["calculator-v0", "search-v0", "python-v0", "sql-v0"])
def test_builtin_environments_leave_tokens_to_the_policy(env: str) -> None:
    assert spec(env).budget.tokens is None


def test_fresh_model_has_room_for_demonstrations(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["context"] == fresh.SHORTEST_CONTEXT
    monkeypatch.setattr(fresh, "SHORTEST_CONTEXT", 1)
    settings = config(tmp_path)
    actor = fresh.fresh_actor(settings.load_env(), settings)
    demonstrations = demonstrate(settings.load_env(), fresh.MEASURED, split="train", seed=0, renderer=actor.renderer)
    longest = max(len(e.trajectories[0]) for e in demonstrations)
    assert longest * 1.8 < actor.engine.context_limit < longest * 2.4
    limited = config(tmp_path, budget={"tokens": 99})
    assert fresh.fresh_actor(limited.load_env(), limited).engine.context_limit == 99


def test_verl_compares_with_its_context(tmp_path: Path) -> None:
    train_tokenizer(["compute 3*4+5"], 432).save_pretrained(tmp_path)

    def check(context: int) -> str | None:
        settings = {"env": "calculator-v0", "start_from": str(tmp_path), "rollout": {"context": context}}
        return check_verl_fit(VerlConfig.model_validate(settings))

    with pytest.raises(ConfigError, match=r"rollout\.context=9 leaves no room"):
        check(9)
    assert "rollout.context=60 cuts" in str(check(60))
    assert check(4096) is None
    (tmp_path / "tokenizer.json").write_text("{")
    said = f"start_from={tmp_path}: rollout.context=60 and budget.tokens were not compared with the openings of calcul"
    (line,) = str(check(60)).splitlines()
    assert line.startswith(said) and "as its tokenizer can't be used (" in line


def test_verl_refuses_a_renderer_that_can_not_be_made(tmp_path: Path) -> None:
    made = train_tokenizer(["compute 3*4+5"], 432)
    template, made.chat_template = made.chat_template, None
    made.save_pretrained(tmp_path)

    def check(**changes: object) -> str | None:
        return check_verl_fit(
            VerlConfig.model_validate({"env": "calculator-v0", "start_from": str(tmp_path)} | changes)
        )

    with pytest.raises(ConfigError, match="no renderer 'chatmll'"):
        check(renderer={"name": "chatmll"})
    with pytest.raises(RenderError, match="has no chat template"):
        check(renderer={"name": "template"})
    given = {"actor_rollout_ref.model.custom_chat_template": template}
    assert "agent_rl writes tools" in str(check(renderer={"name": "template"}, verl=given))


class Toolless:
    """A renderer that refuses tools; implements `Renderer`."""

    stop_ids, reply = RENDERER.stop_ids, RENDERER.reply

    def prompt(self, messages: list[Message], tools: object) -> list[int]:
        raise RenderError("the renderer leaves tools out")


def test_openings_that_no_renderer_takes_are_refused() -> None:
    with pytest.raises(RenderError, match=r"^the renderer leaves tools out$"):
        check_fit(jobs(), Toolless(), 999, "rollout.context")  # type: ignore[arg-type]
