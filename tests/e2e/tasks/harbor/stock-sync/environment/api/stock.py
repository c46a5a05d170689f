"""A warehouse's stock: busy now and then, and something is sold just before the first change of an item."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

PAGE, BUSY_EVERY = 20, int(os.environ["BUSY_EVERY"])
ITEMS = {f"{row}-{n:02}": {"count": (n * 7) % 9, "version": 1} for row in "ABC" for n in range(1, 26)}
LOG: list[str] = []
sold: set[str] = set()
requests = 0
lock = threading.Lock()


class Handler(BaseHTTPRequestHandler):
    """Answers one request at a time."""

    def do_GET(self) -> None:
        """Answer with items."""
        where = urlsplit(self.path)
        with lock:
            if where.path == "/log":  # for those who look after the service
                self.answer(200, LOG)
            elif not self.busy():
                self.look(where.path, parse_qs(where.query).get("after", [""])[0])

    def do_PUT(self) -> None:
        """Set the count of an item."""
        text = self.rfile.read(int(self.headers["Content-Length"]))
        with lock:
            if not self.busy():
                self.change(self.path.rpartition("/")[2], json.loads(text)["count"])

    def look(self, path: str, after: str) -> None:
        """Answer with an item, or a page of them."""
        sku = path.removeprefix("/items").strip("/")
        if sku:
            self.answer(*((200, {"sku": sku, **ITEMS[sku]}) if sku in ITEMS else (404, {})))
            return
        left = [sku for sku in sorted(ITEMS) if sku > after]
        page = [{"sku": sku, **ITEMS[sku]} for sku in left[:PAGE]]
        self.answer(200, {"items": page, "next": f"/items?after={left[PAGE - 1]}" if len(left) > PAGE else None})

    def change(self, sku: str, count: int) -> None:
        """Set a count, unless its item has changed since."""
        item = ITEMS.get(sku)
        if item is None:
            self.answer(404, {})
            return
        if sku not in sold and item["count"]:
            sold.add(sku)
            item["count"] -= 1
            item["version"] += 1
            LOG.append(f"sold {sku}")
        if self.headers["If-Match"] != str(item["version"]):
            self.answer(412, {})
            return
        LOG.append(f"set {sku} {item['count']} {count}")
        item["count"], item["version"] = count, item["version"] + 1
        self.answer(200, {"sku": sku, **item})

    def busy(self) -> bool:
        """Refuse some of the requests."""
        global requests
        requests += 1
        if requests % BUSY_EVERY == 0:
            self.answer(503, {})
        return requests % BUSY_EVERY == 0

    def answer(self, status: int, value: object) -> None:
        """Send JSON."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


ThreadingHTTPServer(("0.0.0.0", 8000), Handler).serve_forever()
