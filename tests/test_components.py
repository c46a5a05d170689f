"""agent_rl.algorithms.components: registration, inputs and outputs, and a user's own parts in a run."""

import math
from pathlib import Path
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

import agent_rl as ar
from agent_rl.algorithms import Algorithm, AlgorithmConfig, components
from agent_rl.algorithms.explain import explain
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.cli import main
from agent_rl.core.episode import Reward, group_episodes
from agent_rl.errors import ConfigError, DefinitionError
from tests.batches import weigh
from tests.doubles import example_episode
from tests.runs import SMALL

OWN = Path(__file__).parent / "data" / "own_parts.py"


def two_episodes() -> list[ar.Episode]:
    return [example_episode(f"e{i}", rewards=(Reward("r", float(i)),)) for i in range(2)]


def test_reads_decide_the_needs_of_algorithms() -> None:
    def needing(name: str) -> set[str]:
        settings = {"advantage": name, "proximal": "recompute"}
        if name == "state-values":
            settings |= {"vine": {"max_episodes": 8}}
        if "gae" in name:
            settings |= {"critic": {"where": "shared"}}
        knobs = {"k": 2} if name == "pass-at-k" else {}
        algorithm = Algorithm(AlgorithmConfig.model_validate(settings | {"advantage": {"name": name, **knobs}}))
        return {n for n in ("greedy", "states", "values", "distributions") if getattr(algorithm, f"needs_{n}")}

    found = {name: needing(name) for name in components.advantage if not name.startswith("test-")}
    assert {name: needs for name, needs in found.items() if needs and name != "over-median"} == {
        "over-greedy": {"greedy"},
        "step-grouped": {"states"},
        "state-values": {"values"},
        "optimal-baseline": {"distributions"},
    }


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_knobs_are_finite_but_for_bounds_of_scores(value: float) -> None:
    kinds = [kind for kind in vars(components).values() if isinstance(kind, components.ComponentRegistry)]
    taken, tried = set[tuple[str, str]](), 0
    for name, schema in ((name, kind[name].knobs) for kind in kinds for name in kind):
        for knob, field in schema.model_fields.items():
            if float in (field.annotation, *get_args(field.annotation)):
                tried += 1
                with pytest.raises(ValidationError) as refused:
                    schema.model_validate({knob: value, "no knob": 0})
                if (knob,) not in {error["loc"] for error in refused.value.errors()}:
                    taken.add((name, knob))
    assert tried > 40 and taken == {("clip", "low"), ("clip", "high")}


def test_advantage_refuses_an_unknown_parameter() -> None:
    with pytest.raises(DefinitionError, match=r"reads 'score', which there is not\. Did you mean 'scores'\?.*groups"):

        @components.advantage("test-wrong", formula="")
        def wrong(score: torch.Tensor) -> torch.Tensor:
            return score


def test_advantage_refuses_positional_and_untyped_knobs() -> None:
    with pytest.raises(DefinitionError, match=r"put a \* before 'eps'"):

        @components.advantage("test-wrong", formula="")
        def positional(scores: torch.Tensor, eps: float = 0.1) -> torch.Tensor:
            return scores

    with pytest.raises(DefinitionError, match=r"knob 'eps' needs a type"):

        @components.advantage("test-wrong", formula="")
        def untyped(scores, *, eps=0.1):  # type: ignore[no-untyped-def]
            return scores


def test_advantage_of_wrong_shape_is_refused() -> None:
    @components.advantage("test-misshapen", formula="")
    def misshapen(scores: torch.Tensor) -> torch.Tensor:
        return scores[:1]

    algorithm = Algorithm(AlgorithmConfig.model_validate({"advantage": "test-misshapen"}))
    x = algorithm.experience(group_episodes(two_episodes()))
    with pytest.raises(DefinitionError, match=r"'test-misshapen' returned shape \(1,\): .*\[E\] = \(2,\)"):
        weigh(algorithm, x)


def test_advantage_eps_is_a_knob() -> None:
    for name in ("group-relative", "batch-normalised", "best-of-group", "max-likelihood", "decoupled", "step-grouped"):
        std = {"std": True} if "std" in components.advantage[name].own else {}
        config = AlgorithmConfig.model_validate({"advantage": {"name": name, "eps": 0.25, **std}})
        assert "eps=0.25" in explain(config)


def test_advantage_over_values_must_return_targets() -> None:
    """Its critic would be asked, and never learn."""

    @components.advantage("test-declared", formula="")
    def declared(scores: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return scores

    @components.advantage("test-undeclared", formula="")
    def undeclared(scores: torch.Tensor, values: torch.Tensor):  # type: ignore[no-untyped-def]
        return scores

    settings = {"critic": {"where": "separate"}}
    with pytest.raises(ValueError, match=r"advantage=test-declared reads the critic's values.*AdvantageEstimate"):
        AlgorithmConfig.model_validate(settings | {"advantage": "test-declared"})
    algorithm = Algorithm(AlgorithmConfig.model_validate(settings | {"advantage": "test-undeclared"}))
    x = algorithm.experience(group_episodes(two_episodes()))
    with pytest.raises(DefinitionError, match=r"'test-undeclared' reads the critic's values but returned shape \(2,\)"):
        weigh(algorithm, x, values=torch.zeros(x.rows.loss_mask.shape))


def test_kl_without_a_reference_is_an_error() -> None:
    """Otherwise the penalty would be against mu, with a KL of 0."""
    settings = {"kl": {"where": "loss", "coefficient": 1.0}, "proximal": "recompute"}
    algorithm = Algorithm(AlgorithmConfig.model_validate(settings))
    x = algorithm.experience(group_episodes(two_episodes()))
    batch, whole = weigh(algorithm, x)
    logprobs = batch.rows.rollout_logprobs.clone().requires_grad_()
    with pytest.raises(ConfigError, match="reads reference_logprobs, which were not computed: they come from the tr"):
        algorithm.loss(logprobs, torch.zeros_like(logprobs), batch.inputs, whole)
    rewarded = Algorithm(AlgorithmConfig.model_validate({"kl": {"where": "reward", "kind": "k1"}}))
    with pytest.raises(ConfigError, match=r"'kl\.where=reward' reads reference_logprobs"):
        weigh(rewarded, x)


@pytest.mark.sandbox
def test_user_parts_train_from_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used: list[tuple[str, str]] = []
    real = Trainer.update

    def spy(self: Trainer, x: object, hot: object) -> dict[str, float]:
        used.append((self.algorithm.advantage.name, self.algorithm.objective.name))
        return real(self, x, hot)  # type: ignore[arg-type]

    monkeypatch.setattr(Trainer, "update", spy)
    flat = {f"{k}.{n}": v for k, s in SMALL.items() if isinstance(s, dict) for n, v in s.items()}
    flat |= {k: v for k, v in SMALL.items() if not isinstance(v, dict)} | {"steps": 1, "runs_dir": tmp_path}
    parts = [
        *("algorithm.advantage={name: test-centred, scale: 2.0}", "algorithm.objective=test-plain"),
        *("algorithm.shaping=[{name: test-bonus, bonus: 0.5}]", "algorithm.filters=[{name: test-short, most: 1000}]"),
    ]
    asked = [f"{key}={value}" for key, value in flat.items()] + parts
    assert main(["train", "--import", str(OWN), *asked]) == 0
    assert used == [("test-centred", "test-plain")]
    capsys.readouterr()
    assert main(["train", "--import", str(OWN), "--explain", *parts]) == 0
    assert "A = scale (R - mean of the batch)" in capsys.readouterr().out
    assert main(["algorithms", "--import", str(OWN)]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in ("test-centred", "test-plain", "test-bonus", "test-short"))
    assert main(["train", "--import", str(OWN), "--explain", "algorithm.advantage=test-centered"]) == 1
    assert "Did you mean 'test-centred'" in capsys.readouterr().err
