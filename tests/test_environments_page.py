"""docs/environments.md: every block of it runs, and what it makes can be solved and replayed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import agent_rl as ar
from agent_rl.cli import main
from tests.pages import blocks, commands, page

PAGE = page("docs/environments.md")
BLOCKS = blocks(PAGE, "python")
SOLVABLE = {
    "riddle-v0": 1.0,
    "successor-v0": 1.0,
    "stock-v0": 1.1,
    "colours-v0": 1.0,
    "sums-v0": 1.0,
    "python-sums-v0": 1.0,
    "explained-sums-v0": 1.5,
    "returns-v0": 1.0,
    "twenty-v0": 1.0,
}


@pytest.fixture(scope="module", autouse=True)
def printed() -> str:
    """Run the page from top to bottom as one module; return what it prints."""
    lines: list[str] = []
    scope = {"__name__": "environments_page", "print": lambda *said: lines.append(" ".join(map(str, said)))}
    for block in BLOCKS:
        exec(compile(block, "docs/environments.md", "exec"), scope)
    return "\n".join(lines)


def test_environments_page_prints_its_stated_output(printed: str) -> None:
    success, episode, opened, zoom, image, players, rewards, judged, check, result, estimates, rules, *lake = (
        printed.splitlines()
    )
    assert "100.0%" in success
    assert zoom == "Which colour is this? `zoom` shows it larger."
    assert re.fullmatch(r"\[image: png 8x8, sha256 [0-9a-f]{12}\]", image)
    assert episode.startswith("['Which number from 1 to 32 do I think of?', '16', 'less'") and episode.endswith("] 1.0")
    assert opened == "['user: What follows 4?', 'assistant: 5']"
    assert players == "0 1.0 1 0.0"
    assert rewards == "[('correct', 1.0), ('honest', 1.0), ('shortest', 1.0)]"
    assert judged == "1.5 [('names-both-numbers', 'yes'), ('is-unsure', 'no'), ('has-an-answer', 'yes')]"
    assert check == "() 0.0"
    assert result.startswith("100.0% [51.0%, 100.0%] of 4") and result.endswith(" 1.1 (nan, nan) 0")
    assert estimates.startswith("1.0 1.0 {'desk': Evaluation(") and "{'done': 4} {} " in estimates
    assert rules.endswith("Answer with left, down, right or up.") and lake == ["[S]FFF", "FHFH", "FFFH", "HFFG"]


@pytest.mark.parametrize("env", SOLVABLE)
def test_environments_page_environment_is_solved_by_its_oracle(env: str) -> None:
    found = ar.evaluate(env, "oracle", n=3)
    assert (found.failed, found.reward) == (0, pytest.approx(SOLVABLE[env]))


def test_environments_page_registers_tested_environments_only() -> None:
    named = re.findall(r'register\(\s*"([^"]+)"', "".join(BLOCKS))
    assert sorted(named) == sorted([*SOLVABLE, "brief-stock-v0", "lake-v0"])


def test_environments_page_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("riddle.py").write_text(BLOCKS[0].replace("riddle-v0", "page-riddle-v0"), encoding="utf-8")
    lines = [line for line in commands(PAGE) if "--import" in line]
    assert [line.split()[1] for line in lines] == ["rollout", "train"]
    for line in lines:
        check = ["--dry-run"] if line.split()[1] == "train" else []
        assert main([*line.replace("riddle-v0", "page-riddle-v0").split()[1:], *check]) == 0, line
    assert "success 100.0%" in capsys.readouterr().out
