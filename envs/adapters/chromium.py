"""Chromium without a driver: one headless browser for the process, a page in a profile of its own for each episode.

The DevTools protocol is spoken over two pipes: no port that others could connect to, and a browser that ends when this
process does. Pages reach no network: whatever they need is a file.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from typing import Any

from agent_rl.concurrency import AsyncOnce, LoopThread
from agent_rl.core.messages import JSON
from agent_rl.errors import ConfigError, ToolServerError

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""What the browser may be called; `AGENT_RL_CHROMIUM` names another."""
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--lang=en-US"),
    *("--disable-background-timer-throttling", "--disable-renderer-backgrounding"),
)
SECONDS = 30.0
"""Until the browser has to have answered."""
KEYS = {
    **{"Enter": 13, "Tab": 9, "Escape": 27, "Backspace": 8, "Delete": 46, "Home": 36, "End": 35},
    **{"PageUp": 33, "PageDown": 34, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40},
}
"""Keys that are no characters, with their codes."""
_LAUNCH = """import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])"""
"""The browser reads commands from descriptor 3 and answers on 4."""


class Page:
    """A tab with cookies and storage of its own."""

    def __init__(self, browser: _Browser, session: str, context: str) -> None:
        self._browser, self._session, self._context = browser, session, context

    async def evaluate(self, expression: str) -> JSON:
        """Return the value of a JavaScript expression, awaited if it is a promise.

        Raises:
            RuntimeError: if it throws.
            ToolServerError: if the browser is gone, or does not answer.
        """
        said = await self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            thrown = said["exceptionDetails"]
            raise RuntimeError(thrown.get("exception", {}).get("description") or thrown["text"])
        value: JSON = said["result"].get("value")
        return value

    async def open(self, url: str, ready: str) -> None:
        """Go to an address, and wait until an expression is true there."""
        await self._call("Page.navigate", url=url)
        there = f"location.href === {json.dumps(url)} && document.readyState === 'complete' && !!({ready})"
        async with asyncio.timeout(SECONDS):
            while not await self.evaluate(there):
                await asyncio.sleep(0.01)

    async def press(self, key: str) -> None:
        """Press and release a key of `KEYS`, or the key of a character."""
        pressed: dict[str, JSON] = {"key": key}
        if key in KEYS:
            pressed["windowsVirtualKeyCode"] = KEYS[key]
        text = "\r" if key == "Enter" else key
        held = {"type": "keyDown", "text": text} if len(text) == 1 else {"type": "rawKeyDown"}
        await self._call("Input.dispatchKeyEvent", **pressed, **held)
        await self._call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def close(self) -> None:
        """Close the tab, and forget its profile."""
        if not self._browser.is_lost:
            await _loop().run(self._browser.call("Target.disposeBrowserContext", browserContextId=self._context))

    async def _call(self, method: str, **parameters: JSON) -> dict[str, Any]:
        return await _loop().run(self._browser.call(method, self._session, **parameters))


async def open_page() -> Page:
    """Open a tab; start the browser if it does not run.

    Raises:
        ConfigError: if there is no Chromium.
        ToolServerError: if it does not start.
    """
    return await _loop().run(_open_page())


async def _open_page() -> Page:
    global _shared
    once = _shared
    browser = await once.get()
    if browser.is_lost:
        if _shared is once:
            _shared = AsyncOnce(_start)
        browser = await _shared.get()
    context = (await browser.call("Target.createBrowserContext"))["browserContextId"]
    target = await browser.call("Target.createTarget", url="about:blank", browserContextId=context)
    attached = await browser.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
    return Page(browser, attached["sessionId"], context)


class _Browser:
    """The process, and the answers that are waited for."""

    def __init__(self, process: asyncio.subprocess.Process, commands: int, folder: str) -> None:
        self.process, self.folder = process, folder
        self._commands = commands
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.is_lost = False
        self.reading: asyncio.Task[None] | None = None

    async def call(self, method: str, session: str | None = None, /, **parameters: JSON) -> dict[str, Any]:
        """Send a command; return its result."""
        if self.is_lost:
            raise ToolServerError(f"Chromium has ended: no answer to {method}")
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        command = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        try:
            os.write(self._commands, json.dumps(command).encode() + b"\0")
            async with asyncio.timeout(SECONDS) as clock:
                said: dict[str, Any] = await answer
                return said
        except (TimeoutError, OSError) as error:
            if isinstance(error, TimeoutError) and not clock.expired():
                raise
            raise ToolServerError(f"Chromium did not answer {method}: {error or f'in {SECONDS:g} s'}") from None
        finally:
            self._waiting.pop(number, None)

    def kill(self) -> None:
        """End the browser with all of its processes: what was started may be a shell script around it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def read(self, answers: asyncio.StreamReader) -> None:
        """Give each answer to who waits for it, until the browser ends."""
        try:
            while True:
                said = json.loads((await answers.readuntil(b"\0"))[:-1])
                waiting = self._waiting.get(said.get("id", 0))
                if waiting is None or waiting.done():
                    continue
                if "error" in said:
                    waiting.set_exception(ToolServerError(f"Chromium: {said['error'].get('message')}"))
                else:
                    waiting.set_result(said["result"])
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.is_lost = True
            os.close(self._commands)
            shutil.rmtree(self.folder, ignore_errors=True)
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(ToolServerError("Chromium has ended"))


async def _start() -> _Browser:
    folder = tempfile.mkdtemp(prefix="agent-rl-chromium-")
    flags = [*FLAGS, f"--user-data-dir={folder}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    (read, commands), (answers, written) = os.pipe(), os.pipe()
    launch = [sys.executable, "-IS", "-c", _LAUNCH, str(read), str(written), executable(), *flags, "about:blank"]
    silent = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *launch, pass_fds=(read, written), stdin=silent, stdout=silent, stderr=silent, start_new_session=True
    )
    os.close(read)
    os.close(written)
    reader = asyncio.StreamReader(limit=2**26)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(answers, "rb"))
    browser = _Browser(process, commands, folder)
    browser.reading = asyncio.create_task(browser.read(reader))
    await browser.call("Browser.getVersion")
    atexit.register(_kill, browser)
    return browser


def _kill(browser: _Browser) -> None:
    if not browser.is_lost:
        browser.kill()
    shutil.rmtree(browser.folder, ignore_errors=True)


def executable() -> str:
    """Return the path of the browser.

    Raises:
        ConfigError: if there is none.
    """
    named = os.environ.get("AGENT_RL_CHROMIUM")
    for name in (named,) if named else NAMES:
        if found := shutil.which(name):
            return found
    what = f"AGENT_RL_CHROMIUM='{named}' is no program" if named else "there is no Chromium"
    raise ConfigError(f"{what}: apt-get install chromium, or set AGENT_RL_CHROMIUM to the path of one")


@functools.cache
def _loop() -> LoopThread:
    return LoopThread("agent_rl: Chromium")


_shared = AsyncOnce(_start)
