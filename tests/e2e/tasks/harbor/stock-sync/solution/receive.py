"""Adds a delivery to the stock."""

import csv
import json
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def ask(path: str, count: int | None = None, version: int = 0) -> tuple[int, dict]:
    """Return the status and the JSON of an answer, once the service has time for one."""
    data = None if count is None else json.dumps({"count": count}).encode()
    headers = {"If-Match": str(version)}
    request = Request(f"http://stock:8000{path}", data, headers, method="GET" if data is None else "PUT")
    while True:
        try:
            with urlopen(request) as answer:
                return answer.status, json.load(answer)
        except HTTPError as error:
            if error.code != 503:
                return error.code, {}
            time.sleep(0.01)


def add(sku: str, quantity: int) -> bool:
    """Add to an item's count, whatever is sold meanwhile; return whether there is such an item."""
    while True:
        status, item = ask(f"/items/{sku}")
        if status == 404:
            return False
        status, _ = ask(f"/items/{sku}", item["count"] + quantity, item["version"])
        if status == 200:
            return True


with Path(sys.argv[1]).open() as lines:
    delivered = Counter[str]()
    for row in csv.DictReader(lines):
        delivered[row["sku"]] += int(row["quantity"])
added = {sku: quantity for sku, quantity in delivered.items() if add(sku, quantity)}
path, empty = "/items", list[str]()
while path:
    _, page = ask(path)
    empty += [item["sku"] for item in page["items"] if not item["count"]]
    path = page["next"]
print(json.dumps({"added": added, "unknown": sorted(delivered.keys() - added.keys()), "empty": sorted(empty)}))
