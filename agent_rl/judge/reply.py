"""A judge's reply, read: a verdict for each criterion of the request, or the reason for its lack."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from agent_rl.core.judgement import JudgeFault, Verdict
from agent_rl.core.messages import JSON
from agent_rl.judge.prompt import Inquiry, menu
from agent_rl.judge.rubric import NOT_APPLICABLE, Criterion
from agent_rl.rendering.chat_format import as_unicode

MOST_BRACES = 500
"""Places where an object may begin that are looked at, so that a reply of braces takes no time."""
FINAL = (JudgeFault.REFUSED, JudgeFault.PLANTED)
"""What asking again is no way out of."""
_GAP = re.compile(r"\s*(?:\[\s*)?(?:\.\.\.|…)(?:\s*\])?\s*")
"""Where a quotation leaves something out."""
_PLAIN = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b\u2032", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f\u2033\u00ab\u00bb", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
)
"""Characters that judges write differently when they copy: quotation marks, dashes."""
_QUOTES = " \"'`"


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, as far as a judge's verdicts depend on it."""

    content: str
    refusal: str = ""
    finish_reason: str = ""


class ReplyError(Exception):
    """A reply that can't be used at all."""

    def __init__(self, fault: JudgeFault, detail: str) -> None:
        super().__init__(detail)
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Entry:
    """What a reply says of one criterion, unchecked."""

    id: str
    said: JSON


def read_reply(answer: Answer, inquiry: Inquiry) -> tuple[Verdict, ...]:
    """Return a verdict for each criterion of an inquiry but the false one; what can't be used has `error` set."""
    asked = inquiry.asked
    try:
        entries = read_entries(answer, {c.id for c in inquiry.criteria})
    except ReplyError as error:
        return without_verdicts(asked, error.fault, str(error))
    text = fold(inquiry.exhibit.quotable)
    found = {c.id: _verdict(c, [e.said for e in entries if e.id == c.id], text) for c in inquiry.criteria}
    canary = found[inquiry.canary]
    if canary.value == 1.0 or canary.error is JudgeFault.UNQUOTED:
        return without_verdicts(asked, JudgeFault.PLANTED, "the reply finds a criterion met that is false")
    if canary.error is not None:
        return without_verdicts(asked, canary.error, canary.detail)
    return tuple(found[c.id] for c in asked)


def read_entries(answer: Answer, ids: set[str]) -> list[Entry]:
    """Return a reply's entries under each of the request's ids; some may be missing or doubled.

    Raises:
        ReplyError: if it can't be used, or has another id.
    """
    if answer.refusal or answer.finish_reason == "content_filter":
        raise ReplyError(JudgeFault.REFUSED, answer.refusal or "the server filtered the reply")
    if answer.finish_reason == "length":
        raise ReplyError(JudgeFault.TRUNCATED, "the reply was cut at its limit; give shorter reasons")
    try:
        entries = _find_entries(behind_thoughts(answer.content), ids)
    except ValueError as error:
        raise ReplyError(JudgeFault.MALFORMED, str(error)) from None
    if unknown := sorted({e.id for e in entries} - ids):
        raise ReplyError(JudgeFault.UNKNOWN, f"nothing has the id {unknown[0][:80]!r}")
    return entries


def behind_thoughts(content: str) -> str:
    """Return what a reply says after it has thought; the marks of thoughts in its object are quoted from a response."""
    said = content.lstrip()
    if said.startswith(("{", "```")):
        return said
    thought, end, rest = said.partition("</think>")
    return rest if end else thought.partition("<think>")[0]


def without_verdicts(criteria: Sequence[Criterion], fault: JudgeFault, detail: str) -> tuple[Verdict, ...]:
    """Return a verdict for each criterion that says why there is none."""
    return tuple(Verdict(c.id, error=fault, detail=detail) for c in criteria)


def _find_entries(content: str, ids: set[str]) -> list[Entry]:
    """Return the entries of the reply's object with verdicts; of several, the one with just the ids that were asked.

    Raises:
        ValueError: if there is none, or several that differ have just these ids.
    """
    objects = _objects_with_verdicts(content)
    if not objects:
        raise ValueError("it holds no JSON object with verdicts")
    fitting = [entries for entries in objects if {e.id for e in entries} == ids]
    if any(entries != fitting[0] for entries in fitting[1:]):
        raise ValueError("it holds several JSON objects with verdicts")
    return fitting[0] if fitting else objects[0]


def _objects_with_verdicts(content: str) -> list[list[Entry]]:
    """Return the entries of each JSON object with verdicts in a text, whatever is around them."""
    decoder, found, at = json.JSONDecoder(object_pairs_hook=_Pairs), [], content.find("{")
    for _ in range(MOST_BRACES):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(content, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if (verdicts := dict(value).get("verdicts")) is None:
                end = at + 1  # it may be further inside
            else:
                found.append(_entries(verdicts))
        at = content.find("{", end)
    return found


class _Pairs(list[tuple[str, JSON]]):
    """An object's names and values, with those of names that occur twice."""


def _entries(verdicts: JSON) -> list[Entry]:
    """Return the entries of an object by id, or of a list whose items have an id each; a name twice is two entries."""
    if isinstance(verdicts, _Pairs):
        return [Entry(id, _plain(said)) for id, said in verdicts for _ in range(2 if _is_doubled(said) else 1)]
    items = [_plain(item) for item in verdicts] if isinstance(verdicts, list) else []
    return [Entry(str(item.get("id", item.get("ID", ""))), item) for item in items if isinstance(item, Mapping)]


def _is_doubled(value: JSON) -> bool:
    return isinstance(value, _Pairs) and len(dict(value)) < len(value)


def _plain(value: JSON) -> JSON:
    return dict(value) if isinstance(value, _Pairs) else value


def _verdict(criterion: Criterion, said: Sequence[JSON], text: str) -> Verdict:
    """Return the verdict of what was said under a criterion's id."""
    if not said:
        return _fault(criterion, JudgeFault.MISSING, f"it has no verdict under '{criterion.id}'")
    if len(said) > 1:
        return _fault(criterion, JudgeFault.DOUBLED, f"it has {len(said)} verdicts under '{criterion.id}'")
    entry = said[0] if isinstance(said[0], Mapping) else {"verdict": said[0]}
    choice = _choice(criterion, entry.get("verdict"))
    if choice is None:
        offered = ", ".join(map(str, menu(criterion)))
        detail = f"the verdict {str(entry.get('verdict'))[:80]!r} of '{criterion.id}' is none of {offered}"
        return _fault(criterion, JudgeFault.OFF_MENU, detail)
    reason, evidence = (as_unicode(str(entry.get(name) or "")) for name in ("reason", "evidence"))
    if choice == NOT_APPLICABLE:
        return Verdict(criterion.id, reason=reason, evidence=evidence, is_applicable=False)
    if choice != criterion.choices[0] and text and not is_quoted(evidence, text):
        detail = f"the evidence of '{criterion.id}' is not in the response word for word"
        return replace(_fault(criterion, JudgeFault.UNQUOTED, detail), reason=reason, evidence=evidence)
    return Verdict(criterion.id, choice, criterion.value_of(choice), reason, evidence)


def _fault(criterion: Criterion, fault: JudgeFault, detail: str) -> Verdict:
    return Verdict(criterion.id, error=fault, detail=detail)


def _choice(criterion: Criterion, said: JSON) -> str | None:
    """Return the choice that a judge named, in whatever case, of digits also as a number; None if it is none."""
    if isinstance(said, int) and not isinstance(said, bool):
        said = str(said)
    if not isinstance(said, str):
        return None
    offered = [str(choice) for choice in menu(criterion)]
    if said in offered:
        return said
    close = [choice for choice in offered if choice.casefold() == said.strip().casefold()]
    return close[0] if len(close) == 1 else None


def fold(text: str) -> str:
    """Return a text with runs of whitespace as one space, and quotation marks and dashes, which models swap, plain."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text).translate(_PLAIN)
    return " ".join(text.split())


def is_quoted(evidence: str, text: str) -> bool:
    """Return whether evidence is from a folded text word for word, in order where it leaves something out."""
    evidence = fold(evidence).strip(_QUOTES)
    if evidence and evidence in text:
        return True
    parts, at = [part.strip(_QUOTES) for part in _GAP.split(evidence)], 0
    for part in parts:
        found = text.find(part, at)
        if found < 0:
            return False
        at = found + len(part)
    return any(parts)


# --- several samples ---


def majority(criterion: Criterion, samples: Sequence[Verdict]) -> Verdict:
    """Return the majority's choice; none where samples without a verdict could have turned it."""
    if len(samples) == 1:
        return samples[0]
    failed = [v for v in samples if v.error is not None]
    votes = Counter(_vote(v) for v in samples if v.error is None)
    ranked = votes.most_common(2)
    second = ranked[1][1] if len(ranked) > 1 else 0
    if ranked and ranked[0][1] > second + len(failed):
        return replace(next(v for v in samples if v.error is None and _vote(v) == ranked[0][0]), votes=dict(votes))
    if failed:
        return replace(failed[0], votes=dict(votes))
    return Verdict(criterion.id, error=JudgeFault.DISAGREED, detail="they are divided evenly", votes=dict(votes))


def _vote(verdict: Verdict) -> str:
    return verdict.choice if verdict.choice is not None else NOT_APPLICABLE
