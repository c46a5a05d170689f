"""Rules: when each kind is met, and when none can be decided."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

import pytest

from agent_rl.core.episode import Episode
from agent_rl.core.judgement import JudgeFault, Verdict
from agent_rl.core.messages import JSON, Message
from agent_rl.errors import ConfigError
from agent_rl.judge import rule_kinds, rules
from agent_rl.judge.files import load_rubric
from agent_rl.judge.rules import RuleJudge
from tests.doubles import example_episode


def episode_of(answer: str, **task: JSON) -> Episode:
    episode = example_episode()
    return replace(episode, messages=(*episode.messages[:-1], Message("assistant", answer)), task=task)


def decide(rule: Mapping[str, JSON], answer: str, *, view: str = "answer", **task: JSON) -> Verdict:
    rubric = load_rubric({"criteria": [{"text": "asked", "view": view, "rule": rule}]})
    (verdict,) = asyncio.run(RuleJudge().judge(episode_of(answer, **task), rubric)).verdicts
    return verdict


@pytest.mark.parametrize(
    ("rule", "met", "not_met"),
    [
        ({"exact": "Paris"}, [" Paris\n"], ["paris", "Paris."]),
        ({"exact": ["4", 5], "ignore_case": True}, ["4", "5"], ["45", ""]),
        ({"contains": "Paris"}, ["in Paris."], ["in PARIS.", ""]),
        ({"contains": ["Paris", "Lutetia"], "ignore_case": True}, ["LUTETIA"], ["Lyon"]),
        ({"contains": {"task": "city"}}, ["It is Rome."], ["It is Paris."]),
        ({"contains": {"value": {"task": "city"}, "negate": True}}, ["Paris"], ["Rome"]),
        ({"regex": r"\[\d+\]"}, ["so [12]."], ["so [a]."]),
        ({"regex": "^yes", "ignore_case": True}, ["YES"], ["oh yes"]),
        ({"invented": r"such \w+|chair"}, ["such thing", "such item, such thing", "a chair"], ["no such item", ""]),
        ({"invented": r"\[?such ite?"}, ["a such it", "such ite", "[such it"], ["such", ""]),
        ({"number": 42}, ["6 * 7 = 42", "42.0", "It is 42."], ["42 or 43", "no", "", "x42", "-42"]),
        ({"number": {"value": {"task": "n"}, "tolerance": 0.01}}, ["1,234.5", "1234.505"], ["1234.6", "1.2345e4"]),
        ({"number": -0.5, "relative": 0.1}, ["\u22120.52", "-.5"], ["-0.6", "0.5"]),
        ({"number": {"task": "text"}}, ["49"], ["4.9", "1e999"]),
    ],
)
def test_rule_decides_by_its_kind(rule: Mapping[str, JSON], met: list[str], not_met: list[str]) -> None:
    task: dict[str, JSON] = {"city": "Rome", "n": 1234.5, "text": "49"}
    for answer in met:
        verdict = decide(rule, answer, **task)
        assert (verdict.choice, verdict.value, verdict.error) == ("yes", 1.0, None), answer
    for answer in not_met:
        verdict = decide(rule, answer, **task)
        assert (verdict.choice, verdict.value, verdict.error) == ("no", 0.0, None), answer


def test_rule_over_the_transcript_reads_calls_and_results() -> None:
    for said in ("no such item", 'price({"item": "chair"})', "user: What does"):
        assert decide({"contains": said}, "49", view="transcript").value == 1.0
        assert decide({"contains": said}, "49").value == 0.0
    assert decide({"contains": "49"}, "49").evidence == "49"


@pytest.mark.parametrize(
    ("rule", "task", "why"),
    [
        ({"contains": {"task": "citty"}}, {"city": "Rome"}, "the task has no 'citty'. Did you mean 'city'?"),
        ({"contains": {"task": "city"}}, {"city": ["a", {}]}, "is no text"),
        ({"exact": {"task": "city"}}, {"city": ""}, "an empty text says nothing"),
        ({"number": {"task": "n"}}, {"n": "many"}, "'many' is no number"),
        ({"regex": {"task": "p"}}, {"p": "(a"}, "is no pattern"),
        ({"regex": r"(a|aa)+$"}, {}, "took more than 0.2 s"),
        ({"python": {"task": "expression"}}, {}, "the task has no 'expression'"),
    ],
)
def test_rule_without_an_answer_is_a_fault(
    rule: Mapping[str, JSON], task: dict[str, JSON], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule_kinds, "REGEX_SECONDS", 0.2)
    for negated in ({}, {"negate": True}):
        verdict = decide({**rule, **negated}, "a" * 60 + "!", **task)
        assert (verdict.choice, verdict.value, verdict.error) == (None, None, JudgeFault.RULE)
        assert why in verdict.detail


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ({"contain": "x"}, "no rule 'contain'. Did you mean 'contains'?"),
        ({"contains": "x", "negated": True}, "has no option 'negated'. Did you mean 'negate'?"),
        ({"contains": "x", "exact": "y"}, "one kind, this has 2"),
        ({}, "one kind, this has 0"),
        ({"contains": ""}, "an empty text"),
        ({"contains": True}, "True is no text: put it in quotes"),
        ({"contains": []}, "the list is empty"),
        ({"contains": "x", "negate": "no"}, "negate='no' is no bool"),
        ({"number": 1, "tolerance": "much"}, "tolerance='much' is no float"),
        ({"number": 1, "tolerance": -1}, "tolerance=-1 allows nothing"),
        ({"number": "x"}, "'x' is no number"),
        ({"regex": "(a"}, "is no pattern"),
        ({"regex": 3}, "is no pattern: put it in quotes"),
        ({"python": "x ="}, "is no expression"),
        ({"python": 3}, "is no expression: put it in quotes"),
        ({"json_schema": []}, "is no JSON schema: give an object"),
    ],
)
def test_wrong_rule_is_refused_when_loaded(rule: Mapping[str, JSON], why: str) -> None:
    with pytest.raises(ConfigError, match=r"criterion 1 \('asked'\)") as refused:
        load_rubric({"criteria": [{"text": "asked", "rule": rule}]})
    assert why in str(refused.value) and len(str(refused.value).splitlines()) <= 3


def test_python_rules_see_the_episode_as_plain_data() -> None:
    expressions = {
        "len(answer.split()) <= task['most']": "yes",
        "messages[2]['tool_calls'][0]['function']['name'] == 'price'": "yes",
        "re.search(r'z', answer)": "no",
        "'partly' if messages[-1]['role'] == 'assistant' else 'no'": "partly",
        "answer.nothing": "AttributeError: 'str' object has no attribute 'nothing'",
        "'maybe'": "'maybe' is none of no, partly, yes",
    }
    criteria: list[JSON] = [{"choices": ["no", "partly", "yes"], "rule": {"python": each}} for each in expressions]
    rubric = load_rubric({"criteria": criteria})
    judgement = asyncio.run(RuleJudge().judge(episode_of("two words", most=2), rubric))
    for verdict, expected in zip(judgement.verdicts, expressions.values(), strict=True):
        assert expected in (verdict.choice or verdict.detail)
    assert judgement.score is None and judgement.faults == (JudgeFault.RULE, JudgeFault.RULE)


@pytest.mark.parametrize(("said", "choice"), [("'no'", "yes"), ("'partly'", "partly"), ("True", "no")])
def test_negated_python_rule_turns_choices_round(said: str, choice: str) -> None:
    criterion: JSON = {"choices": ["no", "partly", "yes"], "rule": {"python": said, "negate": True}}
    judgement = asyncio.run(RuleJudge().judge(episode_of("x"), load_rubric({"criteria": [criterion]})))
    assert judgement.verdicts[0].choice == choice


def test_python_rule_that_never_ends_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PYTHON_SECONDS", 0.5)
    verdict = decide({"python": "[0 for _ in iter(int, 1)]"}, "x")
    assert verdict.error is JudgeFault.RULE and "it took more than 0.5 s" in verdict.detail


def test_rule_judge_judges_a_whole_rubric() -> None:
    rubric = load_rubric(
        {
            "name": "capital",
            "criteria": [
                {"text": "Names it", "weight": 2, "rule": {"contains": "Paris"}},
                {"text": "Short", "rule": {"python": "len(answer) < 20"}},
                {"text": "Swears", "weight": -1, "rule": {"regex": "damn"}},
            ],
        }
    )
    assert not rubric.needs_model
    judgement = asyncio.run(RuleJudge().judge(episode_of("Paris, damn it, it is Paris"), rubric))
    assert [v.choice for v in judgement.verdicts] == ["yes", "no", "yes"]
    assert judgement.score == pytest.approx(1 / 3)
    assert (judgement.rubric, judgement.judge, judgement.episode) == (rubric.label, "rules", "e0")


def test_rules_leave_other_criteria_to_a_model() -> None:
    rubric = load_rubric({"name": "mixed", "criteria": ["Is kind", {"rule": {"contains": "x"}}]})
    assert rubric.needs_model and [c.id for c in rubric.criteria] == ["is-kind", "contains-x"]
    assert list(asyncio.run(rules.verdicts(episode_of("x"), rubric))) == ["contains-x"]
    with pytest.raises(ConfigError, match="'is-kind' has no rule"):
        asyncio.run(RuleJudge().judge(episode_of("x"), rubric))
