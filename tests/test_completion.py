"""`agent-rl completion`: what the script offers in a real shell; `--log-level`."""

from __future__ import annotations

import logging
import shutil
import subprocess
from pathlib import Path

import pytest

from agent_rl.cli import main


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("completion") / "agent-rl.bash"
    with pytest.MonkeyPatch.context() as patched, file.open("w") as out:
        patched.setattr("sys.stdout", out)
        assert main(["completion", "bash"]) == 0
    return file


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("agent-rl vi", ["view"]),
        ("agent-rl runs --j", ["--json"]),
        ("agent-rl rollout env=sear", ["search-v0"]),
        ("agent-rl check sear", ["search-v0"]),
        ("agent-rl check search-v0 --j", ["--json"]),
        ("agent-rl play sear", ["search-v0"]),
        ("agent-rl replay fork runs/latest --at", ["--at-turn"]),
        ("agent-rl train algorithm=m2", ["m2po", "m2po-paper"]),
        ("agent-rl train rollout.gr", ["rollout.groups="]),
        ("agent-rl rollout policy=oracle conc", ["concurrency="]),
        ("agent-rl view runs/latest --wh", ["--where"]),
        ("agent-rl episodes runs/latest --cou", ["--count"]),
        ("agent-rl completion z", ["zsh"]),
        ("agent-rl view runs/la", []),
    ],
)
def test_completion_offers_words_in_bash(script: Path, typed: str, offered: list[str]) -> None:
    ask = f"source {script}; COMP_LINE='{typed}' COMP_POINT={len(typed)}; _agent_rl; echo \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "--norc", "-c", ask], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (offered, "")


def test_completion_sets_zsh_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert "bashcompinit" in capsys.readouterr().out


def test_log_level_shows_library_logs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[object] = []
    monkeypatch.setattr(logging, "basicConfig", lambda **options: asked.append(options["level"]))
    assert main(["envs"]) == 0 and main(["envs", "--log-level", "debug"]) == 0
    assert (
        main(["--log-level", "info", "envs"]) == 0
        and main(["--log-level", "info", "envs", "--log-level", "error"]) == 0
    )
    assert asked == ["DEBUG", "INFO", "ERROR"]
    with pytest.raises(SystemExit):
        main(["envs", "--log-level", "loud"])
    assert "invalid choice: 'loud'" in capsys.readouterr().err
