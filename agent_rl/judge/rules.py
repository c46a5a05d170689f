"""Rules: criteria that are decided without a model; `agent_rl.judge.rule_kinds` has the kinds.

What can't be decided is `JudgeFault.RULE`, never a grade.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import cast

from agent_rl.core.episode import Episode
from agent_rl.core.judgement import JudgeFault, Judgement, Verdict
from agent_rl.core.messages import JSON, Message, Task
from agent_rl.errors import SandboxError, did_you_mean
from agent_rl.judge.rubric import Criterion, Rubric, Rule, View
from agent_rl.judge.rule_kinds import KINDS, UndecidedError, describe_rule, task_reference
from agent_rl.judge.score import score
from agent_rl.rendering.chat_format import message_dict
from agent_rl.sandboxes.grading import CallError, call
from agent_rl.sandboxes.registry import shared_backend
from agent_rl.worker_threads import in_thread

PYTHON_SECONDS = 10.0
"""For all expressions of a rubric over one episode."""
_EVALUATE = b"""
import json, math, re


def evaluate(expressions, answer, task, messages):
    results = []
    for expression in expressions:
        try:
            value = eval(expression, {"answer": answer, "task": task, "messages": messages, "json": json, "math": math, "re": re})
            results.append([value if isinstance(value, str) else bool(value), ""])
        except Exception as error:
            results.append([None, f"{type(error).__name__}: {error}"])
    return results
"""  # noqa: E501


class RuleJudge:
    """Judges by rules alone: a rubric whose criteria all have one."""

    name = "rules"

    def __init__(self, sandbox: str = "local", sandbox_args: Mapping[str, JSON] | None = None) -> None:
        """Choose the backend of `python` rules; it opens a sandbox when there is one to evaluate."""
        self._sandbox, self._sandbox_args = sandbox, sandbox_args or {}

    async def judge(self, episode: Episode, rubric: Rubric) -> Judgement:
        """Return the judgement.

        Raises:
            ConfigError: if a criterion has no rule.
        """
        started = time.monotonic()
        rubric.require_rules()
        found = tuple((await verdicts(episode, rubric, self._sandbox, self._sandbox_args)).values())
        seconds = time.monotonic() - started
        return Judgement(rubric.label, self.name, found, score(rubric, found), episode.id, seconds=seconds)

    def close(self) -> None:
        """Hold nothing."""


async def verdicts(
    episode: Episode, rubric: Rubric, sandbox: str = "local", sandbox_args: Mapping[str, JSON] | None = None
) -> dict[str, Verdict]:
    """Return a verdict for each criterion that has a rule, by its id, in the rubric's order."""
    ruled = [(c, c.rule) for c in rubric.criteria if c.rule is not None]
    plain = [(c, rule) for c, rule in ruled if rule.kind != "python"]
    python = [(c, rule) for c, rule in ruled if rule.kind == "python"]
    found = {}
    if plain:
        texts = {view: _text(episode, view) for view in {c.view for c, _ in plain}}

        def decide() -> dict[str, Verdict]:
            return {c.id: _decide(c, rule, texts[c.view], episode) for c, rule in plain}

        found = await in_thread(decide, "rules", quick=True)
    if python:
        found |= await _evaluate(python, episode, sandbox, sandbox_args or {})
    return {c.id: found[c.id] for c, _ in ruled}


def _text(episode: Episode, view: View) -> str:
    """Return what rules read: the final answer, or the conversation, with tool calls as JSON."""
    if view == "answer":
        return episode.final_text
    return "\n\n".join(_said(message) for message in episode.messages)


def _said(message: Message) -> str:
    calls = (f"\n{c.name}({json.dumps(c.arguments, ensure_ascii=False, default=str)})" for c in message.tool_calls)
    return f"{message.role}: {message.content}{''.join(calls)}"


def _decide(criterion: Criterion, rule: Rule, text: str, episode: Episode) -> Verdict:
    try:
        kind, value = KINDS[rule.kind], _looked_up(rule.value, episode.task)
        if value is not rule.value:
            kind.check(value)
        results = "\n\n".join(message.content for message in episode.messages if message.role == "tool")
        is_met, quotation = kind.apply(text, value, {**rule.options, "results": results})
    except (UndecidedError, ValueError, KeyError) as error:
        return _fault(criterion, f"{describe_rule(rule)}: {error}")
    return _verdict(criterion, rule, is_met, quotation)


def _looked_up(value: JSON, task: Task) -> JSON:
    key = task_reference(value)
    if key is None:
        return value
    if key not in task:
        raise UndecidedError(f"the task has no '{key}'.{did_you_mean(key, task)}")
    return task[key]


def _verdict(criterion: Criterion, rule: Rule, is_met: bool, quotation: str = "") -> Verdict:
    negated = rule.options.get("negate") is True
    choice = criterion.choices[-1 if is_met != negated else 0]
    reason = f"{rule.kind}: {'met' if is_met else 'not met'}"
    return Verdict(criterion.id, choice, criterion.value_of(choice), reason, quotation if is_met else "")


def _fault(criterion: Criterion, detail: str) -> Verdict:
    return Verdict(criterion.id, error=JudgeFault.RULE, detail=detail)


async def _evaluate(
    criteria: Sequence[tuple[Criterion, Rule]], episode: Episode, sandbox: str, sandbox_args: Mapping[str, JSON]
) -> dict[str, Verdict]:
    """Evaluate all expressions in one fresh sandbox: they are the rubric's author's, what they read is not."""
    found, asked = dict[str, Verdict](), list[tuple[Criterion, Rule, str]]()
    for criterion, rule in criteria:
        try:
            asked.append((criterion, rule, str(_looked_up(rule.value, episode.task))))
        except UndecidedError as error:
            found[criterion.id] = _fault(criterion, f"{describe_rule(rule)}: {error}")
    if not asked:
        return found
    messages: list[JSON] = [message_dict(message) for message in episode.messages]
    args: list[JSON] = [[expression for *_, expression in asked], episode.final_text, episode.task, messages]
    try:
        backend = shared_backend(sandbox, sandbox_args)
        results = await call({"rule.py": _EVALUATE}, "rule:evaluate", args, backend, timeout=PYTHON_SECONDS)
    except (CallError, SandboxError) as error:
        return found | {c.id: _fault(c, f"{describe_rule(rule)}: {error}") for c, rule, _ in asked}
    for (criterion, rule, _), (value, wrong) in zip(asked, cast("list[tuple[bool | str, str]]", results), strict=True):
        if wrong:
            found[criterion.id] = _fault(criterion, f"{describe_rule(rule)}: {wrong}")
        elif isinstance(value, bool):
            found[criterion.id] = _verdict(criterion, rule, value)
        elif value in criterion.choices:
            choices = criterion.choices[::-1] if rule.options.get("negate") is True else criterion.choices
            choice = choices[criterion.choices.index(value)]
            found[criterion.id] = Verdict(criterion.id, choice, criterion.value_of(choice), "python")
        else:
            found[criterion.id] = _fault(criterion, f"{value!r:.100} is none of {', '.join(criterion.choices)}")
    return found
