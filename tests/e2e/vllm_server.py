"""A vLLM server on CPU."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.verl_cpu.settings import ENVIRONMENT

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": f"{ROOT}:{HERE}",
        "NO_PROXY": "127.0.0.1",
        "no_proxy": "127.0.0.1",
    }


@contextmanager
def serving(python: Path, model: Path, log: Path, *options: str) -> Iterator[str]:
    """Yield the address of a server of a model, in float32; its name there is the folder."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--no-enable-chunked-prefill", *options),
    ]
    with log.open("w") as out:
        server = subprocess.Popen(command, env=environment(), stdout=out, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(900):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1)
                break
            except OSError:
                time.sleep(1)
        yield address
    finally:
        server.terminate()
        server.wait(60)
