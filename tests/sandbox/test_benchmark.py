"""The sandboxes' benchmark from end to end, shortened: its figures mean nothing, but all must be there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sandbox
ROOT = Path(__file__).resolve().parents[2]
HURRIED = """\
import sys
sys.path.insert(0, "benchmarks")
import sandbox_measures
sandbox_measures.SECONDS, sandbox_measures.AT_LEAST, sandbox_measures.AT_REST = 0.1, 1, 1
sandbox_measures.AT_ONCE = 2
import sandbox
sandbox.ROUNDS = 1
print(*sandbox.LOCAL, *sandbox.ON_DOCKER, sep="\\n")
sys.exit(sandbox.main())"""


def test_benchmark_measures_or_names_every_contestant() -> None:
    command = [sys.executable, "-c", HURRIED]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert ran.returncode in (0, 1) and not ran.stderr, ran.stderr
    names, report = ran.stdout.split("load ", 1)
    no_docker = "LEFT OUT  everything on Docker: " in report
    for name in names.splitlines():
        measured = f"\n  {name} " in report and f"measuring {name}" in report
        assert measured or f"LEFT OUT  {name}: " in report or no_docker, report
    assert not re.search(r"LEFT OUT  [^:]*: \w+Error: ", report), f"something failed that is not just missing\n{report}"
    assert len(re.findall(r"^(?:PASS|FAIL|NOT RUN)  ", report, re.MULTILINE)) == 6
    assert "NOT RUN  agent_rl jail" not in report or "LEFT OUT  agent_rl jail" in report
