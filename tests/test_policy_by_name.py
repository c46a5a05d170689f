"""agent_rl.policy.by_name: policies by their names, with settings of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.engines.base import SamplingParams
from agent_rl.gym.registry import EnvSpec
from agent_rl.policy import PolicyConfig, Scripted, open_policy
from agent_rl.policy.by_name import POLICIES, register_policy
from agent_rl.store.episodes import read_episodes
from tests.doubles import dice_spec

HOT = SamplingParams(temperature=2.0)
OWN = """\
import agent_rl as ar
from agent_rl.policy import Scripted

@ar.register_policy("parrot")
def parrot(word: str, times: int = 1) -> Scripted:
    return Scripted(lambda env, seed: (word * times for _ in range(9)))
"""


@pytest.fixture(autouse=True)
def forget_registered() -> Iterator[None]:
    yield
    for name in ("parrot", "asking", "server", "strict"):
        POLICIES._parts.pop(name, None)


def opened(**config: object) -> ar.Message:
    """Return the first answer of a policy."""
    with open_policy(PolicyConfig.model_validate(config), HOT, dice_spec()) as policy:
        assert isinstance(policy, Scripted)
        answer = next(policy.script(dice_spec().make(), 0))
        return ar.Message("assistant", answer) if isinstance(answer, str) else answer


def test_register_policy_makes_a_user_policy_usable(tmp_path: Path) -> None:
    own, out = tmp_path / "own.py", tmp_path / "episodes.jsonl"
    own.write_text(OWN)
    assert len(OWN.splitlines()) <= 10
    settings = ["policy=parrot", "policy.word=ha", "policy.times=2"]
    assert main(["rollout", "--import", str(own), *settings, "n=2", f"out={out}"]) == 0
    assert [e.final_text for e in read_episodes(out)] == ["haha", "haha"]
    (episode,) = ar.run("calculator-v0", {"name": "parrot", "word": "12"})
    assert episode.final_text == "12"


def test_open_policy_passes_sampling_and_environment() -> None:
    @register_policy("asking")
    def asking(params: SamplingParams, env: EnvSpec, word: str = "is") -> Scripted:
        return Scripted(lambda _env, seed: (text for text in [f"{env.id} {word} {params.temperature}"]))

    assert opened(name="asking").content == "dice-v0 is 2.0"
    assert opened(name="asking", word="at").content == "dice-v0 at 2.0"
    with pytest.raises(ar.ConfigError, match=r"policy=asking has no setting 'params'\. It takes: word\."):
        opened(name="asking", params="hot")


def test_open_policy_closes_context_managers() -> None:
    seen = []

    @register_policy("server")
    @contextmanager
    def server() -> Iterator[Scripted]:
        seen.append("open")
        yield Scripted(lambda env, seed: (text for text in ["hi"]))
        seen.append("closed")

    assert opened(name="server").content == "hi"
    assert seen == ["open", "closed"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"name": "strict"}, "policy.size: field required"),
        ({"name": "strict", "size": 0}, r"policy\.size: .*greater than or equal to 1"),
        ({"name": "strict", "size": "two"}, r"policy\.size: .*valid integer"),
        ({"name": "strict", "size": 1, "sise": 2}, r"no setting 'sise'\. Did you mean 'size'\? It takes: size\."),
        ({"name": "stritc", "size": 1}, r"policy=stritc is neither oracle, .*Did you mean 'strict'"),
        ({"name": "oracle", "temperature": 0}, "policy=oracle has no setting 'temperature'"),
    ],
)
def test_open_policy_refuses_wrong_settings(config: dict[str, object], message: str) -> None:
    @register_policy("strict")
    def strict(size: Annotated[int, Field(ge=1)]) -> Scripted:
        return Scripted(lambda env, seed: (text for text in ["hi"] * size))

    with pytest.raises(ar.ConfigError, match=message):
        opened(**config)


@pytest.mark.parametrize("setting", ["temperature=0", "max_tokens=9"])
def test_rollout_of_a_script_says_that_it_samples_nothing(
    setting: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "policy=oracle", "n=1", setting, f"out={tmp_path / 'a.jsonl'}"]) == 0
    assert f"{setting}: policy=oracle does not sample, so that it changes nothing" in capsys.readouterr().out


def test_run_plays_a_checkpoint_folder(folder: Path) -> None:
    checkpoint = str(folder / "checkpoint")
    settings = {"folder": checkpoint, "renderer": "chatml", "slots": 2}
    for policy in (checkpoint, str(folder), {"name": "checkpoint", **settings}):
        (episode,) = ar.run("calculator-v0", policy, split="dev")
        assert episode.error is None and episode.trajectories[0].loss_mask.any()
    with pytest.raises(ar.ConfigError, match=r"no renderer .*'chatm'"):
        ar.run("calculator-v0", {"name": checkpoint, "renderer": "chatm"})
