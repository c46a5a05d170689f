"""Rules of the kind json_schema, beside jsonschema."""

from __future__ import annotations

import asyncio

import pytest

from agent_rl.core.episode import Episode, Origin, Outcome, StopReason
from agent_rl.core.judgement import JudgeFault, Verdict
from agent_rl.core.messages import JSON, Message
from agent_rl.errors import ConfigError
from agent_rl.judge import rule_kinds
from agent_rl.judge.files import rubric_of
from agent_rl.judge.lint import lint
from agent_rl.judge.rules import RuleJudge

PERSON: JSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


def decide(schema: JSON, answer: str, **task: JSON) -> Verdict:
    messages, origin = (Message("user", "Who?"), Message("assistant", answer)), Origin("eval")
    episode = Episode("e", "env", task, 0, "g", origin, messages, (), (), (), StopReason.DONE, Outcome.TERMINATED)
    rubric = rubric_of([{"text": "fits", "rule": {"json_schema": schema}}])
    return asyncio.run(RuleJudge().judge(episode, rubric)).verdicts[0]


@pytest.mark.parametrize("schema", [PERSON, {"task": "fits"}])
def test_json_schema_rule_decides(schema: JSON) -> None:
    assert decide(schema, ' {"name": "Ada", "age": 36} ', fits=PERSON).value == 1.0
    for answer in ("", "{", '{"name": "ada"}', '{"age": 3}', '{"name": "A", "x": 1}', "[" * 100_000):
        assert decide(schema, answer, fits=PERSON).value == 0.0, answer


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "objekt"}, "no JSON schema: 'objekt' is not valid"),
        ({"patternProperties": {"a": {}}}, "patternProperties has no time limit"),
    ],
)
def test_json_schema_rule_refuses_wrong_schemas(schema: JSON, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        rubric_of([{"text": "fits", "rule": {"json_schema": schema}}])


def test_json_schema_rule_that_cannot_be_applied_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule_kinds, "REGEX_SECONDS", 0.2)
    slow = decide({"pattern": "(a|aa)+$"}, f'"{"a" * 60}!"')
    assert slow.error is JudgeFault.RULE and "took more than 0.2 s" in slow.detail
    elsewhere = decide({"task": "fits"}, "1", fits={"$ref": "http://127.0.0.1:1/schema.json"})
    assert elsewhere.error is JudgeFault.RULE and "no JSON schema" in elsewhere.detail


def test_lint_runs_json_schema_rules() -> None:
    assert lint(rubric_of([{"text": "fits", "rule": {"json_schema": PERSON}}])) == []
    (finding,) = lint(rubric_of([{"text": "fits", "rule": {"json_schema": PERSON, "negate": True}}]))
    assert finding.check == "empty-answer"
