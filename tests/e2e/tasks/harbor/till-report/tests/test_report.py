"""The report of March, and of a month that nobody saw."""

import json
import subprocess
import sys
from pathlib import Path

APRIL = {
    "days": {"2026-03-31": "0.10", "2026-04-01": "0.20", "2026-04-30": "10000.01"},
    "shops": {
        "berlin": {"orders": 3, "paid": "0.30", "refunded": "5.00"},
        "lyon": {"orders": 2, "paid": "10000.01", "refunded": "33.30"},
        "nice": {"orders": 0, "paid": "0.00", "refunded": "0.00"},
    },
}
MARCH = {
    "days": {"2026-03-02": "2279.60", "2026-03-04": "0.30"},
    "shops": {
        "berlin": {"orders": 2, "paid": "1234.50", "refunded": "19.90"},
        "lyon": {"orders": 3, "paid": "1000.40", "refunded": "0.00"},
        "oslo": {"orders": 1, "paid": "45.00", "refunded": "0.00"},
    },
}


def said(folder: Path) -> str:
    """Return what the report's program prints."""
    command = [sys.executable, "/app/report.py", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_report_of_march() -> None:
    assert json.loads(said(Path("/app/exports/2026-03"))) == MARCH


def test_report_of_april() -> None:
    assert said(Path(__file__).parent / "2026-04") == json.dumps(APRIL, indent=2, sort_keys=True) + "\n"
