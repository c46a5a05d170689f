"""A registry of one image, for a Docker engine on this machine: it asks for a password."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

USER, PASSWORD = "me", "hidden"
_TYPES = "application/vnd.docker."
MANIFEST = f"{_TYPES}distribution.manifest.v2+json"


def _digest(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def blobs_of(saved: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Return the manifest and the blobs, by digest, of an image as `docker save` writes it."""
    with tarfile.open(fileobj=io.BytesIO(saved)) as tar:

        def read(name: str) -> bytes:
            file = tar.extractfile(name)
            assert file is not None
            return file.read()

        (about,) = json.loads(read("manifest.json"))
        config, layers = read(about["Config"]), [read(layer) for layer in about["Layers"]]
    kinds = [(f"{_TYPES}container.image.v1+json", config)]
    kinds += [(f"{_TYPES}image.rootfs.diff.tar.gzip", layer) for layer in layers]
    entries = [{"mediaType": kind, "size": len(data), "digest": _digest(data)} for kind, data in kinds]
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": entries[0], "layers": entries[1:]}
    return json.dumps(manifest).encode(), {_digest(data): data for _, data in kinds}


@contextlib.contextmanager
def registry(saved: bytes) -> Iterator[str]:
    """Serve an image as mine/image:1; yield the registry's address."""
    manifest, blobs = blobs_of(saved)
    known = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, data = 200, "application/octet-stream", b"{}"
            if self.headers["Authorization"] != f"Basic {known}":
                status = 401
            elif "/manifests/" in self.path:
                kind, data = MANIFEST, manifest
            elif "/blobs/" in self.path:
                data = blobs[self.path.rpartition("/")[2]]
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="tests"')
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Docker-Content-Digest", _digest(data))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(data)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
