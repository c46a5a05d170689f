"""metrics.jsonl: every row once, also after a kill."""

import json
from pathlib import Path

from agent_rl.runs.metrics import MetricsLog, read_metrics


def test_rows_are_written_once_per_key_and_survive_a_torn_tail(tmp_path: Path) -> None:
    with MetricsLog(tmp_path) as log:
        log.write("train", 1, {"loss": 0.5, "broken": float("nan")})
        log.write("eval", 1, {"split": "dev", "sampling": "greedy", "success": 0.5})
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(file.read_bytes() + b'{"kind": "train", "st')
    assert len(read_metrics(file)) == 2
    with MetricsLog(tmp_path) as log:
        log.write("train", 1, {"loss": 9.0})  # a resumed run repeats the step
        log.write("train", 2, {"loss": 0.25})
        log.write("eval", 1, {"split": "dev", "sampling": "sampled", "success": 0.25})
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["kind"], r["step"], r.get("loss"), r.get("sampling")) for r in rows] == [
        ("train", 1, 0.5, None),
        ("eval", 1, None, "greedy"),
        ("train", 2, 0.25, None),
        ("eval", 1, None, "sampled"),
    ]
    assert rows[0]["broken"] is None


def test_a_missing_file_has_no_rows(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
