"""docs/judges.md and docs/model_judges.md: every block of them runs, and prints what it says."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from agent_rl.cli import main
from agent_rl.policy import openai_client
from agent_rl.store.episodes import EpisodeWriter
from tests.fake_judge import Asked, Entries, FakeJudge, answered
from tests.fake_openai import FakeOpenAI
from tests.pages import page, shell_lines

BLOCKS = re.findall(r"```(\w+)\n(.*?)```", page("docs/judges.md") + page("docs/model_judges.md"), re.DOTALL)
SERVER = "http://host:8000/v1"


def polite(asked: Asked) -> Entries:
    """Judge as a model that finds every answer polite."""
    return {
        c["id"]: {
            "reason": "It says so.",
            "evidence": "It is",
            "verdict": c["choices"][-1] if c["id"] == "is-polite" else "no",
        }
        for c in asked.criteria
    }


def test_judges_pages_print_their_stated_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the pages from top to bottom as one module, in a folder with their files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(openai_client, "PAUSE", 0.0)
    printed: list[str] = []
    scope = {"__name__": "judges_page", "print": lambda *said: printed.append(" ".join(map(str, said)))}
    with FakeOpenAI(FakeJudge(decide=polite)) as server:
        for language, block in BLOCKS:
            if language == "yaml":
                Path(re.match(r"# (\S+)\n", block)[1]).write_text(block, encoding="utf-8")  # type: ignore[index]
            elif language == "python":
                printed.clear()
                exec(compile(block.replace(SERVER, server.url), "docs/judges.md", "exec"), scope)
            elif language == "text":
                assert "\n".join(printed) == block.rstrip("\n")


def test_judges_page_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run them in their order, in a folder with the files that are the reader's own."""
    monkeypatch.chdir(tmp_path)
    with EpisodeWriter("runs/latest") as writer:
        for number in range(2):
            writer.write(answered("It is 7.", id=f"e{number}"))
    Path("helpful.yaml").write_text("criteria: [Names a prime number.]")
    Path("prices.yaml").write_text("gpt-5-mini: {input: 0.25, cached: 0.025, output: 2}")
    Path("labels.csv").write_text("episode_id,criterion_id,label\ne0,names-a-prime-number,yes\n")
    with FakeOpenAI(FakeJudge(decide=polite)) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        for line in shell_lines(page("docs/judges.md")):
            assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr().err)
            if " judge run " in line:
                for name in ("one.jsonl", "other.jsonl"):
                    shutil.copy("runs/latest/judged/helpful-gpt-5-mini.jsonl", name)
