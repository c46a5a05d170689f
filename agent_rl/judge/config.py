"""The section `judge` of a run's settings: who judges episodes under rubrics."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

from agent_rl.config import Section

_OF_RULES = {"concurrency", "prices"}
"""Settings that say something without a model, too: of stored episodes, and of judges that environments name."""


MONEY = ("judge.max_cost", "judge.prices")
"""The settings that may change when a run or a rollout goes on: no verdict depends on them."""


class JudgeConfig(Section):
    """Who judges episodes under rubrics; without a model, only rules do."""

    model: str | None = None
    """The judge's name at an OpenAI-compatible server; null for rules alone."""
    base_url: str | None = None
    """The server's address, such as http://host:8000/v1; null for OPENAI_BASE_URL, otherwise OpenAI's own."""
    api_key_env: str = "OPENAI_API_KEY"
    """The environment variable that holds the key; a server at another address may need none."""
    samples: int = Field(1, ge=1)
    """Calls for the same criteria; the majority of their choices counts, and a tie is not scored."""
    permute: bool = True
    """Whether each sample has the criteria in another order."""
    per_call: int | None = Field(None, ge=1)
    """Criteria in one call; null for all of a rubric's."""
    temperature: float | None = Field(None, ge=0)
    """Null for the server's own."""
    max_tokens: int | None = Field(None, ge=1)
    """Of one reply; null for the server's own limit."""
    structured: bool | None = None
    """Whether to ask for JSON by a schema; null to ask until the server refuses it."""
    timeout: float = Field(120.0, gt=0)
    """Seconds of one attempt; after one that took longer there is none."""
    retries: int = Field(5, ge=0)
    """Attempts after the first, of one call that failed otherwise."""
    concurrency: int = Field(64, ge=1)
    """Calls under way at a time."""
    requests_per_minute: float | None = Field(None, gt=0)
    """Of all calls; null for no limit."""
    tokens_per_minute: float | None = Field(None, gt=0)
    """Of prompts and replies; before an answer says them they are estimated."""
    prices: str | None = None
    """A YAML file of what a million tokens cost, as `gpt-5-mini: {input: 0.25, cached: 0.025, output: 2}`."""
    max_cost: float | None = Field(None, gt=0)
    """What all calls may cost, by the prices, each time that a run begins or goes on: criteria that it leaves out are
    not scored."""

    evolve: bool = False
    """Whether the model proposes criteria in training, from what tells a task's episodes apart; they count from the
    task's next visit, beside its rubric. Of the embedded backend."""

    @field_validator("prices")
    @classmethod
    def _seen_from_anywhere(cls, file: str | None) -> str | None:
        return file and str(Path(file).resolve())

    @model_validator(mode="after")
    def _priced(self) -> JudgeConfig:
        if self.max_cost is not None and self.prices is None:
            raise ValueError("max_cost needs prices, a file of what a million tokens cost: judge.prices=prices.yaml")
        if self.evolve and self.model is None:
            raise ValueError("evolve needs a model, which proposes and judges criteria: judge.model=NAME")
        if self.model is None and (given := self.model_dump(exclude=_OF_RULES, exclude_defaults=True)):
            name, value = next(iter(given.items()))
            raise ValueError(f"{name}={value} changes nothing without a model: name it, judge.model=NAME")
        return self
