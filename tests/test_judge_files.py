"""Rubric files: ours, those of other projects, and the scores that those projects give."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_rl.core.judgement import Verdict
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.judge.files import dump_rubric, load_rubric, load_rubrics, rubric_of, save_rubric
from agent_rl.judge.rubric import Criterion, Rubric
from agent_rl.judge.score import score

DATA = Path(__file__).parent / "data" / "rubrics"


def judged(rubric: Rubric, values: Sequence[float]) -> float | None:
    return score(rubric, [Verdict(c.id, "a choice", v) for c, v in zip(rubric.criteria, values, strict=True)])


def lines(name: str) -> list[Any]:
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


# --- ours ---


def test_load_rubric_reads_our_file() -> None:
    rubric = load_rubric(DATA / "ours.yaml")
    assert (rubric.name, rubric.version, rubric.normalize) == ("capital", "2", "positive")
    ids = ["names-paris", "how-polite-is-it", "gives-a-source", "invented", "answers-at-all"]
    assert [c.id for c in rubric.criteria] == ids
    assert rubric.criteria[1].choices == ("no", "somewhat", "yes"), "YAML reads no and yes as booleans"
    assert [c.weight for c in rubric.criteria] == [2, 1, 1, -1.5, 1]
    assert rubric.criteria[4].gate and rubric.criteria[3].view == "transcript"


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize("file", ["ours.yaml", "verifiers.json", "paperbench.json"])
def test_saved_rubric_is_read_back(file: str, suffix: str, tmp_path: Path) -> None:
    rubric = load_rubric(DATA / file)
    save_rubric(rubric, tmp_path / f"again{suffix}")
    again = load_rubric(tmp_path / f"again{suffix}")
    assert again == rubric and again.digest == rubric.digest
    assert rubric_of(json.dumps(dump_rubric(rubric))) == rubric


TEXTS = st.text(min_size=1, max_size=12).filter(str.strip)
CRITERIA = st.builds(
    Criterion,
    id=TEXTS,
    text=TEXTS,
    weight=st.floats(-5, 5).filter(bool),
    choices=st.lists(TEXTS, min_size=2, max_size=4, unique=True).map(tuple),
    view=st.sampled_from(["answer", "transcript"]),
    may_be_na=st.booleans(),
    tags=st.lists(TEXTS, max_size=2).map(tuple),
)


@given(st.lists(CRITERIA, min_size=1, max_size=4, unique_by=lambda c: c.id))
def test_dumped_rubric_is_read_back(criteria: list[Criterion]) -> None:
    from yaml import safe_dump, safe_load  # type: ignore[import-untyped]

    rubric = Rubric("any", tuple(criteria), normalize="none")
    assert load_rubric(safe_load(safe_dump(dump_rubric(rubric)))) == rubric


def test_criteria_without_ids_keep_theirs_when_others_are_added() -> None:
    texts: list[JSON] = ["Names Paris.", "Is short.", "Names Paris.", "?"]
    assert [c.id for c in rubric_of(texts).criteria] == ["names-paris", "is-short", "names-paris-2", "criterion-4"]
    assert [c.id for c in rubric_of(["New.", *texts[:2]]).criteria] == ["new", "names-paris", "is-short"]
    mixed: list[JSON] = ["Is short.", {"id": "is-short", "text": "Has an id"}]
    assert [c.id for c in rubric_of(mixed).criteria] == ["is-short-2", "is-short"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "criteria:\n- text: Names Paris\n  wieght: 2",
            "criterion 1 ('Names Paris') has no key 'wieght'. Did you mean",
        ),
        ("criterias: []", "the rubric has no key 'criterias'. Did you mean 'criteria'?"),
        ("name: x", "the rubric has no 'criteria': write a list of criteria"),
        ("criteria: []", "rubric 'r' has no criteria"),
        ("criteria:\n- text: a\n- weight: 2", "criterion 2: it has no text"),
        ("criteria:\n- text: a\n  weight: 0", "criterion 1 ('a'): criterion 'a' has weight=0"),
        ("criteria:\n- text: a\n  weight: .nan", "give a finite number"),
        ("criteria:\n- text: a\n  weight: much", "criterion 1 ('a'): weight='much'"),
        ("criteria:\n- text: a\n  view: answers", "criterion 1 ('a'): view='answers'"),
        ("criteria:\n- {id: a, text: x}\n- {id: a, text: y}", "two criteria with the id 'a'"),
        ("criteria:\n- text: a\n  weight: -1", "no positive weight to divide by: set normalize to absolute"),
        ("normalize: mean\ncriteria: [a]", "the rubric: normalize='mean'"),
        ("normalize: none\ncriteria:\n- {text: a, gate: true}", "has gates only"),
        ("clip: [1, 0]\ncriteria: [a]", "has clip=[1.0, 0.0]: give the least score, then the most"),
        ("criteria: [a]\ncriteria: [b]", "can't be read: it has the key 'criteria' twice"),
        ("criteria: [{text: a, weight: 2, weight: 3}]", "it has the key 'weight' twice in one place"),
        ("criteria: [a", "can't be read"),
        ("just a text", "no rubric in JSON"),
        ("7", "7 is no rubric"),
    ],
)
def test_load_rubric_names_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_rubric(file)
    message = str(refused.value)
    assert said in message and str(file) in message and len(message.splitlines()) <= 3


def test_load_rubric_names_files_that_are_none(tmp_path: Path) -> None:
    for path, said in (("nowhere.yaml", "No such file"), ("rubric.txt", "ends in .yaml, .yml, .json, .jsonl, .toml")):
        with pytest.raises(ConfigError, match=said):
            load_rubric(tmp_path / path)
    with pytest.raises(ConfigError, match="give load_rubrics the file"):
        load_rubric(DATA / "healthbench.jsonl")
    with pytest.raises(ConfigError, match=r"is no \.jsonl file: give load_rubric"):
        load_rubrics(DATA / "ours.yaml")
    twice = tmp_path / "twice.jsonl"
    twice.write_text('{"id": 1, "criteria": ["a"]}\n' * 2)
    with pytest.raises(ConfigError, match="row 1: the rubric has no key 'id'"):
        load_rubrics(twice)
    twice.write_text('{"id": 1, "rubrics": [{"criterion": "a", "points": 1}]}\n' * 2)
    with pytest.raises(ConfigError, match="two rows have the id '1'"):
        load_rubrics(twice)
    twice.write_text('{"criteria": ["a"], "criteria": ["b"]}')
    with pytest.raises(ConfigError, match="it has the key 'criteria' twice in one place: write it once"):
        load_rubrics(twice)


# --- other projects: our score is theirs, on any verdicts ---


def test_healthbench_rows_are_read_by_prompt() -> None:
    rows, rubrics = lines("healthbench.jsonl"), load_rubrics(DATA / "healthbench.jsonl")
    assert list(rubrics) == [row["prompt_id"] for row in rows]
    first = rubrics[rows[0]["prompt_id"]]
    assert first.normalize == "positive" and first.criteria[0].tags == ("level:example", "axis:completeness")
    assert rubric_of(rows[0]["rubrics"]).criteria == first.criteria, "a task may hold the list alone"


@given(st.data())
def test_healthbench_score_is_its_own(data: st.DataObject) -> None:
    for row in lines("healthbench.jsonl"):
        items = row["rubrics"]
        met = data.draw(st.lists(st.booleans(), min_size=len(items), max_size=len(items)))
        achieved = sum(item["points"] for item, is_met in zip(items, met, strict=True) if is_met)
        theirs = achieved / sum(item["points"] for item in items if item["points"] > 0)
        assert judged(rubric_of(row), [float(is_met) for is_met in met]) == pytest.approx(theirs)


@given(st.data())
def test_open_instruct_score_is_its_own(data: st.DataObject) -> None:
    for row in lines("open_instruct.jsonl"):
        found = json.loads(row["ground_truth"])
        weights = [item["weight"] for item in found["rubrics"]]
        given = data.draw(st.lists(st.sampled_from([0, 1, 2]), min_size=len(weights), max_size=len(weights)))
        scores = [each / 2 for each in given]
        rubric = rubric_of(row)
        values = [c.value_of(("no", "partly", "yes")[each]) for c, each in zip(rubric.criteria, given, strict=True)]
        weighed = sum(s * w for s, w in zip(scores, weights, strict=True))
        assert judged(rubric, values) == pytest.approx(weighed / sum(map(abs, weights)))
        if (positive := sum(w for w in weights if w > 0)) >= 1:
            dr_tulu = rubric_of({**found, "normalize": "positive"})
            assert judged(dr_tulu, values) == pytest.approx(weighed / max(positive, 1.0))


def test_open_instruct_items_have_title_text_and_type() -> None:
    heat, tides = load_rubrics(DATA / "open_instruct.jsonl").values()
    assert heat.criteria[0].text.startswith("Refrigerant cycle: Explains that")
    assert [c.tags for c in heat.criteria] == [("persistent",)] * 4 + [("evolving",)]
    assert [c.text[:8] for c in tides.criteria] == ["Explains", "Says tha"]
    row = lines("open_instruct.jsonl")[1]
    assert rubric_of({"ground_truth": [row["ground_truth"]]}, "tides") == tides


def test_published_aggregators_differ_on_perfect_answers() -> None:
    """The three traps: the normaliser, a failed call on a negative criterion, and DR Tulu's max(sum, 1)."""
    heat, tides = (json.loads(row["ground_truth"]) for row in lines("open_instruct.jsonl"))
    perfect = [1.0, 1.0, 1.0, 0.0, 0.0]
    assert judged(rubric_of(heat), perfect) == 0.5
    positive = rubric_of({**heat, "normalize": "positive"})
    assert judged(positive, perfect) == 1.0
    failed = [Verdict(c.id, "yes", 1.0) for c in positive.criteria[:4]] + [Verdict("invented-citation")]
    assert score(positive, failed) is None, "a judge that failed does not say that there is no fault"
    assert judged(rubric_of({**tides, "normalize": "positive"}), [1.0, 1.0]) == 1.0, "0.4 by max(sum, 1)"


@given(st.data())
def test_verifiers_score_is_its_own(data: st.DataObject) -> None:
    items = json.loads((DATA / "verifiers.json").read_text())["criteria"]
    rubric = load_rubric(DATA / "verifiers.json")
    assert [c.id for c in rubric.criteria] == ["resolves", "readability", "tests"], "style has no weight"
    picks = [data.draw(st.sampled_from(item.get("choices", ["no", "yes"]))) for item in items]
    total = theirs = 0.0
    for item, pick in zip(items, picks, strict=True):
        choices = item.get("choices", ["no", "yes"])
        theirs += item.get("weight", 1.0) * choices.index(pick) / (len(choices) - 1)
        total += item.get("weight", 1.0)
    values = [c.value_of(pick) for c, pick in zip(rubric.criteria, picks, strict=False)]
    assert judged(rubric, values) == pytest.approx(theirs / total)
    assert all(c.view == "transcript" for c in rubric.criteria)


def tree_score(node: Mapping[str, Any], leaves: Mapping[str, float]) -> float:
    if not node["sub_tasks"]:
        return leaves[node["id"]]
    total = sum(child["weight"] for child in node["sub_tasks"])
    return sum(tree_score(child, leaves) * child["weight"] for child in node["sub_tasks"]) / total if total else 0.0


@st.composite
def trees(draw: st.DrawFn) -> dict[str, JSON]:
    """Any tree with a leaf that counts."""
    numbers = iter(range(10**6))

    def node(depth: int, weight: int) -> dict[str, JSON]:
        weights = draw(st.lists(st.integers(0, 3), max_size=3)) if depth else []
        children: list[JSON] = [node(depth - 1, each) for each in weights if any(weights)]
        number = next(numbers)
        return {
            **{"id": f"n{number}", "requirements": f"Requirement {number}.", "weight": weight, "sub_tasks": children},
            **{"task_category": None if children else "Code Development", "finegrained_task_category": None},
        }

    return node(3, 1)


@given(st.one_of(trees(), st.just(json.loads((DATA / "paperbench.json").read_text()))), st.data())
def test_paperbench_score_is_the_trees(tree: dict[str, JSON], data: st.DataObject) -> None:
    logging.disable(logging.WARNING)
    try:
        rubric = rubric_of(tree)
    finally:
        logging.disable(logging.NOTSET)
    assert sum(c.weight for c in rubric.criteria) == pytest.approx(1.0)
    values = {c.id: float(data.draw(st.booleans())) for c in rubric.criteria}
    leaves = {id: values.get(id, 1.0) for id in leaf_ids(tree)}
    assert judged(rubric, list(values.values())) == pytest.approx(tree_score(tree, leaves))


def leaf_ids(node: Mapping[str, JSON]) -> list[str]:
    children = cast("Sequence[Mapping[str, JSON]]", node["sub_tasks"])
    return [id for child in children for id in leaf_ids(child)] if children else [str(node["id"])]


def test_paperbench_leaves_without_weight_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    rubric = load_rubric(DATA / "paperbench.json")
    weights = {c.id: c.weight for c in rubric.criteria}
    assert weights == pytest.approx({"mask": 0.4, "schedule": 0.2, "train": 0.08, "order": 0.16, "gap": 0.16})
    assert "2 criteria without weight are left out: optional; ablation" in caplog.text
    assert rubric.criteria[3].text.endswith("(Part of: The paper's core contributions are reproduced. / "
                                            "The experiments were run. / Table 2 is reproduced.)")  # fmt: skip
    assert rubric.criteria[3].tags == ("Result Analysis",)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([{"criterion": "a", "points": 0}], "no criterion of this HealthBench rubric has a weight"),
        ({"criteria": [{"name": "a", "text": "b", "weight": -1}]}, "criterion 'a' has weight=-1"),
        ({"criteria": [{"name": "a", "text": "b", "weight": "-1"}]}, "criterion 'a' has weight='-1'"),
        ({"requirements": "r", "sub_tasks": [{"id": "x", "requirements": "s"}]}, "node 'x' has weight=None"),
        ({"requirements": "r", "sub_tasks": [{"id": "x", "weight": 1}], "id": "r"}, "has no requirements"),
        ([{"criterion": "a", "points": -1}], "no positive weight to divide by"),
        ({"criteria": [{"name": "a", "text": "b", "rule": {"contains": "x"}}]}, "has no key 'name'"),
        ({"rubrics": "x"}, "the rubric has no"),
    ],
)
def test_foreign_rubrics_say_what_is_wrong(value: JSON, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        rubric_of(value)


def test_load_rubrics_keeps_separators_in_a_text(tmp_path: Path) -> None:
    text, file = "Is a line.\u2028Or two.\x85", tmp_path / "a.jsonl"
    file.write_text(json.dumps({"criteria": [text]}, ensure_ascii=False) + "\n", encoding="utf-8-sig")
    assert load_rubrics(file)["0"].criteria[0].text == text
