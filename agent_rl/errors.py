"""Every exception that agent_rl raises on purpose.

Each also inherits the standard exception that it replaces, so that generic handlers work.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AgentRLError(Exception):
    """The root of all errors of agent_rl."""

    __module__ = "agent_rl"

    def __init_subclass__(cls) -> None:
        """Let tracebacks name our own errors as users import them."""
        if cls.__module__ == __name__:
            cls.__module__ = "agent_rl"


class ConfigError(AgentRLError, ValueError):
    """A setting that has no meaning, or a key without a reader."""


class RegistryError(AgentRLError, LookupError):
    """Something is wrong between an environment id and its class."""


class UnknownEnvError(RegistryError):
    """No environment is registered under that id; it names the closest."""


class NameCollisionError(RegistryError):
    """Two environments claim the same id."""


class DefinitionError(AgentRLError, TypeError):
    """An environment, a tool or a reward is declared in a way that can't work."""


class TrajectoryError(AgentRLError, ValueError):
    """Tokens that don't fit the trajectory so far."""


class RenderError(AgentRLError, ValueError):
    """Messages that can't be appended as token ids with proof."""


class ReplayError(AgentRLError, ValueError):
    """A stored episode that an environment no longer plays as it was recorded."""


class StoreError(AgentRLError, ValueError):
    """An episode file that can't be used as asked."""


class DamagedEpisodeError(StoreError):
    """A line of an episode file that can't be read, by its number."""


class CheckpointError(AgentRLError, ValueError):
    """A checkpoint that can't be continued from."""


class InfrastructureError(AgentRLError, RuntimeError):
    """A failure that is not the model's doing: the episode is never scored, never 0."""


class PolicyError(InfrastructureError):
    """The policy could not answer."""


class WorkerError(InfrastructureError):
    """One of the processes of a run was lost, or failed."""


class UserError(InfrastructureError):
    """The simulated user of a dialogue could not answer."""


class SandboxError(InfrastructureError):
    """The place where the model's code runs was lost, by the infrastructure's fault."""

    def __init__(self, message: str = "", loss: object = None) -> None:
        super().__init__(message)
        self.loss = loss
        """How, where that is known: an `agent_rl.core.sandbox_loss.SandboxLoss`."""


class RemoteError(InfrastructureError):
    """The server of a remote environment was lost, is full or said no: another try may go well."""


class ToolServerError(InfrastructureError):
    """The server that a tool depends on could not answer."""

    retry_after: float | None = None
    """Seconds after which it asks to be called again."""


def in_brief(error: Exception | str) -> str:
    """Return the beginning of what an error from elsewhere says, on one line."""
    return " ".join(str(error).split())[:200]


def kind_of(error: BaseException) -> str:
    """Return the name of the nearest class of ours, else of Python's, that an error's type derives from.

    Returns:
        An empty string where the type is one of these itself.
    """
    classes = type(error).__mro__
    modules = (__package__, "asyncio.exceptions", "builtins")  # of builtins, CancelledError is a BaseException
    names = [c.__name__ for module in modules for c in classes if c.__module__ == module]
    return "" if names[0] == type(error).__name__ else names[0]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest known name, or an empty string."""
    plain = {each.lower(): each for each in known}
    close = difflib.get_close_matches(name.lower(), plain, n=1, cutoff=0.5)
    return f" Did you mean '{plain[close[0]]}'?" if close else ""
