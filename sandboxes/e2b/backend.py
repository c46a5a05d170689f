"""E2B's microVMs as sandboxes, by way of the `e2b` SDK, or of `e2b-code-interpreter`.

The agent that answers inside local jails and containers runs here, too, as the first process of a pid namespace of its
own, so that a call means the same everywhere: outputs, timeouts, what is killed, when variables are lost. Where Python
runs is chosen by `interpreter`: in the agent's worker, for which any template does, or in the Jupyter kernel of a
template such as E2B's code-interpreter-v1, which has numpy, pandas and the like (`jupyter` says what differs then). A
sandbox belongs to the event loop that it was opened in.

Covers what the service does: a kernel of its own, on a machine that is not yours, without internet unless asked for.
`Limits` are ignored: the template decides. If the host dies, the service ends a sandbox when its lifetime is over.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from agent_rl.errors import ConfigError
from agent_rl.sandboxes.base import Capabilities, Guarantee, Limits
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.hosted import HostedSandboxes, Link
from agent_rl.sandboxes.e2b.jupyter import JupyterSandbox
from agent_rl.sandboxes.e2b.link import USER, E2BLink
from agent_rl.sandboxes.registry import register_sandbox

if TYPE_CHECKING:
    from e2b import AsyncSandbox

TEMPLATES = {"agent": "base", "jupyter": "code-interpreter-v1"}
"""The interpreters that there are, and in which of E2B's own templates each runs."""
_SDKS = {"agent": "e2b", "jupyter": "e2b_code_interpreter"}
MECHANISMS: Mapping[str, Capabilities] = {
    "agent": dict.fromkeys(Guarantee, "microVM") | {Guarantee.KILL_ALL: "the agent is pid 1 of a namespace"},
    "jupyter": dict.fromkeys(Guarantee, "microVM") | {Guarantee.KILL_ALL: None},
}
"""By what each guarantee should be kept, by interpreter."""


@register_sandbox("e2b")
class E2BSandboxes(HostedSandboxes):
    """Sandboxes that are microVMs of E2B; their limits are the template's."""

    service, user = "E2B", USER

    def __init__(
        self,
        *,
        interpreter: str = "agent",
        template: str | None = None,
        api_key: str | None = None,
        internet: bool = False,
    ) -> None:
        """Store the settings.

        Args:
            interpreter: where Python runs: "agent", in our own worker, or "jupyter", in the template's kernel.
            template: the microVM's image; that of `TEMPLATES` if None. It needs a python3 (3.10 or newer), unshare, and
                a user called "user"; for "jupyter", E2B's code interpreter, too.
            api_key: $E2B_API_KEY if None.
            internet: whether the code may reach it.

        Raises:
            ConfigError: if there is no such interpreter, there is no key, or the SDK is not installed.
        """
        super().__init__()
        if interpreter not in TEMPLATES:
            raise ConfigError(f"interpreter={interpreter!r}; choose one of {', '.join(TEMPLATES)}")
        try:
            self._sdk: type[AsyncSandbox] = importlib.import_module(_SDKS[interpreter]).AsyncSandbox
        except ImportError:
            raise ConfigError("the e2b sandbox needs its SDKs: pip install 'agent-rl[e2b]'") from None
        self._key = api_key or os.environ.get("E2B_API_KEY")
        if not self._key:
            raise ConfigError("the e2b sandbox needs a key: set E2B_API_KEY, or give api_key")
        self.interpreter = interpreter
        self.template, self.internet = template or TEMPLATES[interpreter], internet

    async def claims(self) -> Capabilities:
        """Return what should keep each guarantee in a microVM."""
        return MECHANISMS[self.interpreter]

    async def rent(self, owner: str, limits: Limits, lifetime: float) -> E2BLink:
        """Have the service start a microVM."""
        machine = await self._sdk.create(
            self.template,
            timeout=math.ceil(lifetime),
            metadata={"agent-rl.owner": owner},
            allow_internet_access=self.internet,
            api_key=self._key,
        )
        return E2BLink(machine)

    def connect(self, link: Link, owner: str, expires: float) -> AgentSandbox:
        """Return the sandbox in a microVM."""
        if isinstance(link, E2BLink) and self.interpreter == "jupyter":
            return JupyterSandbox(link, name=owner, expires=expires)
        return super().connect(link, owner, expires)
