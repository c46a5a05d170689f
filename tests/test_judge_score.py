"""The score: the table of published aggregators, and what holds for any rubric and any verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.core.judgement import JudgeFault, Verdict
from agent_rl.errors import ConfigError
from agent_rl.judge.rubric import Criterion, Normalize, Rubric
from agent_rl.judge.score import score

WEIGHTS = (2.0, 1.0, 1.0, -1.0, -3.0)
PERFECT, NOTHING, WORST = (1, 1, 1, 0, 0), (0, 0, 0, 0, 0), (0, 0, 0, 1, 1)


def rubric_of(weights: Sequence[float], normalize: Normalize = "positive") -> Rubric:
    return Rubric("r", tuple(Criterion(f"c{n}", "asked", weight=w) for n, w in enumerate(weights)), normalize=normalize)


def verdicts_of(rubric: Rubric, values: Sequence[float]) -> list[Verdict]:
    return [Verdict(c.id, "", float(value)) for c, value in zip(rubric.criteria, values, strict=True)]


@pytest.mark.parametrize(
    ("normalize", "values", "expected"),
    [
        ("positive", PERFECT, 1.0),
        ("absolute", PERFECT, 0.5),
        ("none", PERFECT, 4.0),
        *((normalize, NOTHING, 0.0) for normalize in ("positive", "absolute", "none")),
        ("positive", WORST, -1.0),
        ("absolute", WORST, -0.5),
        ("none", WORST, -4.0),
    ],
)
def test_score_is_that_of_each_normaliser(normalize: Normalize, values: Sequence[float], expected: float) -> None:
    rubric = rubric_of(WEIGHTS, normalize)
    assert score(rubric, verdicts_of(rubric, values)) == expected


def test_rubric_refuses_weights_with_an_infinite_sum() -> None:
    for weights in ([1e308, 1e308], [1e308, -1e308]):
        with pytest.raises(ConfigError, match="'r' has weights with an infinite sum"):
            rubric_of(weights)
    assert rubric_of([1e307, 1e307]).criteria


def test_score_of_small_weights_is_normalised() -> None:
    rubric = rubric_of((0.2, 0.2))
    assert score(rubric, verdicts_of(rubric, (1, 1))) == 1.0, "DR Tulu's max(sum, 1) gives 0.4"


def test_failed_negative_criterion_leaves_no_score() -> None:
    rubric = rubric_of(WEIGHTS)
    for normalize in ("positive", "absolute", "none"):
        judged = verdicts_of(rubric, PERFECT)
        judged[4] = Verdict("c4", error=JudgeFault.TIMEOUT)
        assert score(replace(rubric, normalize=normalize), judged) is None


def test_score_multiplies_gates_and_leaves_out_what_does_not_apply() -> None:
    gated = Rubric("r", (*rubric_of((2, 1)).criteria, Criterion("gate", "Answers", gate=True)), clip=(0.0, 0.5))
    assert score(gated, verdicts_of(gated, (1, 1, 0))) == 0.0
    assert score(gated, verdicts_of(gated, (1, 1, 1))) == 0.5, "clipped"
    assert score(gated, verdicts_of(gated, (0, 1, 0.75))) == 0.25
    judged = [Verdict("c0", is_applicable=False), *verdicts_of(gated, (0, 0.25, 1))[1:]]
    assert score(gated, judged) == 0.25
    assert score(gated, [Verdict("c0", is_applicable=False), Verdict("c1", is_applicable=False), judged[2]]) is None


RUBRICS = st.lists(st.floats(-5, 5).filter(lambda w: abs(w) > 1e-3), min_size=1, max_size=6).flatmap(
    lambda weights: st.builds(rubric_of, st.just([2.0, *weights]), st.sampled_from(["positive", "absolute", "none"]))
)


@st.composite
def judged(draw: st.DrawFn) -> tuple[Rubric, list[Verdict]]:
    """Any rubric, some with gates, and verdicts of all its criteria."""
    rubric = draw(RUBRICS)
    gates = draw(st.lists(st.booleans(), min_size=len(rubric.criteria), max_size=len(rubric.criteria)))
    criteria = [
        replace(c, gate=gate and c.weight > 0 and n > 0)
        for n, (c, gate) in enumerate(zip(rubric.criteria, gates, strict=True))
    ]
    values = draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=len(criteria), max_size=len(criteria)))
    rubric = replace(rubric, criteria=tuple(criteria))
    return rubric, verdicts_of(rubric, values)


@given(judged(), st.randoms())
def test_score_does_not_depend_on_order(case: tuple[Rubric, list[Verdict]], random: st.DataObject) -> None:
    rubric, verdicts = case
    criteria = list(rubric.criteria)
    for each in (criteria, verdicts):
        random.shuffle(each)  # type: ignore[attr-defined]
    assert score(replace(rubric, criteria=tuple(criteria)), verdicts) == pytest.approx(score(rubric, verdicts))


@given(judged(), st.floats(0.1, 10))
def test_score_keeps_its_rubrics_digest_under_other_weights(case: tuple[Rubric, list[Verdict]], factor: float) -> None:
    rubric, verdicts = case
    heavier = replace(rubric, criteria=tuple(replace(c, weight=c.weight * factor) for c in rubric.criteria))
    assert heavier.digest == rubric.digest, "the verdicts are those of the log"
    expected = score(rubric, verdicts)
    if rubric.normalize != "none" and expected is not None:
        assert score(heavier, verdicts) == pytest.approx(expected), "a common factor changes no normalised score"


@given(judged(), st.floats(-5, -0.1))
def test_fault_that_is_never_met_changes_no_score(case: tuple[Rubric, list[Verdict]], weight: float) -> None:
    rubric, verdicts = case
    if rubric.normalize == "absolute":
        rubric = replace(rubric, normalize="positive")
    longer = replace(rubric, criteria=(*rubric.criteria, Criterion("fault", "Lies", weight=weight)))
    assert score(longer, [*verdicts, Verdict("fault", "no", 0.0)]) == score(rubric, verdicts)


@given(judged(), st.data())
def test_score_is_none_without_any_of_its_verdicts(case: tuple[Rubric, list[Verdict]], data: st.DataObject) -> None:
    rubric, verdicts = case
    place = data.draw(st.integers(0, len(verdicts) - 1))
    failed = replace(verdicts[place], choice=None, value=None, error=JudgeFault.SERVER)
    assert score(rubric, [*verdicts[:place], *verdicts[place + 1 :]]) is None
    assert score(rubric, [*verdicts[:place], failed, *verdicts[place + 1 :]]) is None
