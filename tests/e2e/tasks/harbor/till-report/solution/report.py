"""Prints the report of a folder of tills' exports; FORMAT.md says what is in both."""

import csv
import json
import sys
from collections import defaultdict
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path


def amount_of(text: str) -> Decimal:
    """Return an amount whose last sign but two parts the decimals."""
    whole, decimals = text.strip()[:-3], text.strip()[-2:]
    return Decimal(f"{whole.replace('.', '').replace(',', '')}.{decimals}")


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the rows of an export."""
    text = file.read_text(encoding="utf-8-sig")
    return list(csv.DictReader(text.splitlines(), delimiter=";" if ";" in text.splitlines()[0] else ","))


def report(folder: Path) -> dict[str, object]:
    """Return the report of a folder."""
    latest: dict[str, tuple[datetime, str, dict[str, str]]] = {}
    shops = {}
    for file in sorted(folder.glob("*.csv")):
        shops[file.stem] = {"orders": 0, "paid": Decimal(0), "refunded": Decimal(0)}
        for row in rows_of(file):
            time = datetime.fromisoformat(row["updated"]).astimezone(UTC)
            if row["order"] not in latest or time > latest[row["order"]][0]:
                latest[row["order"]] = time, file.stem, row
    days: dict[str, Decimal] = defaultdict(Decimal)
    for time, shop, row in latest.values():
        if row["status"] == "void":
            continue
        shops[shop]["orders"] += 1
        shops[shop][row["status"]] += amount_of(row["amount"])
        if row["status"] == "paid":
            days[time.date().isoformat()] += amount_of(row["amount"])
    return {"days": days, "shops": shops}


if __name__ == "__main__":
    print(json.dumps(report(Path(sys.argv[1])), indent=2, sort_keys=True, default="{:.2f}".format))
