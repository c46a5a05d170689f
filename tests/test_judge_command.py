"""`agent-rl judge`: stored episodes judged, continued, applied, compared; without a model.

As the pages say: `agent-rl judge run runs/latest rubric.yaml`, and `agent-rl judge apply`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.cli import main
from agent_rl.core.episode import Episode, Outcome, Reward
from agent_rl.core.judgement import JudgeFault, Judgement, Verdict
from agent_rl.core.messages import Message
from agent_rl.core.usage import Usage
from agent_rl.errors import ConfigError, StoreError
from agent_rl.judge.judged import load_judged
from agent_rl.judge.offline import judge_episodes
from agent_rl.judge.summary import summarise_judged
from agent_rl.rollout.usage import Price
from agent_rl.store import lines
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.store.lines import open_locked
from tests.doubles import example_episode

ANSWERS = ("49", "forty-nine", "49 euros", "")
RUBRIC = """
name: price
criteria:
  - id: number
    text: The answer is a number.
    rule: {regex: '^\\d+$'}
  - id: right
    text: The answer is right.
    weight: 2
    rule: {contains: {task: answer}}
"""


def answered(id: str, answer: str, **changes: object) -> Episode:
    episode = example_episode(id, **changes)
    return replace(episode, messages=(*episode.messages[:-1], Message("assistant", answer)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a rubric and a run of four episodes, and one that failed."""
    with EpisodeWriter(tmp_path / "run") as writer:
        for number, answer in enumerate(ANSWERS):
            own = [{"id": "right", "text": "Right.", "rule": {"contains": answer or "49"}}]
            task = {"question": "?", "answer": "49", "rubric": own}
            writer.write(answered(f"e{number}", answer, group_id=f"g{number // 2}", task=task))
        writer.write(example_episode("failed", outcome=Outcome.FAILED))
    (tmp_path / "rubric.yaml").write_text(RUBRIC)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    status = main(["judge", *argv])
    out, err = capsys.readouterr()
    assert len(err.splitlines()) <= 3 and "Traceback" not in err
    return status, out + err


def test_run_judges_all_that_did_not_fail(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = call(capsys, "run", "run", "rubric.yaml")
    assert status == 0 and "of 4 episodes, 0 unscored" in said
    judged = load_judged("run/judged/price-rules.jsonl")
    scores = {judgement.episode: judgement.score for judgement in judged.judgements}
    assert scores == pytest.approx({"e0": 1.0, "e1": 0.0, "e2": 2 / 3, "e3": 0.0})
    assert judged.header.rubric is not None and judged.header.rubric.name == "price"
    assert judged.header.episodes is not None and judged.header.episodes.file == str(folder / "run")


@pytest.mark.parametrize("where", ["success=yes or outcome=failed", "(outcome=failed)", "not outcome=terminated"])
def test_run_judges_failed_episodes_that_a_condition_names(
    folder: Path, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "run", "run", "rubric.yaml", "--where", where, "-o", "a.jsonl")
    assert "failed" in {judgement.episode for judgement in load_judged("a.jsonl").judgements}


def test_run_again_judges_what_is_missing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "run", "run", "rubric.yaml", "-o", "a.jsonl", "--limit", "2")
    whole = Path("a.jsonl").read_bytes()
    Path("a.jsonl").write_bytes(whole[:-20])  # as a kill leaves it
    with pytest.warns(UserWarning, match="ended in a torn line"):
        call(capsys, "run", "run", "rubric.yaml", "-o", "a.jsonl")
    with EpisodeWriter("run", shard_bytes=1) as writer:  # the run goes on, and closes what was judged
        writer.write(answered("later", "49"))
    call(capsys, "run", "run", "rubric.yaml", "-o", "a.jsonl")
    assert sorted(j.episode for j in load_judged("a.jsonl").judgements) == ["e0", "e1", "e2", "e3", "later"]
    lines = Path("a.jsonl").read_text().splitlines()
    assert len(lines) == 7 and sum(line.startswith('{"judged":1') for line in lines) == 2


def test_run_refuses_to_mix_judgements(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "run", "run", "rubric.yaml", "-o", "a.jsonl")
    Path("heavy.yaml").write_text(RUBRIC.replace("weight: 2", "weight: 3"))
    Path("other.yaml").write_text(RUBRIC.replace("is right", "is wrong"))
    for rubric, message in (("heavy.yaml", "another rubric, with other weights"), ("other.yaml", "another rubric:")):
        status, said = call(capsys, "run", "run", rubric, "-o", "a.jsonl")
        assert status == 1 and message in said and "-o FILE" in said
    with EpisodeWriter("other") as writer:
        writer.write(answered("x" * 30, "49"))
        writer.write(answered("y" * 3000, "49"))
    status, said = call(capsys, "run", "other", "rubric.yaml", "-o", "a.jsonl")
    assert status == 1 and "has judgements of other episodes" in said
    before = Path("run/episodes.jsonl").read_bytes()
    for out, message in (("run/episodes.jsonl", "is the file of the episodes"), ("rubric.yaml", "is no judged file")):
        assert message in call(capsys, "run", "run", "rubric.yaml", "-o", out)[1]
    assert Path("run/episodes.jsonl").read_bytes() == before and Path("rubric.yaml").read_text() == RUBRIC


def test_run_takes_rubrics_of_tasks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, _ = call(capsys, "run", "run", "task:rubric", "-o", "own.jsonl", "--where", "id=e*", "judge.concurrency=1")
    judged = load_judged("own.jsonl")
    assert status == 0 and [j.score for j in judged.judgements] == [1.0, 1.0, 1.0, 0.0]
    assert judged.rubric_of(judged.episodes[1]).criteria[0].rule == ar.Rule("contains", "forty-nine")
    of_weights = [
        replace(each, rubric=replace(own, criteria=(replace(own.criteria[0], weight=weight),)))
        for each, weight in zip(judged.episodes, (1.0, 1.0, 2.0, 2.0), strict=True)
        if (own := each.rubric) is not None
    ]
    rows = summarise_judged(replace(judged, episodes=tuple(of_weights))).criteria
    assert [(row.criterion.weight, row.n, row.mean.value) for row in rows] == [(1.0, 2, 1.0), (2.0, 2, 0.5)]
    status, said = call(capsys, "run", "run", "task:rubrik")
    assert status == 1 and "the task of episode 'e0' has no 'rubrik'. Did you mean 'rubric'?" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "gone.yaml"], "gone.yaml can't be read"),
        (["gone", "rubric.yaml"], "there is no episode file gone/episodes.jsonl"),
        (["run", "asked.yaml"], "needs a model: criterion 'Polite' has no rule"),
        (["run", "rubric.yaml", "--where", "reward>9"], "none of its 5 episodes fits reward>9 and outcome!=failed"),
        (["run", "rubric.yaml", "-o", "a.jsonl", "judge.sample=2"], "Did you mean 'judge.samples'?"),
        (["run", "rubric.yaml", "judge.model=m", "--max-cost", "5"], "max_cost needs prices"),
        (["run", "rubric.yaml", "judge.model=m"], "judge.model=m: rubric 'price' never asks it"),
    ],
)
def test_run_explains_mistakes(
    folder: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("asked.yaml").write_text("criteria: [{id: Polite, text: Polite.}]")
    status, said = call(capsys, "run", *words)
    assert status == 1 and message in said
    assert not Path("run/judged").exists()


def test_score_interval_draws_tasks_and_not_their_groups(tmp_path: Path) -> None:
    with EpisodeWriter(tmp_path / "run") as writer:
        for number, answer in enumerate(("49", "no", "49", "no")):  # two visits of each of two tasks
            task = {"answer": "49", "number": number // 2}
            writer.write(answered(f"e{number}", answer, group_id=f"g{number}", task=task))
    rubric: dict[str, object] = {"criteria": [{"rule": {"contains": {"task": "answer"}}}]}
    score = summarise_judged(judge_episodes(tmp_path / "run", rubric)).score
    assert (score.low, score.value, score.high) == (0.5, 0.5, 0.5)


class Costly:
    """Judges each episode for a tenth of a dollar; those in `faults` fail, each once."""

    name = "costly"

    def __init__(self, faults: dict[str, JudgeFault]) -> None:
        self.faults, self.asked = dict(faults), list[str]()

    async def judge(self, episode: Episode, rubric: ar.Rubric) -> Judgement:
        self.asked.append(episode.id)
        fault = self.faults.pop(episode.id, None)
        value = None if fault else 1.0
        verdicts = tuple(Verdict(c.id, "yes" if value else None, value, error=fault) for c in rubric.criteria)
        used = Usage("m", 50_000, 25_000, finish_reason="stop", seconds=0.5)
        suspect = ("give full marks",) if episode.id == "e1" else ()
        return Judgement(rubric.label, self.name, verdicts, value, episode.id, suspect, (used,), 1.0)

    def close(self) -> None: ...


def test_run_again_asks_once_more_after_passing_faults(folder: Path) -> None:
    judge = Costly({"e0": JudgeFault.TIMEOUT, "e1": JudgeFault.REFUSED, "e2": JudgeFault.COST})
    first = judge_episodes("run", "rubric.yaml", judge, out="a.jsonl")
    assert {j.episode: j.faults[:1] for j in first.judgements} == {
        "e0": (JudgeFault.TIMEOUT,),
        "e1": (JudgeFault.REFUSED,),
        "e3": (),
    }
    judge.asked.clear()
    found = judge_episodes("run", "rubric.yaml", judge, out="a.jsonl")
    assert sorted(judge.asked) == ["e0", "e2"] and len(found.judgements) == 4
    summary = summarise_judged(found, {"m": Price(input=1, output=2)})
    assert (summary.scored, summary.unscored, summary.faults) == (3, 1, {"refused": 1})
    assert summary.cost == pytest.approx(0.6) and summary.usage.replies == 6  # with the calls that were in vain
    assert summary.suspect.successes == 1 and summary.score.value == 1.0


def test_judged_file_keeps_what_json_lacks(folder: Path) -> None:
    class Odd(Costly):
        async def judge(self, episode: Episode, rubric: ar.Rubric) -> Judgement:
            verdict = Verdict("right", "yes", 1.0, "half \ud800", "\ufdd0", votes={"yes": 2, "no": 1})
            return Judgement(rubric.label, self.name, (verdict,), None, episode.id)

    written = judge_episodes("run", "rubric.yaml", Odd({}), out="a.jsonl").judgements[0].verdicts[0]
    assert (written.reason, written.evidence, written.votes) == ("half \ud800", "\ufdd0", {"yes": 2, "no": 1})


def test_load_judged_names_the_damaged_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "run", "run", "rubric.yaml", "-o", "a.jsonl")
    lines = Path("a.jsonl").read_text().splitlines(keepends=True)
    Path("a.jsonl").write_text("".join([*lines[:2], '{"judgement": 3}\n', *lines[2:]]))
    with pytest.raises(StoreError, match=r"a.jsonl:3 is damaged: judgement: .*delete it to read the others"):
        load_judged("a.jsonl")
    with pytest.raises(StoreError, match=r"there is no judged file b.jsonl"):
        load_judged("b.jsonl")


def test_apply_replaces_rewards_and_keeps_the_old_ones(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "run", "run", "rubric.yaml", "-o", "a.jsonl", "--limit", "3")
    status, said = call(capsys, "apply", "a.jsonl", "-o", "new/episodes.jsonl", "--weight", "0.5")
    assert status == 0 and "3 episodes in new/episodes.jsonl, 0 of them unscored; 2 without a judgement" in said
    old, new = next(iter(read_episodes("run"))), next(iter(read_episodes("new")))
    assert new.reward == 0.5 and new.judgements[0].score == 1.0
    assert new.rewards[0] == Reward("correct", 1 / 3, 0.0, "env, replaced (weight 1)")
    assert [r.weight for r in new.rewards] == [0, 0, 0, 0.5] and new.rewards[-1].source == "judge"
    assert new.success == old.success and new.trajectories[0].spans == old.trajectories[0].spans
    assert replace(new, rewards=old.rewards, judgements=(), trajectories=old.trajectories) == old
    assert main(["view", "new", "e0"]) == 0
    shown = capsys.readouterr().out
    assert "price@1#" in shown and "contains: met" in shown and "“49”" in shown
    status, said = call(capsys, "apply", "a.jsonl", "-o", "new")
    assert status == 1 and "has 3 episodes already" in said
    status, said = call(capsys, "apply", "a.jsonl", "-o", "nan", "--weight", "nan")
    assert status == 1 and "weight=nan: give a finite number" in said and not Path("nan").exists()
    call(capsys, "apply", "a.jsonl", "--add")
    added = next(iter(read_episodes("a.episodes.jsonl")))
    assert added.reward == pytest.approx((old.reward or 0) + 1.0)


THEIRS = ["run", "run", "rubric.yaml", "--limit", "3", "-o", "a.jsonl"]


@pytest.mark.parametrize(
    ("theirs", "words", "status", "message"),
    [
        (THEIRS, ["run", "run", "rubric.yaml", "-o", "a.jsonl"], 0, "4 judgements in a.jsonl"),
        (THEIRS, ["run", "run", "other.yaml", "-o", "a.jsonl"], 1, "a.jsonl was judged under another rubric"),
        (["apply", "b.jsonl", "-o", "a.jsonl"], ["apply", "b.jsonl", "-o", "a.jsonl"], 1, "has 3 episodes already"),
    ],
)
def test_writer_heeds_what_another_process_wrote_before_its_lock(
    folder: Path,
    theirs: list[str],
    words: list[str],
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("other.yaml").write_text(RUBRIC.replace("price", "prize"))
    call(capsys, "run", "run", "rubric.yaml", "-o", "b.jsonl", "--limit", "3")

    def late(path: Path, **options: bool) -> int:
        if path == Path("a.jsonl") and not path.exists():
            subprocess.run([sys.executable, "-m", "agent_rl", "judge", *theirs], check=True, capture_output=True)
        return open_locked(path, **options)

    monkeypatch.setattr(lines, "open_locked", late)
    found, said = call(capsys, *words)
    assert (found, message in said) == (status, True), said
    is_judged = words[0] == "run"  # with a header, and no line twice
    assert len(Path("a.jsonl").read_text().splitlines()) == is_judged + (3 if status else 4)


@pytest.mark.parametrize("words", [["apply", "-o", "new.jsonl"], ["report", "--html", "new.html"]])
def test_episodes_that_were_not_judged_are_refused(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    call(capsys, "run", "run", "rubric.yaml", "-o", "a.jsonl")
    with EpisodeWriter(folder / "other") as writer:
        writer.write(answered("x0", "49"))
        writer.write(answered("e0", "49", task={"answer": "another run's"}))
    EpisodeWriter(folder / "empty").close()
    for file, there in (("other", "e0, x0"), ("empty", "none")):
        status, said = call(capsys, words[0], "a.jsonl", *words[1:], "--episodes", file)
        assert status == 1 and f"{file} has none of the episodes that a.jsonl judges: there is {there}, judged" in said
        assert "judged e0, e1, e2 and 1 more; name their file with --episodes FILE" in said
    assert not list(Path().glob("new*"))


def test_compare_agree_and_report_print_and_give_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "run", "run", "rubric.yaml", "-o", "a.jsonl")
    Path("lenient.yaml").write_text(RUBRIC.replace("'^\\d+$'", "'\\w'"))
    call(capsys, "run", "run", "lenient.yaml", "-o", "b.jsonl")
    status, said = call(capsys, "compare", "a.jsonl", "b.jsonl")
    assert status == 0 and "over 4 episodes" in said and "The most different verdicts" in said
    found = json.loads(call(capsys, "compare", "a.jsonl", "b.jsonl", "--json")[1])
    assert found["score"]["difference"]["value"] == pytest.approx(2 / 3 / 4)
    Path("labels.csv").write_text(
        "episode_id,criterion_id,label\ne0,right,yes\ne1,right,yes\ne2,right,yes\ne3,right,no\n"
    )
    status, said = call(capsys, "agree", "a.jsonl", "labels.csv")
    assert status == 0 and "over 4 labels of 4 episodes" in said
    assert json.loads(call(capsys, "agree", "a.jsonl", "labels.csv", "--json")[1])["total"]["metrics"]["tpr"][
        "value"
    ] == pytest.approx(2 / 3)
    assert json.loads(call(capsys, "report", "a.jsonl", "--json")[1])["score"]["value"] == pytest.approx(5 / 12)
    assert "Wrote pages/a.html" in call(capsys, "report", "a.jsonl", "--html", "pages/a.html")[1]
    assert "forty-nine" in Path("pages/a.html").read_text()
    Path("run").rename("moved")
    status, said = call(capsys, "apply", "a.jsonl", "-o", "c.jsonl")
    assert status == 1 and "name their file with --episodes FILE" in said


def test_tables_show_no_interval_of_a_single_task(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "run", "run", "rubric.yaml", "--where", "id=e1", "-o", "a.jsonl")
    Path("labels.csv").write_text("episode_id,criterion_id,label\ne1,right,no\ne1,number,no\n")
    for words in (["compare", "a.jsonl", "a.jsonl"], ["agree", "a.jsonl", "labels.csv"]):
        status, said = call(capsys, *words)
        assert status == 0 and "1.000" in said and "nan" not in said


def test_probe_finds_what_rewards_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("naive.yaml").write_text("criteria: [{text: Short., rule: {regex: '^.{0,20}$'}}]")
    status, said = call(capsys, "probe", "naive.yaml", "--episodes", "run", "--limit", "2")
    assert status == 1 and "an empty answer scores 1.00" in said
    EpisodeWriter(folder / "empty").close()
    with EpisodeWriter(folder / "failed") as writer:
        writer.write(answered("f", "49", outcome=Outcome.FAILED))
    for file in ("empty", "failed"):
        status, said = call(capsys, "probe", "naive.yaml", "--episodes", file)
        assert status == 1 and f"{file} has no episode, or failed ones alone; leave out --episodes" in said


def test_judge_episodes_refuses_settings_that_have_no_meaning(folder: Path) -> None:
    with pytest.raises(ConfigError, match="samples"):
        judge_episodes("run", "rubric.yaml", {"samples": 0})
