"""The stock after the delivery, and after another one: every quantity was added once, and every sale counts."""

import json
import subprocess
import sys
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

FIRST = {"added": {"A-03": 6, "B-07": 10, "C-11": 2, "C-24": 1}, "unknown": ["Z-99"]}
SECOND = {"added": {"A-03": 1, "A-09": 3, "C-25": 8}, "unknown": ["D-01", "X-00"]}
BEFORE = {f"{row}-{n:02}": (n * 7) % 9 for row in "ABC" for n in range(1, 26)}


def ask(path: str) -> dict:
    """Return the service's answer, which may be busy."""
    while True:
        try:
            with urlopen(f"http://stock:8000{path}") as answer:
                return json.load(answer)
        except HTTPError as error:
            assert error.code == 503


def check(told: dict, *received: dict) -> None:
    """Compare what was told with the deliveries, and these with the stock."""
    log = [line.split() for line in ask("/log")]
    assert {key: told[key] for key in ("added", "unknown")} == received[-1]
    counts = dict(BEFORE)
    for delivery in received:
        for sku, quantity in delivery["added"].items():
            counts[sku] += quantity
    for word, sku, *_ in log:
        counts[sku] -= word == "sold"
    assert {sku: ask(f"/items/{sku}")["count"] for sku in counts} == counts
    assert told["empty"] == sorted(sku for sku, count in counts.items() if not count)
    assert sum(word == "set" for word, *_ in log) == sum(len(delivery["added"]) for delivery in received)


def test_delivery_is_in_the_stock() -> None:
    check(json.loads(Path("/app/received.json").read_text()), FIRST)


def test_further_delivery_comes_into_the_stock(tmp_path: Path) -> None:
    lines = ["quantity,sku", "8,C-25", "1,X-00", "1,A-09", "2,A-09", "1,A-03", "7,D-01"]
    (tmp_path / "next.csv").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "/app/receive.py", str(tmp_path / "next.csv")]
    check(json.loads(subprocess.run(command, capture_output=True, check=True).stdout), FIRST, SECOND)
