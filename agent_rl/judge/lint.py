"""What is wrong with a rubric, found without a model: each finding with the criterion and how to mend it."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from agent_rl.core.episode import Episode, Origin, Outcome, StopReason
from agent_rl.core.judgement import Verdict
from agent_rl.core.messages import JSON, Message
from agent_rl.judge.rubric import Criterion, Rubric, Rule
from agent_rl.judge.rule_kinds import task_reference
from agent_rl.judge.rules import verdicts
from agent_rl.judge.score import score
from agent_rl.worker_threads import outside_loop

SIMILAR = 0.75
"""The share of their words that two criteria have in common, from which on they ask the same."""
DWARFED = 20
"""How many times as much as another a criterion weighs, so that the other hardly counts."""
LONG = 1000
"""Characters of a text that a judge is likely to read in part."""
_STAND_IN = "7391"
"""The task's value in a rule: a text, a number and a pattern that no empty answer has."""
_STOP_WORDS = frozenset(
    [
        *("a", "an", "the", "of", "to", "in", "on", "at", "by", "for", "with", "is", "are", "be", "it", "its"),
        *("that", "this", "and", "or", "do", "doe", "answer", "response"),
        *("contain", "giv", "includ", "mention", "nam", "provid", "stat", "tell"),  # "fails to mention", "names"
    ]
)
_NEGATION = re.compile(
    r"\b(not|no|never|without|lacks?|fails?|omits?|misses|avoids?|cannot|\w+n['\u2019]t)\b", re.IGNORECASE
)
_TWO = re.compile(
    r"\?.*\?|;|\b(as well as|and also|and/or|additionally)\b|^\w+s\b.*\band (?:\w+s|is|are|has|does) \w",
    re.IGNORECASE | re.DOTALL,
)
_POINTS = re.compile(
    r"[-+]?\d+ ?(points?|marks?)\b|\b(award|deduct|subtract|earn|lose|worth)\w* .{0,30}\b(points?|marks?|score)\b"
    r"|\bweight(ed)?( of|:|=) ?\d",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, or likely to be."""

    check: str
    where: str
    """The criterion's id; empty for the whole rubric."""
    what: str
    mend: str

    def __str__(self) -> str:
        return f"{self.where or 'rubric'}: {self.what}; {self.mend} ({self.check})"


def lint(rubric: Rubric) -> list[Finding]:
    """Return what is wrong with a rubric: of the whole first, then criterion by criterion."""
    found = [finding for check in (_empty_answer, _faults_only, _dwarfed, _alike) for finding in check(rubric)]
    return found + [finding for c in rubric.criteria for check in _OF_CRITERIA for finding in check(c)]


def lint_addition(criterion: Criterion, earlier: Sequence[Criterion]) -> list[Finding]:
    """Return what is wrong with a criterion beside others: it repeats one, mirrors one, or is wrong in itself."""
    beside = (finding for other in earlier for finding in _alike_pair(other, criterion))
    return [*beside, *(finding for check in _OF_CRITERIA for finding in check(criterion))]


def similarity(one: str, other: str) -> float:
    """Return the share of their words that two texts have in common, negations and the most frequent aside."""
    words, others = _words(one), _words(other)
    return len(words & others) / len(words | others) if words | others else float(one == other)


def is_negated(text: str) -> bool:
    """Return whether a text has an odd number of negations, so that it asks for the opposite."""
    return len(_NEGATION.findall(text)) % 2 == 1


def _words(text: str) -> frozenset[str]:
    plain = _NEGATION.sub(" ", text.lower())
    stems = (re.sub(r"(?<=\w{3})(ing|es|ed|s|e)$", "", word) for word in re.findall(r"\w+", plain))
    return frozenset(stems) - _STOP_WORDS


# --- of the whole rubric ---


def _empty_answer(rubric: Rubric) -> Iterator[Finding]:
    """Judge an empty answer by the rules; what only a model can say is taken as not met, a gate as shut."""
    found = outside_loop(lambda: asyncio.run(verdicts(_unanswered(rubric), rubric)))
    for c in rubric.criteria:
        if c.rule is not None and c.rule.kind == "python" and found[c.id].error and "task" not in str(c.rule.value):
            what = f"its expression fails on an empty answer, which is then not scored: {found[c.id].detail[:200]}"
            yield Finding("fails", c.id, what, "write it so that it is False there")
    values = {c.id: found[c.id].value if c.id in found else 0.0 for c in rubric.criteria}
    judged = [Verdict(id, "", 0.0 if value is None else value) for id, value in values.items()]
    result = score(rubric, judged)
    if result is not None and result > 0:
        met = ", ".join(f"'{c.id}'" for c in rubric.criteria if c.weight > 0 and not c.gate and values[c.id])
        way_out = "add a gate, such as {text: Answers., gate: true, rule: {regex: '\\S'}}"
        yield Finding("empty-answer", "", f"an empty answer scores {result:.3g}: it meets {met}", way_out)


def _unanswered(rubric: Rubric) -> Episode:
    keys = (task_reference(c.rule.value) for c in rubric.criteria if c.rule is not None)
    task: dict[str, JSON] = {key: _STAND_IN for key in keys if key is not None}
    return Episode(
        id="empty",
        env="",
        task=task,
        seed=0,
        group_id="",
        origin=Origin("eval"),
        messages=(Message("user"), Message("assistant")),
        steps=(),
        trajectories=(),
        rewards=(),
        stop_reason=StopReason.DONE,
        outcome=Outcome.TERMINATED,
    )


def _faults_only(rubric: Rubric) -> Iterator[Finding]:
    if all(c.weight < 0 for c in rubric.criteria):
        what = "every weight is negative and there is no gate, so that an answer which says nothing is the best"
        yield Finding("faults-only", "", what, "add what an answer must do, or a gate")


def _dwarfed(rubric: Rubric) -> Iterator[Finding]:
    counted = [c for c in rubric.criteria if not c.gate]
    if not counted:
        return
    largest = max(counted, key=lambda c: abs(c.weight))
    small = [c.id for c in counted if abs(c.weight) * DWARFED <= abs(largest.weight)]
    if small:
        what = (
            f"it weighs {DWARFED} times as much as {', '.join(small[:3])}{' and others' if small[3:] else ''}, or more"
        )
        yield Finding("dwarfed", largest.id, what, "bring the weights closer, or make it a gate")


def _alike(rubric: Rubric) -> Iterator[Finding]:
    for one, other in combinations(rubric.criteria, 2):
        yield from _alike_pair(one, other)


def _alike_pair(one: Criterion, other: Criterion) -> Iterator[Finding]:
    drop = "drop one, and add up the weights"
    if one.rule is not None and other.rule is not None:
        if one.rule == other.rule and one.view == other.view:
            yield Finding("duplicate", other.id, f"it has the rule of '{one.id}'", drop)
    elif similarity(one.text, other.text) >= SIMILAR:
        if (one.weight < 0) != (other.weight < 0) or is_negated(one.text) != is_negated(other.text):
            what = f"it asks for the opposite of '{one.id}', which counts one thing twice"
            yield Finding("mirror", other.id, what, "drop one")
        else:
            yield Finding("duplicate", other.id, f"it asks what '{one.id}' asks", drop)


# --- of one criterion ---


def _two_questions(criterion: Criterion) -> Iterator[Finding]:
    if criterion.rule is None and (asked := _TWO.search(criterion.text)):
        what = f"it may ask two things at once ('{' '.join(asked[0].split())[-40:]}')"
        yield Finding("two-questions", criterion.id, what, "write a criterion for each")


def _double_negative(criterion: Criterion) -> Iterator[Finding]:
    beginning = " ".join(criterion.text.split()[:3])
    if criterion.weight < 0 and criterion.rule is None and is_negated(beginning):
        what = "its weight is negative and its text, too: judges take a missing fault for a met criterion"
        yield Finding("double-negative", criterion.id, what, "ask for the good thing, with a positive weight")


def _long(criterion: Criterion) -> Iterator[Finding]:
    if len(criterion.text) > LONG:
        what = f"its text has {len(criterion.text)} characters"
        yield Finding("long", criterion.id, what, f"split it, or say it in {LONG}")


def _points(criterion: Criterion) -> Iterator[Finding]:
    if named := _POINTS.search(criterion.text):
        what = f"its text names points ('{named[0]}'), which judges are not to see"
        yield Finding("points", criterion.id, what, "put them into weight")


def _unreachable(criterion: Criterion) -> Iterator[Finding]:
    """Find the choices in between of a rule, which is met or not: only an expression can return one."""
    between = criterion.choices[1:-1]
    if criterion.rule is None or not between:
        return
    missing = [choice for choice in between if choice not in _returned(criterion.rule)]
    if missing:
        what = f"its rule never gives {', '.join(repr(choice) for choice in missing)}"
        yield Finding("unreachable", criterion.id, what, "leave the choice out, or return it in a python rule")


def _returned(rule: Rule) -> Sequence[str]:
    if rule.kind != "python" or not isinstance(rule.value, str):
        return []
    nodes = ast.walk(ast.parse(rule.value.strip(), mode="eval"))
    return [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]


_OF_CRITERIA: tuple[Callable[[Criterion], Iterator[Finding]], ...] = (
    *(_two_questions, _double_negative, _long, _points, _unreachable),
)
