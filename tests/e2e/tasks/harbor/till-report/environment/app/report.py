"""Prints the report of a folder of tills' exports; FORMAT.md says what is in both."""

import csv
import json
import sys
from pathlib import Path


def report(folder: Path) -> dict[str, object]:
    """Return the report of a folder."""
    rows = {}
    for file in folder.glob("*.csv"):
        with file.open(encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                rows[file.stem, row["order"]] = row
    shops: dict[str, dict[str, float]] = {}
    days: dict[str, float] = {}
    for (shop, _), row in rows.items():
        sums = shops.setdefault(shop, {"orders": 0, "paid": 0.0, "refunded": 0.0})
        amount = float(row["amount"].replace(",", ""))
        sums["orders"] += 1
        sums[row["status"]] += amount
        day = row["updated"][:10]
        days[day] = days.get(day, 0.0) + amount
    return {"days": days, "shops": shops}


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1])), indent=2, sort_keys=True))
