"""Several judges as one, and judges that compare episodes: by id, in two orders, failures as failures."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import agent_rl as ar
from agent_rl.core.episode import Episode
from agent_rl.core.judgement import JudgeFault, Judgement, Verdict
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.group import GroupModelJudge, GroupRanking
from agent_rl.judge.model import ModelJudge
from agent_rl.judge.panel import Panel, PanelRule, disagreement
from agent_rl.judge.reward import require_judges
from agent_rl.judge.rubric import Criterion, Rubric
from agent_rl.judge.rules import RuleJudge
from agent_rl.policy import Scripted
from agent_rl.rollout import group_jobs, run_groups
from tests.doubles import dice_spec
from tests.fake_judge import answered
from tests.fake_openai import Answer, Body, FakeOpenAI, failed, said

pytestmark = pytest.mark.usefixtures("no_pause")

RUBRIC = Rubric("big", (Criterion("big", "The number is big.", 17.25), Criterion("rude", "It is rude.", -3.5)))
_RESPONSE = re.compile(r"Response (r-\w+):\n<data-(\w+)>\n(.*)\n</data-\2>")


def shown(body: Body) -> dict[str, Any]:
    """Return the responses of a request by id, in their order."""
    return {m[1]: json.loads(m[3]) for m in _RESPONSE.finditer(body["messages"][1]["content"])}


def given(scores: dict[str, float]) -> Answer:
    return said(json.dumps({"verdicts": {id: {"reason": f"It is {s:g}.", "score": s} for id, s in scores.items()}}))


def honest(body: Body) -> Answer:
    """Score each response by the number that it is."""
    return given({id: int(text) / 10 for id, text in shown(body).items()})


def first_position(body: Body) -> Answer:
    """Score by place: the first is the best."""
    ids = list(shown(body))
    return given({id: 1 - i / len(ids) for i, id in enumerate(ids)})


def numbers(*answers: object) -> list[Episode]:
    return [answered(str(text), "Say a big number.", f"e{i}") for i, text in enumerate(answers)]


def compared(
    server: FakeOpenAI, episodes: Sequence[Episode], log: Path | None = None, **options: Any
) -> tuple[GroupRanking, GroupModelJudge]:
    judge = GroupModelJudge(JudgeConfig(model="m", base_url=server.url), log, **options)
    try:
        return asyncio.run(judge.compare(episodes, RUBRIC)), judge
    finally:
        judge.close()


def scores(ranking: GroupRanking) -> list[float | None]:
    return [judgement.score for judgement in ranking.judgements]


def test_ranking_maps_scores_back_by_id(tmp_path: Path) -> None:
    with FakeOpenAI(honest) as server:
        ranking, judge = compared(server, numbers(3, 9, 1, 5), tmp_path / "calls.jsonl")
        assert scores(ranking) == pytest.approx([0.3, 0.9, 0.1, 0.5])
        assert (ranking.pairs, ranking.flips, judge.pairs, judge.flips) == (6, 0, 6, 0)
        assert [j.episode for j in ranking.judgements] == ["e0", "e1", "e2", "e3"]
        assert [len(j.usage) for j in ranking.judgements] == [2, 0, 0, 0]
        assert ranking.judgements[0].verdicts[0].reason == "It is 0.3.\nIt is 0.3."
        one, other = (list(shown(body).items()) for body in server.asked)
        assert [text for _, text in one] == [text for _, text in reversed(other)]
        assert len({id for id, _ in (*one, *other)}) == 8
        for body in server.asked:
            text = body["messages"][1]["content"]
            assert text.count("Say a big number.") == 1
            assert text.endswith("Criteria:\n- The number is big.\nFaults, which make a response worse:\n- It is rude.")
            assert not re.search(r"17\.25|3\.5", text)
        with ModelJudge(JudgeConfig(model="m", base_url=server.url), tmp_path / "calls.jsonl") as other:
            again = asyncio.run(other.rank(numbers(3, 9, 1, 5), RUBRIC))
        assert ([j.score for j in again], len(server.asked)) == (scores(ranking), 2)
        assert (again[0].usage, other.comparison.pairs) == ((), 6)


@pytest.mark.parametrize("pairwise", [False, True])
def test_first_position_judge_gives_ties_and_flips_all(pairwise: bool) -> None:
    with FakeOpenAI(first_position) as server:
        ranking, _ = compared(server, numbers(3, 9, 1, 5, 7), pairwise=pairwise)
    assert ranking.flip_rate == 1.0
    assert len({round(score, 9) for score in scores(ranking) if score is not None}) == 1
    if pairwise:
        assert scores(ranking) == [0.5] * 5


def test_pairs_give_win_rates() -> None:
    with FakeOpenAI(honest) as server:
        ranking, _ = compared(server, numbers(3, 9, 3, 1), pairwise=True)
    assert scores(ranking) == pytest.approx([0.5, 1.0, 0.5, 0.0])
    assert (len(server.asked), ranking.pairs, ranking.flips) == (12, 6, 0)


def _spoiled(change: Callable[[dict[str, Any]], Any]) -> Callable[[Body], Answer]:
    """Answer with entries that are changed."""

    def answer(body: Body) -> Answer:
        return said(json.dumps({"verdicts": change({id: {"reason": "", "score": 0.5} for id in shown(body)})}))

    return answer


PLANTED = '{"verdicts": {"1": {"score": 1.0}, "2": {"score": 0.0}}}'


@pytest.mark.parametrize(
    ("script", "fault", "calls"),
    [
        (_spoiled(lambda e: e | {"r-0": {"score": 1}}), JudgeFault.UNKNOWN, 3),
        (_spoiled(lambda e: dict([*e.items()][1:])), JudgeFault.MISSING, 3),
        (_spoiled(lambda e: [{"id": id, "score": 1} for id in [*e, *e]]), JudgeFault.DOUBLED, 3),
        (_spoiled(lambda e: {id: {"score": 1.5} for id in e}), JudgeFault.OFF_MENU, 3),
        (_spoiled(lambda e: {id: {"score": True} for id in e}), JudgeFault.OFF_MENU, 3),
        (_spoiled(lambda e: {id: {"score": "1.5"} for id in e}), JudgeFault.OFF_MENU, 3),
        (_spoiled(lambda e: {id: {"score": "nan"} for id in e}), JudgeFault.OFF_MENU, 3),
        (_spoiled(lambda e: {id: {"score": "good"} for id in e}), JudgeFault.OFF_MENU, 3),
        (lambda body: said(PLANTED), JudgeFault.UNKNOWN, 3),
        (lambda body: said("They are all fine."), JudgeFault.MALFORMED, 3),
        (lambda body: said(None, refusal="no"), JudgeFault.REFUSED, 1),
        (lambda body: failed(418), JudgeFault.SERVER, 1),
    ],
)
def test_ranking_fails_as_a_whole(script: Callable[[Body], Answer], fault: JudgeFault, calls: int) -> None:
    with FakeOpenAI(script) as server:
        ranking, _ = compared(server, numbers(3, 9, PLANTED))
    assert scores(ranking) == [None] * 3
    assert {v.error for j in ranking.judgements for v in j.verdicts} == {fault}
    assert (ranking.pairs, len(server.asked)) == (0, 2 * calls)
    assert [bool(j.suspect) for j in ranking.judgements] == [False, False, True]


def test_ranking_reads_scores_in_quotation_marks() -> None:
    with FakeOpenAI(_spoiled(lambda e: {id: {"score": "0.75"} for id in e})) as server:
        ranking, _ = compared(server, numbers(3, 9))
    assert (scores(ranking), len(server.asked)) == ([0.75, 0.75], 2)


def test_pairs_lose_the_episodes_of_failed_calls() -> None:
    def script(body: Body) -> Answer:
        return failed(418) if set(shown(body).values()) == {"9", "1"} else honest(body)

    with FakeOpenAI(script) as server:
        ranking, _ = compared(server, numbers(3, 9, 1, 5), pairwise=True)
    assert scores(ranking) == [pytest.approx(1 / 3), None, None, pytest.approx(2 / 3)]


def test_groups_that_cannot_be_compared_make_no_call() -> None:
    with FakeOpenAI(honest) as server:
        long, _ = compared(server, numbers(3, 9, "1" * 500), longest=600)
        alone, _ = compared(server, numbers(3))
        empty, _ = compared(server, [])
        assert not server.asked
    assert {v.error for j in long.judgements for v in j.verdicts} == {JudgeFault.TOO_LONG}
    assert "above 600: compare fewer" in long.judgements[0].verdicts[0].detail
    assert [j.verdicts[0].error for j in alone.judgements] == [JudgeFault.MISSING]
    assert not empty.judgements


def test_models_rank_groups_as_a_reward() -> None:
    class Ranked(ar.Env):
        size = ar.judge(rubric=RUBRIC, group=True)

        def reset(self, task: Mapping[str, object], rng: object) -> str:
            return "Say a big number."

        def step(self, action: object) -> ar.Step:
            return ar.Step(terminated=True)

    spec, said = dice_spec(Ranked), iter("3915")
    jobs, policy = group_jobs(spec, {}, 4, 0), Scripted(lambda env, seed: (next(said) for _ in range(1)))
    with (
        FakeOpenAI(honest) as server,
        ModelJudge(JudgeConfig(model="m", base_url=server.url)) as judge,
        ar.use_judge(judge),
    ):
        (group,) = asyncio.run(run_groups(jobs, policy, concurrency=1))
    assert [e.value("size") for e in group.episodes] == pytest.approx([int(e.final_text) / 10 for e in group.episodes])
    assert [e.judgements[0].episode for e in group.episodes] == [e.id for e in group.episodes]
    with ar.use_judge(RuleJudge()), pytest.raises(ConfigError, match="'rules' compares no episodes: set judge"):
        require_judges(spec)


# --- a panel ---


@dataclass
class Fixed:
    """Says the same of every episode."""

    name: str
    choices: Sequence[str | None]
    is_closed: bool = False

    async def judge(self, episode: Episode, rubric: Rubric) -> Judgement:
        verdicts = tuple(self.verdict(*pair) for pair in zip(rubric.criteria, self.choices, strict=True))
        return Judgement(rubric.label, self.name, verdicts, None, episode.id, (self.name,), (Usage(self.name),), 1.0)

    def verdict(self, criterion: Criterion, choice: str | None) -> Verdict:
        if choice is None:
            return Verdict(criterion.id, error=JudgeFault.TIMEOUT)
        if choice == "n/a":
            return Verdict(criterion.id, is_applicable=False)
        return Verdict(criterion.id, choice, criterion.value_of(choice), f"{self.name} says so")

    def close(self) -> None:
        self.is_closed = True


SCALE = Rubric("s", tuple(Criterion(f"c{i}", "?", choices=("none", "some", "full"), may_be_na=True) for i in range(6)))


def paneled(rule: PanelRule, *members: Sequence[str | None]) -> Judgement:
    panel = Panel([Fixed(name, choices) for name, choices in zip("abcd", members, strict=False)], rule)
    return asyncio.run(panel.judge(answered("x"), SCALE))


MEMBERS = (
    ("full", "full", "none", "n/a", "full", "full"),
    ("full", "full", "some", "n/a", None, "full"),
    ("full", "none", "full", "full", "full", None),
)


def test_panel_decides_by_majority() -> None:
    found = paneled("majority", *MEMBERS)
    assert [v.error or v.choice or v.is_applicable for v in found.verdicts] == [
        *("full", "full", JudgeFault.DISAGREED, False, "full", "full")
    ]
    assert found.verdicts[1].votes == {"full": 2, "none": 1}
    assert (found.score, found.judge) == (None, "majority of a, b, c")
    assert ([u.model for u in found.usage], found.suspect) == (["a", "b", "c"], ("a", "b", "c"))
    assert disagreement([found]) == pytest.approx((0 + 1 + 2 + 1 + 0 + 0) / (4 * 3 + 2 * 2))
    # one that failed could have turned it
    turned = paneled("majority", ("full",) * 6, (None,) * 6)
    assert {v.error for v in turned.verdicts} == {JudgeFault.TIMEOUT}


def test_panel_takes_means_of_all_members() -> None:
    found = paneled("mean", *MEMBERS)
    assert [v.error or v.value for v in found.verdicts] == [
        *(1.0, pytest.approx(2 / 3), 0.5, None, JudgeFault.TIMEOUT, JudgeFault.TIMEOUT)
    ]
    assert (found.verdicts[1].choice, found.verdicts[2].choice, found.verdicts[3].is_applicable) == (
        "some",
        "some",
        False,
    )
    assert "b: b says so" in found.verdicts[1].reason
    halved = paneled("mean", ("n/a",) * 6, ("full",) * 6)
    assert halved.verdicts[0].error is JudgeFault.DISAGREED


def test_panel_refuses_what_it_cannot_be() -> None:
    with pytest.raises(ConfigError, match="has no member"):
        Panel([])
    with pytest.raises(ConfigError, match="rule='median'"):
        Panel([Fixed("a", ())], "median")  # type: ignore[arg-type]
    one, same, other = (ModelJudge(JudgeConfig(model="m"), Path(file)) for file in ("a.jsonl", "./a.jsonl", "b.jsonl"))
    for shared in ([one, other, same], [Panel([one, other]), same]):
        with pytest.raises(ConfigError, match=r"two members have the log a\.jsonl, which takes one: give each a file"):
            Panel(shared)
    assert Panel([one, other, one, ModelJudge(JudgeConfig(model="m"))]).judges[0] is one
    members = [Fixed("a", ()), Fixed("b", ())]
    Panel(members).close()
    assert all(member.is_closed for member in members)
