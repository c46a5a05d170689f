"""What runs in the container beside a sandbox's: it holds their network, and relays connections to the proxy.

It is sent as text to `python3 -c` of the sandbox's own image, so it uses nothing but the standard library. Its
arguments are the seconds until it ends, the port to listen on (0: none), and the bytes that all connections together
may carry. It ends when its stdin does, with all that has its PID namespace: the kernel sees to that.
"""

import asyncio
import contextlib
import os
import signal
import sys
import threading

PROXY = "/proxy.sock"
READY = b"the network is ready\n"
MOST = 32
"""Connections at a time; more have to wait."""
_PIECE = 64 * 1024
_REASON = b"agent-rl: this sandbox has used up its network\n"
_SPENT = b"HTTP/1.1 403 Forbidden\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_REASON), _REASON)


class Relay:
    """Copies between clients in the sandbox's network and the proxy."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._places = asyncio.Semaphore(MOST)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        with contextlib.suppress(OSError):
            async with self._places:
                await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._left <= 0:
            writer.write(_SPENT)
            await writer.drain()
            return
        there, back = await asyncio.open_unix_connection(PROXY)
        tasks = [asyncio.ensure_future(self._copy(*way)) for way in ((reader, back), (there, writer))]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[1] not in done:  # the client sends no more, and may still hear
                tasks[0].result()
                await tasks[1]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            back.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while piece := await reader.read(_PIECE):
            self._left -= len(piece)
            if self._left < 0:
                raise ConnectionAbortedError
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


async def serve(port: int, most: int) -> None:
    """Listen, say so, and serve for good."""
    server = await asyncio.start_server(Relay(most).serve, "127.0.0.1", port, limit=_PIECE)
    _say_ready()
    await server.serve_forever()


def _say_ready() -> None:
    os.write(1, READY)
    null = os.open(os.devnull, os.O_WRONLY)
    for fd in (1, 2):  # nobody reads what comes later
        os.dup2(null, fd)


def _follow_host() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    """Keep the network until either the host or the lifetime ends."""
    lifetime, port, most = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGALRM, lambda *_: os._exit(0))
    signal.setitimer(signal.ITIMER_REAL, lifetime)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # it is the parent of those whose own has ended
    if not port:
        _say_ready()
        _follow_host()
    threading.Thread(target=_follow_host, daemon=True).start()
    asyncio.run(serve(port, most))


if __name__ == "__main__":
    main()
