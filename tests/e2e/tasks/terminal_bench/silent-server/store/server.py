"""A key-value server with a journal; README.md says how it behaves."""

import configparser
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

settings = configparser.ConfigParser()
settings.read("settings.ini")
DATA = Path(settings["server"]["data"])
JOURNAL, LOCK = DATA / "journal.jsonl", DATA / "lock"
changing = threading.Lock()


def load() -> dict[str, str]:
    """Return what the journal says."""
    keys = {}
    for line in JOURNAL.read_text(encoding="utf-8").splitlines():
        word, key, *text = json.loads(line)
        if word == "put":
            keys[key] = text[0]
        else:
            del keys[key]
    return keys


class Handler(BaseHTTPRequestHandler):
    """Answers requests."""

    def do_GET(self) -> None:
        """Answer with a value."""
        if self.path == "/health":
            self.answer(200, f"ok {len(keys)}")
        else:
            self.answer(200, keys[self.key()])

    def do_PUT(self) -> None:
        """Store a value."""
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        with changing:
            keys[self.key()] = text
            self.note("put", self.key(), text)
        self.answer(204)

    def do_DELETE(self) -> None:
        """Remove a value."""
        with changing:
            del keys[self.key()]
            self.note("delete", self.key())
        self.answer(204)

    def key(self) -> str:
        """Return the key of the request."""
        return unquote(self.path.removeprefix("/keys/"))

    def note(self, *line: str) -> None:
        """Add a line to the journal."""
        journal.write(json.dumps(line, ensure_ascii=False) + "\n")

    def answer(self, status: int, text: str = "") -> None:
        """Send text."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


if LOCK.exists():
    sys.exit(f"another server is running: {LOCK}")
LOCK.write_text(str(os.getpid()))
keys = load()
journal = JOURNAL.open("a", encoding="utf-8")
ThreadingHTTPServer.request_queue_size = 128
ThreadingHTTPServer((settings["server"]["host"], settings.getint("server", "port")), Handler).serve_forever()
