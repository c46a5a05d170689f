"""Agreement of judges with labels, and with each other: reference numbers, intervals, label files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agent_rl.core.judgement import JudgeFault, Judgement, Verdict
from agent_rl.errors import ConfigError
from agent_rl.judge import coefficients as co
from agent_rl.judge.agreement import Agreement, AgreementReport, agree
from agent_rl.judge.compare import compare_judgements
from agent_rl.judge.labels import Label, read_labels
from agent_rl.judge.rubric import Criterion, Rubric
from agent_rl.judge.score import score
from agent_rl.seeds import Stream, rng

A, B = [1, 1, 0, 0, 1, 0, 1, 1, 0, 1], [1, 0, 0, 0, 1, 0, 1, 1, 1, 1]

GAP = -1
KRIPPENDORFF = [  # 2011, table C: four raters, twelve units, gaps
    [1, 2, 3, 3, 2, 1, 4, 1, 2, GAP, GAP, GAP],
    [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, GAP, 3],
    [GAP, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, GAP],
    [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, GAP],
]


@pytest.mark.parametrize(("level", "alpha"), [("nominal", 0.7434), ("ordinal", 0.8154), ("interval", 0.8491)])
def test_krippendorff_alpha_has_the_published_values(level: co.Level, alpha: float) -> None:
    units = [[rating - 1 for rating in unit if rating != GAP] for unit in zip(*KRIPPENDORFF, strict=True)]
    assert co.krippendorff_alpha(co.coincidences(units, 5), level) == pytest.approx(alpha, abs=5e-5)


def test_coefficients_have_their_reference_values() -> None:
    table = co.confusion(A, B, 2)  # 3 and 1, 1 and 5
    assert co.kappa(table) == pytest.approx(0.5833, abs=5e-5)
    assert co.accuracy(table) == pytest.approx(0.8)
    assert co.recalls(table) == pytest.approx([3 / 4, 5 / 6])
    assert co.balanced_accuracy(table) == pytest.approx((3 / 4 + 5 / 6) / 2)
    assert co.mcc(table) == pytest.approx((5 * 3 - 1 * 1) / math.sqrt(6 * 6 * 4 * 4))
    assert co.macro_f1(table) == pytest.approx((3 / 4 + 5 / 6) / 2)
    three = co.confusion([0, 1, 2, 2], [0, 2, 2, 1], 3)
    assert co.kappa(three) == pytest.approx(1 - 2 * 4 / 22)  # n times the squared steps seen, over those of chance
    assert np.isnan(co.kappa(co.confusion([1, 1], [1, 1], 2)))
    assert co.spearman([1, 2, 3, 4], [1, 4, 9, 16]) == pytest.approx(1)
    assert co.spearman([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486833)
    assert math.isnan(co.spearman([1, 1], [1, 2]))


def test_corrected_pass_rate_inverts_the_judges_errors() -> None:
    assert co.corrected_pass_rate(0.3 * 0.8 + 0.7 * 0.1, tpr=0.8, tnr=0.9) == pytest.approx(0.3)
    assert co.corrected_pass_rate(0.05, tpr=0.8, tnr=0.9) == 0.0
    for tpr, tnr in ((0.5, 0.5), (0.4, 0.3), (math.nan, 1.0)):
        with pytest.raises(ConfigError, match="at chance"):
            co.corrected_pass_rate(0.5, tpr, tnr)


RUBRIC = Rubric("r", (Criterion("right", "It is right."), Criterion("cited", "It cites.", 2.0)))
GRADED = Rubric("g", (*RUBRIC.criteria, Criterion("depth", "How deep?", choices=("none", "some", "full"))))


def judged(episode: str, rubric: Rubric, *choices: str | None, judge: str = "j") -> Judgement:
    """Return a judgement by the choices of the rubric's criteria, in order; None is a server's failure."""
    verdicts = tuple(
        Verdict(c.id, error=JudgeFault.SERVER) if choice is None else Verdict(c.id, choice, c.value_of(choice))
        for c, choice in zip(rubric.criteria, choices, strict=True)
    )
    return Judgement(rubric.label, judge, verdicts, score(rubric, verdicts), episode)


def noisy_report(tpr: float, tnr: float, *, seed: int = 0, labelled: int = 300) -> AgreementReport:
    """Return the report of a judge of known errors on 1,000 episodes with a true pass rate of 0.3."""
    random = rng(Stream.COMPARISON, 9, seed)
    truth = random.random((1000, 2)) < 0.3
    passed = random.random((1000, 2)) < np.where(truth, tpr, 1 - tnr)
    word = ("no", "yes")
    judgements = [judged(f"e{i}", RUBRIC, *(word[int(x)] for x in row)) for i, row in enumerate(passed)]
    labels = [
        Label(f"e{i}", c.id, word[int(x)])
        for i, row in enumerate(truth[:labelled])
        for c, x in zip(RUBRIC.criteria, row, strict=True)
    ]
    return agree(judgements, labels, RUBRIC)


def holds(row: Agreement, name: str, value: float) -> bool:
    """Whether the interval of a metric has the value."""
    found = row.metrics[name]
    assert found.low <= found.value <= found.high
    return found.low <= value <= found.high


def test_noisy_judges_rates_are_recovered() -> None:
    report = noisy_report(0.85, 0.7)
    for row in (report.total, *report.criteria):
        assert holds(row, "tpr", 0.85)
        assert holds(row, "tnr", 0.7)
        assert holds(row, "corrected_pass_rate", 0.3)
        assert not holds(row, "pass_rate", 0.3)  # what the judge itself says is far off: 0.465
        assert holds(row, "balanced_accuracy", 0.775)
    assert report.total.n == 600
    assert report.total.episodes == 300


def test_corrected_pass_rate_of_a_guess_is_unknown() -> None:
    report = noisy_report(0.5, 0.4)
    assert math.isnan(report.total.metrics["corrected_pass_rate"].value)
    assert str(report.total.metrics["corrected_pass_rate"]) == "unknown"


def test_intervals_resample_episodes_and_not_verdicts() -> None:
    rubric = Rubric("w", tuple(Criterion(f"c{i}", "?") for i in range(20)))
    word = ("no", "yes")
    found = [judged(f"e{i}", rubric, *[word[i % 4 > 0]] * 20) for i in range(40)]
    labels = [Label(f"e{i}", c.id, "yes") for i in range(40) for c in rubric.criteria]
    report = agree(found, labels, rubric)  # twenty verdicts of an episode that are one: no more is known of the judge
    assert report.total.metrics["accuracy"] == report.criteria[0].metrics["accuracy"]
    assert report.total.metrics["accuracy"].high - report.total.metrics["accuracy"].low > 0.2


def test_intervals_resample_tasks_and_not_their_samples() -> None:
    word, other = ("no", "yes"), ("yes", "no")
    tasks = {f"{task}-{sample}": f"t{task}" for task in range(6) for sample in range(8)}
    once = [judged(f"{task}-0", RUBRIC, word[task % 2], "yes") for task in range(6)]
    found = [replace(once[int(task[1:])], episode=id) for id, task in tasks.items()]
    labels = [Label(id, "right", "yes") for id in tasks]
    row = agree(found, labels, RUBRIC, tasks=tasks).criteria[0]
    alone = agree(once, [Label(each.episode, "right", "yes") for each in once], RUBRIC).criteria[0]
    assert (row.metrics["accuracy"], row.n) == (alone.metrics["accuracy"], 48)  # samples that are one say no more
    second = [judged(id, RUBRIC, other[int(task[1:]) % 3 == 0], "yes") for id, task in tasks.items()]
    apart = compare_judgements(found, second, tasks).score.difference
    few = compare_judgements(once, [second[8 * task] for task in range(6)]).score.difference
    assert (apart.low, apart.high) == pytest.approx((few.low, few.high))
    single = agree(found, labels, RUBRIC, tasks=dict.fromkeys(tasks, "t")).criteria[0].metrics["accuracy"]
    assert single.value == 0.5 and math.isnan(single.low) and str(single) == "0.500"


def test_agreement_reports_unscored_verdicts_beside() -> None:
    found = [
        judged("e0", GRADED, "yes", "yes", "full"),
        judged("e1", GRADED, None, "no", "some"),
        judged("e2", GRADED, "no", None, "none"),
        Judgement(GRADED.label, "j", (), None, "e3"),
    ]
    labels = [
        *(Label(f"e{i}", "right", said) for i, said in enumerate(["1", "no", "TRUE", "yes"])),
        *(Label("e1", "cited", said, rater) for said, rater in (("yes", "a"), ("no", "b"))),
        *(Label(f"e{i}", "depth", said) for i, said in enumerate(["Full", "full", "not_applicable"])),
        *(Label("e9", "right", "yes"), Label("e0", "wrong", "?"), Label("e0", "wrong", "!")),
    ]
    report = agree(found, labels, GRADED, {"e0": "a", "e1": "b", "e2": "a"})
    right, cited, depth = report.criteria
    assert (right.n, dict(right.unscored)) == (2, {"server": 1, "missing": 1})
    assert right.metrics["accuracy"].value == 0.5
    assert (cited.n, cited.tied) == (0, 1)
    assert math.isnan(cited.metrics["kappa"].value)
    assert (depth.n, depth.not_applicable) == (2, 1)
    assert report.total.choices == ("fail", "pass")  # "some" is worth no more than half
    assert (report.total.n, report.total.metrics["accuracy"].value) == (4, 0.5)
    assert report.total.metrics["pass_rate"].value == pytest.approx(3 / 7)
    assert report.families == {"a": pytest.approx(-1 / 3), "b": -0.5}
    assert report.unknown_episodes == {"e9": 1}
    assert report.unknown_criteria == {"wrong": 2}
    assert report.raters == ("", "a", "b")


def test_alpha_counts_raters_with_and_without_the_judge() -> None:
    found = [judged(f"e{i}", RUBRIC, "yes" if i % 2 else "no", "no") for i in range(10)]
    labels = [
        Label(f"e{i}", "right", "yes" if i % 2 else "no", rater)
        for i in range(10)
        for rater in ("a", "b")
        if i or rater == "a"
    ]
    labels[3] = Label("e2", "right", "yes", "a")  # b and the judge say no: they are tied, and alpha sees it
    row = agree(found, labels, RUBRIC).criteria[0]
    assert (row.n, row.tied) == (9, 1)
    assert row.metrics["rater_alpha"].value < row.metrics["alpha"].value < 1


def test_family_bias_is_the_range_of_mean_errors() -> None:
    kinder = [judged(f"e{i}", RUBRIC, "yes" if i < 60 or i % 2 else "no", "no") for i in range(100)]
    labels = [Label(f"e{i}", "right", "yes" if i % 2 else "no", family="x" if i < 60 else "y") for i in range(100)]
    report = agree(kinder, labels, RUBRIC)
    assert report.families == {"x": 0.5, "y": 0.0}
    assert holds(report.total, "family_bias", 0.5)
    assert report.total.metrics["family_bias"].value == 0.5


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("episode,criterion_id,label\n", "no column 'episode_id'. Did you mean 'episode'?"),
        ("episode_id,criterion_id,label\ne0,right,yes\ne1,right,\n", r"csv:3: label is empty"),
        ("episode_id,criterion_id,label\ne0,right\n", r"csv:2: label is empty"),
        ("episode_id,criterion_id,label\ne0,right,yes\ne0,right,no\n", r"csv:3: .*'no'.*see .*csv:2"),
        ("episode_id,criterion_id,label\ne0,right,maybe\n", r"csv:2: label 'maybe' .* no, yes"),
        ("episode_id,criterion_id,label\ne0,right,yes,\ne1,right,yes, mostly\n", r"csv:3: .*mostly.* is in no column"),
        ("episode_id,criterion_id,label\ne7,right,yes\n", "none of 1 labels is of an episode .* e7, judged e0"),
    ],
)
def test_label_files_errors_name_the_line_and_value(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "labels.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        agree([judged("e0", RUBRIC, "yes", "no")], read_labels(file), RUBRIC)


def test_label_files_pass_over_spaces_around_values(tmp_path: Path) -> None:
    file = tmp_path / "labels.csv"
    file.write_text("episode_id,criterion_id,label,rater,family\ne,c,1,Ann,m\ne,d,1, Ann, m\n")
    assert {(label.rater, label.family) for label in read_labels(file)} == {("Ann", "m")}


def test_agreement_refuses_what_does_not_fit() -> None:
    one = judged("e0", RUBRIC, "yes", "no")
    with pytest.raises(ConfigError, match="'e0' is judged twice"):
        agree([one, one], [Label("e0", "right", "yes")], RUBRIC)
    other = Rubric("r", (Criterion("right", "?", choices=("bad", "good")),))
    with pytest.raises(ConfigError, match="'yes' under criterion 'right', which has bad, good"):
        agree([one], [Label("e0", "right", "bad")], other)


def test_comparison_of_judgements_pairs_episodes() -> None:
    first = [judged(f"e{i}", GRADED, "yes", "no" if i % 2 else "yes", "some") for i in range(20)]
    second = [judged(f"e{i}", GRADED, "yes", "no" if i % 2 else "yes", "full", judge="k") for i in range(2, 24)]
    second[0] = judged("e2", GRADED, "no", "no", "none", judge="k")
    second[1] = judged("e3", GRADED, None, "no", "full", judge="k")
    found = compare_judgements(first, second)
    assert (found.episodes, found.only_first, found.only_second) == (18, 2, 4)
    right, cited, depth = found.criteria
    assert (right.n, right.second_unscored, right.same) == (17, 1, pytest.approx(16 / 17))
    assert 0.8 < cited.kappa < 1
    assert depth.difference.low <= depth.difference.value <= depth.difference.high
    assert depth.difference.value == pytest.approx((17 * 0.5 - 0.5) / 18)
    assert (found.score.n, found.score.second_unscored) == (17, 1)
    assert found.score.rank_correlation > 0.5
    assert found.largest_scores[0].episode == "e2"
    assert {each.criterion for each in found.largest_verdicts[:2]} == {"right", "cited"}
    with pytest.raises(ConfigError, match="no episode in common"):
        compare_judgements(first[:2], second[:2])
