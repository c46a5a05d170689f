"""ModelJudge: a served model decides the criteria of a rubric."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from agent_rl.concurrency import run_together
from agent_rl.core.episode import Episode
from agent_rl.core.judgement import Judgement, Verdict
from agent_rl.core.messages import JSON
from agent_rl.core.usage import Usage
from agent_rl.judge import rules
from agent_rl.judge.calling import ASKED_AGAIN, Caller, CallError
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.group import GroupModelJudge
from agent_rl.judge.prompt import Exhibit, Inquiry, ask_again, exhibit, inquire, nonce
from agent_rl.judge.reply import FINAL, majority, read_reply, without_verdicts
from agent_rl.judge.rubric import Rubric, View
from agent_rl.judge.score import score
from agent_rl.judge.suspect import suspicions


class ModelJudge:
    """Judges by a model behind OpenAI's chat completions; criteria with a rule are decided without it.

    Example::

        judge = ModelJudge(JudgeConfig(model="gpt-5-mini", samples=3), log=Path("calls.jsonl"))
        judgement = await judge.judge(episode, rubric)
    """

    def __init__(self, config: JudgeConfig, log: Path | None = None) -> None:
        """Keep the settings; files and connections are opened by the first call.

        Args:
            config: the model, and how it is asked.
            log: the file of its calls, which are not made again; None to keep none.

        Raises:
            ConfigError: if the settings have no model, or no price for it.
        """
        self.caller, self.config = Caller(config, log), config
        self.name = self.caller.name
        self.log = log
        """The file of its calls, as given."""
        self.comparison = GroupModelJudge(self.caller)
        """Of groups: its rate of flips."""

    @property
    def cost(self) -> float:
        """What its calls have cost so far, by the prices."""
        return self.caller.cost

    async def judge(self, episode: Episode, rubric: Rubric) -> Judgement:
        """Return the judgement of an episode; what fails is a verdict's `error`.

        Raises:
            ConfigError: if the server refuses the key, the model or every request.
            StoreError: if the log can't be used.
        """
        started = time.monotonic()
        label = rubric.label
        found = await rules.verdicts(episode, rubric)
        usage: list[Usage] = []
        suspect: list[str] = []
        if rubric.needs_model:
            found |= await self.caller.run(self._decide_all(episode, rubric, label, usage, suspect))
        verdicts = tuple(found[c.id] for c in rubric.criteria)
        return Judgement(
            label,
            self.name,
            verdicts,
            score(rubric, verdicts),
            episode.id,
            tuple(dict.fromkeys(suspect)),
            tuple(usage),
            time.monotonic() - started,
        )

    async def rank(self, episodes: Sequence[Episode], rubric: Rubric) -> list[Judgement]:
        """Compare the episodes of one task, all in one call: see `GroupModelJudge`."""
        return await self.comparison.rank(episodes, rubric)

    def close(self) -> None:
        """Close connections and the log; the judge may be used again."""
        self.caller.close()

    def __enter__(self) -> ModelJudge:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def _decide_all(
        self, episode: Episode, rubric: Rubric, label: str, usage: list[Usage], suspect: list[str]
    ) -> dict[str, Verdict]:
        """Return the model's verdicts; add to `usage`, and to the suspect passages of the response."""
        about = {"episode": episode.id, "rubric": label}
        found: dict[str, list[Verdict]] = defaultdict(list)

        async def decide(inquiry: Inquiry) -> None:
            for verdict in await self._decide(inquiry, usage, about):
                found[verdict.criterion].append(verdict)

        async def decide_view(view: View) -> None:
            shown = exhibit(episode, view, self.caller.secret)
            suspect.extend(suspicions(shown.quotable))
            first, *others = [partial(decide, inquiry) for inquiry in self._inquiries(rubric, view, shown)]
            await first()  # alone, so that the server has read what all of them share
            if others:
                await run_together(others)

        asked = [c for c in rubric.criteria if c.rule is None]
        await run_together([partial(decide_view, view) for view in dict.fromkeys(c.view for c in asked)])
        return {c.id: majority(c, found[c.id]) for c in asked}

    def _inquiries(self, rubric: Rubric, view: View, shown: Exhibit) -> Iterator[Inquiry]:
        """Yield the requests about all criteria of a view."""
        criteria = [c for c in rubric.criteria if c.rule is None and c.view == view]
        secret = self.caller.secret
        for sample in range(self.config.samples):
            order = sample if self.config.permute else 0
            ordered = sorted(criteria, key=lambda c: nonce(secret, str(order), c.id)) if order else criteria
            size = self.config.per_call or len(ordered)
            for start in range(0, len(ordered), size):
                yield inquire(ordered[start : start + size], shown, sample, secret)

    async def _decide(self, inquiry: Inquiry, usage: list[Usage], about: Mapping[str, JSON]) -> tuple[Verdict, ...]:
        """Return the verdicts of one request; a reply that can't be used is asked for once more."""
        messages, best = inquiry.messages(), None
        for _ in range(1 + ASKED_AGAIN):
            try:
                answer = await self.caller.ask(messages, inquiry.schema(), inquiry.sample, usage, about)
            except CallError as error:
                lacking = without_verdicts(inquiry.asked, error.fault, error.detail)
                return tuple(a if a.error is None else b for a, b in zip(best or lacking, lacking, strict=True))
            verdicts = read_reply(answer, inquiry)
            faulty = [v for v in verdicts if v.error is not None]
            if best is None or len(faulty) < sum(v.error is not None for v in best):
                best = verdicts
            if not faulty:
                break
            if faulty[0].error in FINAL:
                return verdicts
            problems = "; ".join(dict.fromkeys(v.detail for v in faulty))
            messages = [*messages, *ask_again(answer.content, problems)]
        assert best is not None
        return best
