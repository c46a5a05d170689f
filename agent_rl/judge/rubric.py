"""Rubric: weighted criteria, as data."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError
from agent_rl.rendering.chat_format import as_unicode

Normalize: TypeAlias = Literal["positive", "absolute", "none"]
View: TypeAlias = Literal["answer", "transcript"]

NOT_APPLICABLE = "not_applicable"
"""The choice of a judge that a criterion with `may_be_na` does not concern the episode."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A criterion decided without a model: see `agent_rl.judge.rules`."""

    kind: str
    value: JSON = None
    """What is compared with; `{"task": KEY}` stands for the episode's task's."""
    options: Mapping[str, JSON] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Criterion:
    """One question about an episode, its choices, and what they are worth."""

    id: str
    text: str
    weight: float = 1.0
    """Below 0 for a fault; never 0."""
    choices: tuple[str, ...] = ("no", "yes")
    """From worst, worth 0, to best, worth 1, at even distances."""
    view: View = "answer"
    """What the judge is shown: the final answer, or the whole conversation."""
    gate: bool = False
    """Whether its value multiplies the score, in place of adding to it."""
    may_be_na: bool = False
    """Whether the judge may say that it does not apply; it is then left out of the score."""
    rule: Rule | None = None
    tags: tuple[str, ...] = ()
    source: str = "static"
    """"static", or "evolved@STEP" for one that was proposed in training."""

    def __post_init__(self) -> None:
        if not self.id or not self.text.strip():
            raise ConfigError(f"criterion '{self.id}': give an id and a text")
        if any(as_unicode(each) != each for each in (self.id, self.text, *self.choices)):
            raise ConfigError(f"criterion {self.id!a} holds half a character: {ascii(self.text)[:60]}")
        if not math.isfinite(self.weight) or self.weight == 0:
            raise ConfigError(f"criterion '{self.id}' has weight={self.weight}: give a finite number other than 0")
        if self.gate and self.weight < 0:
            raise ConfigError(f"criterion '{self.id}' is a gate with weight={self.weight}: give it a positive one")
        if len(self.choices) < 2 or len(set(self.choices)) < len(self.choices) or NOT_APPLICABLE in self.choices:
            raise ConfigError(
                f"criterion '{self.id}' has choices={list(self.choices)}: give two or more, all different"
            )

    def value_of(self, choice: str) -> float:
        """Return what a choice is worth, 0 to 1."""
        return self.choices.index(choice) / (len(self.choices) - 1)


@dataclass(frozen=True, slots=True)
class Rubric:
    """Criteria, and how their values become one score: `agent_rl.judge.score`."""

    name: str
    criteria: tuple[Criterion, ...]
    version: str = "1"
    normalize: Normalize = "positive"
    clip: tuple[float, float] | None = None
    """The least and the most score, in training, too; reports clip to 0 and 1."""

    def __post_init__(self) -> None:
        if not self.criteria:
            raise ConfigError(f"rubric '{self.name}' has no criteria")
        twice = [id for id, n in Counter(c.id for c in self.criteria).items() if n > 1]
        if twice:
            raise ConfigError(f"rubric '{self.name}' has two criteria with the id '{twice[0]}': rename one")
        if all(c.gate for c in self.criteria):
            raise ConfigError(f"rubric '{self.name}' has gates only, which multiply: give it a criterion that is none")
        if not math.isfinite(sum(abs(c.weight) for c in self.criteria)):
            raise ConfigError(f"rubric '{self.name}' has weights with an infinite sum, which no score can be made of")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise ConfigError(f"rubric '{self.name}' has clip={list(self.clip)}: give the least score, then the most")
        if self.normalize == "positive" and not any(c.weight > 0 for c in self.criteria if not c.gate):
            raise ConfigError(f"rubric '{self.name}' has no positive weight to divide by: set normalize to absolute")

    @property
    def digest(self) -> str:
        """Name what a judge is asked, in 64 hex digits; weights, gates and the normaliser change no verdict."""
        asked = [
            {name: getattr(c, name) for name in ("id", "text", "choices", "view", "may_be_na")}
            | {"rule": c.rule and asdict(c.rule)}
            for c in self.criteria
        ]
        return hashlib.sha256(json.dumps(asked, sort_keys=True, ensure_ascii=False).encode()).hexdigest()

    @property
    def label(self) -> str:
        """Name the rubric as judgements do: "name@version#digest", with 8 digits."""
        return f"{self.name}@{self.version}#{self.digest[:8]}"

    @property
    def needs_model(self) -> bool:
        """Whether a criterion has no rule."""
        return any(c.rule is None for c in self.criteria)

    def require_rules(self) -> None:
        """Raise a ConfigError if a criterion has no rule."""
        without = [c.id for c in self.criteria if c.rule is None]
        if without:
            raise ConfigError(
                f"rubric '{self.name}' needs a model: criterion '{without[0]}' has no rule\n"
                f"({len(without)} of {len(self.criteria)} have none); set judge.model=NAME, or give it a rule"
            )
