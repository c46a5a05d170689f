"""Training on an environment that has no demonstrations."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agent_rl as ar
from agent_rl.backends.embedded.check import check_run, require_demonstrations
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.run import start_run
from agent_rl.backends.embedded.warm_start import demonstrate, stored_demonstrations
from agent_rl.backends.embedded.warm_start_config import WarmStartConfig
from agent_rl.config import load_config
from agent_rl.core.episode import StopReason
from agent_rl.policy.scripted import Scripted
from agent_rl.runs.metrics import read_metrics
from agent_rl.view.progress import Progress
from tests.doubles import small_renderer, token_policy
from tests.runs import SMALL, config


class Bare(ar.ToolEnv):
    """An environment without demonstrations."""

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        self.item = str(task["item"])
        return f"what does the {self.item} cost"

    @ar.tool
    def price(self, item: str) -> int:
        """Look up what an item costs."""
        return len(item)

    @ar.reward
    def correct(self, episode: ar.Episode) -> bool:
        return episode.final_text == str(len(self.item))


@pytest.fixture
def bare() -> str:
    rows = [{"item": name} for name in ("lamp", "chair")]
    ar.register("bare-v0", tasks=dict.fromkeys(("train", "dev", "test", "eval"), rows))(Bare)
    return "bare-v0"


def test_run_offers_a_template_of_demonstrations(bare: str, tmp_path: Path) -> None:
    with pytest.raises(ar.ConfigError, match=r"bare-v0 has none: set start_from=FOLDER of a pretrained model") as error:
        start_run(config(tmp_path, env=bare), Progress())
    assert not any(tmp_path.iterdir())
    _, *template = str(error.value).split("\n")
    assert len(template) == 2
    scope: dict[str, Any] = {"Bare": Bare, "ar": ar}
    exec("\n".join(["class Pasted(Bare):", *template]), scope)
    ar.register("pasted-v0", tasks={"train": [{"item": "lamp"}]})(scope["Pasted"])
    assert [e.success for e in ar.run("pasted-v0", "demonstrator")] == [True]


def test_run_without_demonstrations_starts_from_a_model(bare: str, folder: Path, tmp_path: Path) -> None:
    start = str(folder / "checkpoint")
    run = start_run(config(tmp_path, env=bare, steps=1, start_from=start), Progress())
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "train"] == [1]


def test_demonstrations_default_to_the_oracle() -> None:
    class Scripted(Bare):
        def oracle(self) -> ar.Script:
            yield str(len(self.item))

    ar.register("scripted-v0", tasks={"train": [{"item": "lamp"}]})(Scripted)
    require_demonstrations(ar.spec("scripted-v0"), {})
    assert [e.final_text for e in ar.run("scripted-v0", "demonstrator")] == ["4"]


def test_stored_episodes_are_demonstrations(tmp_path: Path) -> None:
    file, env = tmp_path / "demonstrations.jsonl", ar.spec("calculator-v0")
    kept = ar.run(env.id, "oracle", n=12) + ar.run(env.id, "oracle", n=2, split="dev")
    with ar.EpisodeWriter(file) as writer:
        for episode in [*kept, *ar.run(env.id, "empty", n=3), *ar.run("search-v0", "oracle", n=2)]:
            writer.write(episode)
    settings = config(tmp_path, steps=0, warm_start={**SMALL["warm_start"], "episodes": str(file)})  # type: ignore[dict-item]
    run = start_run(settings, Progress())
    (row,) = (row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "demonstrations")
    assert (row["n"], row["failed"]) == (12, 0), "without failures, other environments and tasks of the evaluation"
    renderer = small_renderer()
    (again,) = stored_demonstrations(env, str(file), 1, renderer=renderer)
    assert [m.content for m in again.messages] == [m.content for m in kept[0].messages]
    assert (again.steps, again.rewards, again.seed) == (kept[0].steps, kept[0].rewards, kept[0].seed)
    replies = [i for m in again.messages if m.role == "assistant" for i in renderer.reply(m)]
    (trajectory,) = again.trajectories
    assert trajectory.token_ids[trajectory.loss_mask].tolist() == replies
    assert len(stored_demonstrations(env, str(file), 99, successful=False)) == 17
    with pytest.raises(ar.ConfigError, match=r"no episode of guess-v0 succeeded.*warm_start.successful=false takes"):
        stored_demonstrations(ar.spec("guess-v0"), str(file), 1)
    with pytest.raises(ar.StoreError, match="there is no episode file"):
        check_run(config(tmp_path, warm_start={"episodes": str(tmp_path / "none")}))
    with pytest.raises(ValueError, match=r"with warm_start.clone_steps=0 clones nothing"):
        config(tmp_path, start_from="model", warm_start={"episodes": str(file), "clone_steps": 0})


def test_examples_in_an_opening_are_not_played_again(tmp_path: Path) -> None:
    class Shown(Bare):
        def reset(self, task: ar.Task, rng: np.random.Generator) -> list[ar.Message]:  # type: ignore[override]
            example = [ar.Message("user", "what does the bed cost"), ar.Message("assistant", "3")]
            return [*example, ar.Message("user", super().reset(task, rng))]

        def oracle(self) -> ar.Script:
            call = ar.ToolCall("call_0", "price", {"item": self.item})
            (found,) = yield ar.Message("assistant", tool_calls=(call,))
            yield found.content

    ar.register("shown-v0", tasks={"train": [{"item": "lamp"}]})(Shown)
    with ar.EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        writer.write(ar.run("shown-v0", "oracle")[0])
    (again,) = stored_demonstrations(ar.spec("shown-v0"), str(tmp_path), 1)
    assert again.final_text == "4" and again.turns == 2


def test_unreadable_calls_are_not_played_again(tmp_path: Path) -> None:
    def stumbles(env: ar.Env, seed: int) -> ar.Script:
        yield ar.Message("assistant", tool_calls=(ar.ToolCall("call_0", "calculator", error="not valid JSON"),))
        yield from env.oracle()

    env = ar.spec("calculator-v0")
    stumbled, smooth = ar.run(env.id, Scripted(stumbles)), ar.run(env.id, "oracle", n=2)
    assert stumbled[0].success
    with ar.EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        for episode in [*stumbled, smooth[1]]:
            writer.write(episode)
    (again,) = stored_demonstrations(env, str(tmp_path), 9, renderer=small_renderer())
    assert again.task == smooth[1].task


def test_cut_replies_are_not_played_again(bare: str, tmp_path: Path) -> None:
    cut, whole = (ar.run(bare, token_policy(reply, max_tokens=2))[0] for reply in ("4 444", "4"))
    assert cut.stop_reason is StopReason.LENGTH and cut.final_text.strip() == "4"
    with ar.EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        for episode in (cut, whole):
            writer.write(replace(episode, id=episode.stop_reason))
    played = stored_demonstrations(ar.spec(bare), str(tmp_path), 9, successful=False)
    assert [e.final_text for e in played] == ["4"]


def test_broken_demonstrations_are_told_with_a_reason(bare: str, tmp_path: Path) -> None:
    def thinks(env: ar.Env, seed: int) -> ar.Script:
        yield ar.Message("assistant", "4", reasoning="I know.")

    env = ar.spec(bare)
    with ar.EpisodeWriter(tmp_path / "episodes.jsonl") as writer:
        writer.write(ar.run(bare, Scripted(thinks))[0])
        with pytest.raises(
            ar.ConfigError, match=r"; 1 of 1 ended in an error, such as RenderError: ChatML has no place"
        ):
            stored_demonstrations(env, str(tmp_path), 9, renderer=small_renderer())
        writer.write(ar.run(bare, Scripted(lambda env, seed: (yield "4")))[0])
    told: list[str] = []
    assert len(stored_demonstrations(env, str(tmp_path), 9, renderer=small_renderer(), warn=told.append)) == 1
    (said,) = told
    assert "1 of 2 ended in an error, such as RenderError: ChatML has no place for reasoning" in said


def test_pretrained_models_have_their_own_warm_start() -> None:
    def load(*settings: str) -> TrainConfig:
        return load_config("backend/embedded", TrainConfig, settings)

    fresh, plain = load(), load("start_from=m")
    assert fresh.warms_up and fresh.warm_start == WarmStartConfig() and not plain.warms_up
    asked = load("start_from=m", "warm_start.clone_steps=7", "warm_start.optimizer.warmup_steps=3")
    start = asked.warm_start
    assert asked.warms_up and (start.copy_steps, start.copy_share, start.env_weight) == (0, 0, 0)
    assert (start.optimizer.lr, start.optimizer.muon_lr, start.optimizer.warmup_steps) == (5e-5, 0, 3)
    assert load("start_from=m", "warm_start.episodes=f").warm_start.clone_steps == 100
    assert load("start_from=m", "warm_start.optimizer.lr=1e-4").warm_start.optimizer.lr == 1e-4
    again = TrainConfig.model_validate(asked.model_dump(by_alias=True))
    assert again == asked and TrainConfig(env="e", start_from="m", warm_start=start).warm_start == start
    with pytest.raises(ar.ConfigError, match="warm_start=3"):
        load("start_from=m", "warm_start=3")


def test_pretrained_models_clone_if_asked(bare: str, folder: Path, tmp_path: Path) -> None:
    start = str(folder / "checkpoint")
    with pytest.raises(ar.ConfigError, match=r"a warm start begins with .* set warm_start.episodes=FILE, or paste"):
        check_run(config(tmp_path, env=bare, start_from=start, warm_start={"clone_steps": 3}))
    asked = {"clone_steps": 8, "demonstrations": 16, "batch": 8, "optimizer": {"lr": 2e-3}}
    rollout = {**SMALL["rollout"], "context": 64}  # type: ignore[dict-item]
    settings = config(tmp_path, steps=0, start_from=start, warm_start=asked, rollout=rollout)
    run = start_run(settings, Progress())
    phases = [row["kind"] for row in read_metrics(run / "metrics.jsonl") if row["kind"] != "eval"]
    assert phases == ["demonstrations"] + ["cloning"] * 8, "no copying"
    assert "12 of 16 demonstrations exceed the context" in (run / "warnings.txt").read_text()
    losses = read_metrics(run / "metrics.jsonl").series("loss")
    assert losses[-1][1] < losses[0][1]


def test_failed_demonstration_is_named_with_its_place_and_task(bare: str) -> None:
    class Broken(Bare):
        def demonstrate(self, rng: np.random.Generator) -> Iterator[str]:
            yield "1"

        def step(self, action: ar.Message) -> ar.Step:
            raise KeyError("\x1b[31mno lamp")

    ar.register("broken-shop-v0", tasks={"train": [{"item": "lamp"}]})(Broken)
    with pytest.raises(ar.ConfigError) as refused:
        demonstrate(ar.spec("broken-shop-v0"), 1, split="train", seed=0)
    said = str(refused.value)
    assert "a demonstration of broken-shop-v0 failed in step: KeyError" in said and 'task is {"item": "lamp"}' in said
    assert said.endswith("test_demonstrations.py broken-shop-v0") and "agent-rl check --import " in said
    assert "\x1b" not in said


@ar.register(
    "unjudged-demonstrations-v0", tasks={"train": [{"item": "lamp"}, {"item": "sofa"}], "eval": [{"item": "bed"}]}
)
class Unjudged(Bare):
    @ar.reward(weight=0)
    def correct(self, episode: ar.Episode) -> None:
        return None

    @ar.reward
    def short(self, episode: ar.Episode) -> float:
        return -len(episode.final_text)

    def oracle(self) -> ar.Script:
        yield str(len(self.item))


def test_demonstrations_without_known_success_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = start_run(config(tmp_path, env="unjudged-demonstrations-v0", steps=0), Progress())
    assert "64 demonstrations, whose success no reward says; model: " in capsys.readouterr().out
    assert "64, whose success no reward says" in (run / "report.html").read_text(encoding="utf-8")
