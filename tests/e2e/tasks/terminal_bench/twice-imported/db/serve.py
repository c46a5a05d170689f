"""A SQLite database behind HTTP: a request is a transaction."""

import json
import sqlite3
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

database = sqlite3.connect("/data/shop.sqlite", isolation_level=None)
database.executescript(Path(sys.argv[1]).read_text())


class Handler(BaseHTTPRequestHandler):
    """Answers one transaction at a time."""

    def do_POST(self) -> None:
        """Run statements, all or none."""
        try:
            statements = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            database.execute("BEGIN")
            words = [[each] if isinstance(each, str) else each for each in statements]
            self.answer(200, [database.execute(text, given).fetchall() for text, *given in words])
            database.execute("COMMIT")
        except Exception as error:
            if database.in_transaction:
                database.execute("ROLLBACK")
            self.answer(400, str(error))

    def answer(self, status: int, value: object) -> None:
        """Send JSON."""
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


server = HTTPServer(("0.0.0.0", 4001), Handler)
Path("/data/ready").touch()
server.serve_forever()
