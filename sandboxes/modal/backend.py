"""Modal's sandboxes, by way of the `modal` SDK: containers on gVisor, on the service's machines.

The agent that answers inside local jails and containers runs here, too, so that a call means the same everywhere. It is
the first process of a pid namespace where gVisor lets it make one; else it ends what code started one by one. A sandbox
belongs to the event loop that it was opened in.

Of `Limits`, memory and processor are the service's to keep; the others are ignored. If the host dies, the service ends
a sandbox when its lifetime is over.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.client.hosted import NAMESPACE, HostedSandboxes, Link, agent_command, kept_by
from agent_rl.sandboxes.registry import register_sandbox

IMAGE = "python:3.12-slim"
USER = "nobody"
"""Whom the model's code runs as: every image has that user."""
MIN_MEMORY = 128
"""MiB that a sandbox gets at least: the agent is in it, too."""
_IF_ALLOWED = f"$(unshare --pid --fork --mount-proc true 2>/dev/null && echo {NAMESPACE})"
_COMMAND = agent_command(USER, _IF_ALLOWED)


@register_sandbox("modal")
class ModalSandboxes(HostedSandboxes):
    """Sandboxes that are containers of Modal."""

    service, user = "Modal", USER

    def __init__(
        self, *, image: str = IMAGE, app: str = "agent-rl", internet: bool = False, limits: Limits | None = None
    ) -> None:
        """Store the settings.

        Args:
            image: of a registry; it needs a python3 (3.10 or newer), a shell and a user called "nobody".
            app: the app of Modal's that they belong to; made if there is none.
            internet: whether the code may reach it.
            limits: of a sandbox that is opened without any.

        Raises:
            ConfigError: if there is no token, or the SDK is not installed.
        """
        super().__init__(limits)
        if not _has_token():
            raise ConfigError("the modal sandbox needs a token: set MODAL_TOKEN_ID and MODAL_TOKEN_SECRET")
        try:
            self._sdk: Any = importlib.import_module("modal")
        except ImportError:
            raise ConfigError("the modal sandbox needs its SDK: pip install 'agent-rl[modal]'") from None
        self.image, self.app, self.internet = image, app, internet

    async def claims(self) -> Capabilities:
        """Return what should keep each guarantee."""
        return kept_by("gVisor", internet=self.internet, lacking=frozenset({Guarantee.PROCESSES, Guarantee.DISK}))

    async def rent(self, owner: str, limits: Limits, lifetime: float) -> ModalLink:
        """Have the service start a container."""
        mebibytes = max(MIN_MEMORY, limits.memory >> 20)
        sandbox = await self._sdk.Sandbox.create.aio(
            app=await self._sdk.App.lookup.aio(self.app, create_if_missing=True),
            image=self._sdk.Image.from_registry(self.image),
            timeout=math.ceil(lifetime),
            cpu=(limits.cpus, limits.cpus),
            memory=(mebibytes, mebibytes),
            block_network=not self.internet,
        )
        return ModalLink(self._sdk, sandbox)


class ModalLink(Link):
    """A link to a container of Modal.

    Args:
        sdk: the module `modal`.
        sandbox: a `modal.Sandbox`.
    """

    def __init__(self, sdk: Any, sandbox: Any) -> None:
        super().__init__("Modal")
        self._sdk, self._sandbox = sdk, sandbox
        self._process: Any = None
        """A `modal.container_process.ContainerProcess[bytes]`."""

    async def _start(self) -> None:
        devnull = self._sdk.stream_type.StreamType.DEVNULL
        self._process = await self._sandbox.exec.aio("sh", "-c", _COMMAND, text=False, stderr=devnull)

    async def _write(self, data: bytes) -> None:
        self._process.stdin.write(data)
        await self._process.stdin.drain.aio()

    async def _wait(self) -> None:
        output: AsyncIterator[bytes] = self._process.stdout
        async for data in output:
            await self._receive(data)

    async def _terminate(self) -> None:
        await self._sandbox.terminate.aio()

    async def _runs(self) -> bool:
        return await self._sandbox.poll.aio() is None

    def _tells_of_the_end(self, error: Exception) -> bool:
        said = self._sdk.exception
        return isinstance(error, said.NotFoundError | said.SandboxTerminatedError | said.SandboxTimeoutError)


def _has_token() -> bool:
    """Whether the SDK will find one, in the environment or where `modal token new` leaves it."""
    if os.environ.get("MODAL_TOKEN_ID") and os.environ.get("MODAL_TOKEN_SECRET"):
        return True
    return Path(os.environ.get("MODAL_CONFIG_PATH") or "~/.modal.toml").expanduser().exists()
