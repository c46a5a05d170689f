"""Settings under which nothing can be learned are refused, and every preset says what it reads."""

import math
from dataclasses import replace

import pytest
import torch

from agent_rl.algorithms import Algorithm, AlgorithmConfig, Experience, components
from agent_rl.algorithms.learnable import ALONE
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.config import choices, load_config
from agent_rl.core.episode import Episode, Reward, group_episodes
from agent_rl.errors import ConfigError
from tests.batches import scored
from tests.doubles import example_episode

BACKENDS = {"embedded": TrainConfig, "verl": VerlConfig}


def load(*settings: str, backend: str = "embedded") -> TrainConfig | VerlConfig:
    given = ["env=calculator-v0", *settings, *(["start_from=m"] if backend == "verl" else [])]
    return load_config(f"backend/{backend}", BACKENDS[backend], given)


def teaches(config: AlgorithmConfig) -> bool:
    """Whether some token of three tasks with an episode each has an advantage."""
    algorithm = Algorithm(config)
    one = [example_episode(f"e{i}", rewards=(Reward("r", i / 2),), group_id=f"g{i}") for i in range(3)]
    greedy = [example_episode(f"b{i}", rewards=(Reward("r", 0.25),), group_id=f"g{i}") for i in range(3)]
    x = algorithm.experience(group_episodes(one, greedy if algorithm.needs_greedy else ()))
    x = Experience(**{n: getattr(x, n) for n in x.__slots__} | {"states": torch.arange(x.states.numel()).view(3, -1)})
    mu = x.rows.rollout_logprobs
    found = {"reference_logprobs": mu, "values": 0.1 * mu, "sum_pi_squared": torch.full_like(mu, 0.5)}
    if algorithm.needs_values:
        x.state_values[:] = torch.rand(x.state_values.shape, generator=torch.Generator().manual_seed(0))
    weighed, _, _ = algorithm.compute_weights_in_place_order(x, scored(x.rows, **found))
    return bool(weighed.advantages.abs().gt(1e-6).any())


@pytest.mark.parametrize("name", choices("algorithm"))
def test_one_sample_is_refused_where_it_teaches_nothing(name: str) -> None:
    """Refused are those whose update has no gradient for the only episode of a task, and no others."""
    config = load(f"algorithm={name}").algorithm
    try:
        load(f"algorithm={name}", "rollout.samples=1")
    except ConfigError as error:
        assert not teaches(config) and "rollout.samples=1: " in str(error) and "set rollout.samples=8" in str(error)
    else:
        assert teaches(config), name


@pytest.mark.parametrize("name", [n for n in components.advantage if n != "pass-at-k"])  # it needs more than k
def test_advantages_of_one_episode_are_known(name: str) -> None:
    """`ALONE` has every advantage that is 0 for the only episode of a task, by whichever name."""
    part, parts = components.advantage[name], {"advantage": name}
    more: dict[str, dict[str, object]] = {
        "values": {"critic": {"where": "shared"}},
        "sum_pi_squared": {"proximal": "recompute"},
        "state_values": {"vine": {"max_episodes": 99}},
    }
    parts |= {key: value for read in part.reads for key, value in more.get(read, {}).items()}
    if part.returns == "PairSides":
        parts |= {"objective": "dpo", "aggregation": "token-sum"}
    assert teaches(AlgorithmConfig.model_validate(parts)) == (name not in ALONE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["algorithm=grpo", "rollout.samples=1"],
            "rollout.samples=1: advantage=group-relative compares the episodes of a task",
        ),
        (
            ["algorithm=remax", "algorithm.filters=[varied-groups]", "rollout.samples=1"],
            "varied-groups keeps tasks whose",
        ),
        (["algorithm.advantage={name: pass-at-k, k: 4}", "rollout.samples=4"], "set rollout.samples to 8 or more"),
        (["algorithm.shaping=[{name: clip, low: 0.5, high: 0.5}]"], "low=high=0.5 gives every episode the same score"),
        (["algorithm.shaping=[{name: scale, factor: 0}]"], "factor=0 gives every episode the same score"),
        (
            ["algorithm.filters=[{name: successful, threshold: inf}]"],
            "'successful': threshold=inf: input should be a finite number",
        ),
        (["algorithm.filters=[{name: varied-groups, tolerance: inf}]"], "'varied-groups': tolerance=inf"),
        (["algorithm.rejection={name: token, low: 1, high: 1}"], "rejection=token with low=high=1 leaves the tokens"),
        (["algorithm.rejection={name: worst-token, low: 1, high: 1}"], "worst-token with low=high=1"),
        (["algorithm.weight={name: icepop, low: 1, high: 1}"], "weight=icepop with low=high=1.*both sides of 1"),
        (
            ["algorithm=reinforce_pp", "rollout.samples=1", "rollout.groups=1"],
            "reinforce-pp compares with the batch's mean",
        ),
        (["algorithm=dr_grpo", "algorithm.advantage.eps=0.1"], "eps=0.1 is added to the deviation"),
        (["algorithm=rft", "algorithm.negative_mask={name: opsm, delta: 0.1}"], "negative_mask=opsm leaves out"),
        (["rollout.temperature=1e-9"], "temperature=1e-09 takes the likeliest token nearly always"),
        (["rollout.temperature=0"], "rollout.temperature=0: input should be greater than 0"),
        (["steps=-1"], "steps=-1"),
        (["algorithm.objective={name: cispo, clip_high_cap: 0}"], "clip_high_cap"),
        (["algorithm.objective={name: minirl, ratio_cap: 0}"], "ratio_cap"),
        (["algorithm.objective={name: sapo, tau_negative: 0}"], "tau_negative"),
        (["algorithm.objective={name: m2po, second_moment: 0}"], "second_moment"),
        (["algorithm=rft", "algorithm.kl.where=reward"], "kl.where=reward changes the rewards, and advantage=ones"),
        (["algorithm.routing={min_agreement: 1.5}"], "min_agreement=1.5: input should be less than or equal to 1"),
    ],
)
def test_settings_that_teach_nothing_are_refused(backend: str, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(*settings, backend=backend)


def test_critic_warm_up_of_the_whole_run_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps=5 of steps=5: the policy would never learn"):
        load("algorithm=ppo", "algorithm.critic.warmup_steps=5", "steps=5")
    assert load("algorithm=ppo", "algorithm.critic.warmup_steps=5", "steps=6").steps == 6


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "decoupled", "shaping": [{"name": "scale", "factor": 2}]}, "shaping changes the total"),
        ({"advantage": "decoupled", "kl": {"where": "reward", "kind": "k1"}}, "kl.where=reward changes the total"),
        ({"advantage": "over-greedy", "kl": {"where": "reward", "kind": "k1"}}, "greedy episodes.*set kl.where=loss"),
    ],
)
def test_changes_that_an_advantage_ignores_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AlgorithmConfig.model_validate(settings)


# Two environments with a component of one name


def mixed() -> list[Episode]:
    """Two tasks of one environment, where `right` weighs 1, and two of another, where it weighs 0.25."""
    weights = {"a": 1.0, "b": 1.0, "c": 0.25, "d": 0.25}
    return [
        example_episode(f"{g}{v}", rewards=(Reward("right", float(v), w), Reward(f"own-{w}", 1.0 - v, 0.5)), group_id=g)
        for g, w in weights.items()
        for v in (0, 1)
    ]


def test_format_gate_leaves_environments_without_the_component() -> None:
    gate = {"name": "format-gate", "component": "own-1.0", "value": -1.0}
    apart = [replace(episode, env=f"{episode.group_id in 'ab'}") for episode in mixed()]
    x = Algorithm(AlgorithmConfig.model_validate({"shaping": [gate]})).experience(group_episodes(apart))
    assert x.scores.tolist() == [0.5, -1.0, 0.5, -1.0, 0.5, 0.25, 0.5, 0.25]


def test_components_keep_the_weights_of_their_environments() -> None:
    x = Experience.of(group_episodes(mixed()))
    assert sorted(zip(x.component_names, x.component_weights.tolist(), strict=True)) == [
        ("own-0.25", 0.5),
        ("own-1.0", 0.5),
        ("right", 0.25),
        ("right", 1.0),
    ]
    torch.testing.assert_close(x.components @ x.component_weights, x.scores)
    both = Algorithm(AlgorithmConfig.model_validate({"advantage": {"name": "decoupled", "whiten": "no"}}))
    advantages = [float(a[m].mean()) for a, m in zip(*rows_of(both, mixed()), strict=True)]
    # in a group of two a component's advantages are ± 1 / sqrt(2): weights 1 - .5 and .25 - .5
    expected = [-0.5, 0.5, -0.5, 0.5, 0.25, -0.25, 0.25, -0.25]
    assert advantages == pytest.approx([e / math.sqrt(2) for e in expected], abs=1e-5)


def rows_of(algorithm: Algorithm, episodes: list[Episode]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    x = algorithm.experience(group_episodes(episodes))
    weighed, _, _ = algorithm.compute_weights_in_place_order(x, scored(x.rows))
    lengths = x.rows.lengths.tolist()
    return list(weighed.advantages.split(lengths)), list(x.rows.loss_mask.split(lengths))


def test_format_gate_reads_a_component_of_any_weight() -> None:
    gate = [{"name": "format-gate", "component": "right", "value": -1.0}]
    x = Algorithm(AlgorithmConfig.model_validate({"shaping": gate})).experience(group_episodes(mixed()))
    assert x.scores.tolist() == [-1.0, 1.0, -1.0, 1.0, -1.0, 0.25, -1.0, 0.25]


def test_dynamic_sampling_judges_what_the_environment_scored() -> None:
    """A group that is all right differs by its length penalties only: DAPO, eq. 11, leaves it out."""
    algorithm = Algorithm(load("algorithm=dapo").algorithm)
    penalty = {"name": "soft-overlong", "max_length": 4, "buffer": 1, "penalty": 1.0}
    algorithm = Algorithm(algorithm.config.model_copy(update={"shaping": (penalty,)}))
    long = example_episode("long", rewards=(Reward("r", 1.0),), group_id="right")
    short = example_episode("short", rewards=(Reward("r", 1.0),), group_id="right", trajectories=())
    wrong = [example_episode(f"w{v}", rewards=(Reward("r", float(v)),), group_id="mixed") for v in (0, 1)]
    x = algorithm.experience(group_episodes([long, short, *wrong]))
    assert x.scores[0] != x.scores[1] and x.kept.tolist() == [False, False, True, True]
    assert len(ALONE) == len(set(ALONE))
