"""Daytona's sandboxes, by way of the `daytona` SDK.

The agent that answers inside local jails and containers runs here, too, as the first process of a pid namespace of its
own, so that a call means the same everywhere. It is a command of a session: its input goes through one HTTP request a
message, and the service keeps its output in a log inside, until the sandbox ends. A sandbox belongs to the event loop
that it was opened in.

`Limits` are ignored: the snapshot decides. If the host dies, the service deletes a sandbox when its lifetime is over.
"""

from __future__ import annotations

import base64
import importlib
import math
import os
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.client.hosted import (
    START_TIMEOUT,
    HostedSandboxes,
    Link,
    agent_command,
    decode_input,
    encode_output,
    kept_by,
    source_command,
)
from agent_rl.sandboxes.registry import register_sandbox

USER = "nobody"
"""Whom the model's code runs as; the service's daemon runs as root, so that code can't reach the agent's pipes."""
SESSION = "agent-rl"
SCRIPT = "/root/agent-rl.sh"
_COMMAND = f"{source_command(decode_input)} | ({agent_command(USER)}) | {source_command(encode_output)}\n"


@register_sandbox("daytona")
class DaytonaSandboxes(HostedSandboxes):
    """Sandboxes of Daytona; their limits are the snapshot's."""

    service, user = "Daytona", USER

    def __init__(self, *, snapshot: str | None = None, api_key: str | None = None, internet: bool = False) -> None:
        """Store the settings.

        Args:
            snapshot: what they are made of; the service's default if None. It needs a python3 (3.10 or newer), unshare,
                and a user called "nobody".
            api_key: $DAYTONA_API_KEY if None.
            internet: whether the code may reach it.

        Raises:
            ConfigError: if there is no key, or the SDK is not installed.
        """
        super().__init__()
        self._key = api_key or os.environ.get("DAYTONA_API_KEY")
        if not self._key:
            raise ConfigError("the daytona sandbox needs a key: set DAYTONA_API_KEY, or give api_key")
        try:
            self._sdk: Any = importlib.import_module("daytona")
        except ImportError:
            raise ConfigError("the daytona sandbox needs its SDK: pip install 'agent-rl[daytona]'") from None
        self.snapshot, self.internet = snapshot, internet

    async def claims(self) -> Capabilities:
        """Return what should keep each guarantee."""
        return kept_by("the service's container", internet=self.internet, lacking=frozenset({Guarantee.PROCESSES}))

    async def rent(self, owner: str, limits: Limits, lifetime: float) -> DaytonaLink:
        """Have the service start a sandbox, by a client of its own: those belong to an event loop."""
        client = self._sdk.AsyncDaytona(self._sdk.DaytonaConfig(api_key=self._key))
        wanted = self._sdk.CreateSandboxFromSnapshotParams(
            snapshot=self.snapshot,
            os_user="root",
            labels={"agent-rl.owner": owner},
            auto_stop_interval=0,
            auto_delete_interval=0,
            ttl_minutes=math.ceil(lifetime / 60),
            network_block_all=not self.internet,
        )
        try:
            return DaytonaLink(self._sdk, client, await client.create(wanted, timeout=START_TIMEOUT))
        except BaseException:
            await client.close()
            raise


class DaytonaLink(Link):
    """A link to a sandbox of Daytona.

    Args:
        sdk: the module `daytona`.
        client: a `daytona.AsyncDaytona`; it is this object's from now on.
        sandbox: a `daytona.AsyncSandbox`.
    """

    def __init__(self, sdk: Any, client: Any, sandbox: Any) -> None:
        super().__init__("Daytona")
        self._sdk, self._client, self._sandbox = sdk, client, sandbox
        self._command = ""

    async def _start(self) -> None:
        await self._sandbox.fs.upload_file(_COMMAND.encode(), SCRIPT)
        await self._sandbox.process.create_session(SESSION)
        asked = self._sdk.SessionExecuteRequest(command=f"sh {SCRIPT}", run_async=True, suppress_input_echo=True)
        self._command = (await self._sandbox.process.execute_session_command(SESSION, asked)).cmd_id

    async def _write(self, data: bytes) -> None:
        line = base64.b64encode(data).decode() + "\n"
        await self._sandbox.process.send_session_command_input(SESSION, self._command, line)

    async def _wait(self) -> None:
        follow = self._sandbox.process.get_session_command_logs_async
        await follow(SESSION, self._command, self._receive_text, lambda text: None)

    async def _terminate(self) -> None:
        try:
            await self._client.delete(self._sandbox)
        finally:
            await self._client.close()

    async def _runs(self) -> bool:
        await self._sandbox.refresh_data()
        return bool(self._sandbox.state == "started")

    def _tells_of_the_end(self, error: Exception) -> bool:
        return isinstance(error, self._sdk.DaytonaNotFoundError | self._sdk.DaytonaGoneError)
