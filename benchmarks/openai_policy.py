"""CPU of a reply of policy=openai beside the bare SDK: `python benchmarks/openai_policy.py`.

Both ask one local server, in a process of its own, for the same reply, with the same messages; the numbers are CPU time
(user and system, all threads of this process) per reply, the least of several repetitions, one at a time and 32.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection

import openai

from agent_rl import Message, OpenAIPolicy

REPETITIONS, REPLIES = 5, 256
MESSAGES = [{"role": "system", "content": "You are terse. " * 20}, {"role": "user", "content": "What is 6 times 7?"}]
BODY = json.dumps(
    {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "42"}}],
        "usage": {"prompt_tokens": 80, "completion_tokens": 2, "total_tokens": 82},
    }
).encode()


def serve(parent: Connection) -> None:
    """Answer every request alike."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
            self.wfile.write(head.encode() + BODY)

        def log_message(self, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    parent.send(server.server_address[1])
    server.serve_forever()


async def many(ask: Callable[[], Awaitable[None]], at_once: int) -> None:
    async def work() -> None:
        for _ in range(REPLIES // at_once):
            await ask()

    await asyncio.gather(*(work() for _ in range(at_once)))


def measured(run: Callable[[], None]) -> float:
    """Return microseconds of CPU a reply, the least of several repetitions."""
    run()
    times = []
    for _ in range(REPETITIONS):
        started = time.process_time()
        run()
        times.append(time.process_time() - started)
    return min(times) / REPLIES * 1e6


def main() -> None:
    """Print the table."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    url = f"http://127.0.0.1:{ours.recv()}/v1"
    messages = [Message("system", MESSAGES[0]["content"]), Message("user", MESSAGES[1]["content"])]
    print(f"CPU per reply, {REPLIES} replies, least of {REPETITIONS}")
    for at_once in (1, 32):

        def bare(at_once: int = at_once) -> None:
            async def run() -> None:
                async with openai.AsyncOpenAI(api_key="none", base_url=url, max_retries=0) as api:

                    async def ask() -> None:
                        await api.chat.completions.create(model="m", messages=MESSAGES, max_tokens=64)  # type: ignore[arg-type]

                    await many(ask, at_once)

            asyncio.run(run())

        with OpenAIPolicy("m", base_url=url, check=False) as policy:

            def own(at_once: int = at_once, policy: OpenAIPolicy = policy) -> None:
                async def ask() -> None:
                    conversation = policy.start((), 0)
                    conversation.observe(messages)
                    await conversation.reply(64)

                asyncio.run(many(ask, at_once))

            alone, with_policy = measured(bare), measured(own)
        share = with_policy / alone - 1
        print(f"{at_once:3} at a time: SDK {alone:6.0f} µs, policy {with_policy:6.0f} µs, {share:+.0%}")
    process.terminate()


if __name__ == "__main__":
    main()
