"""Endings: a finer class of how an episode ended than its outcome, derived from what it stores.

| ending | the episode | what happens to it |
|---|---|---|
| `ok` | came to the task's own end | is trained on |
| `truncated` | ran out of a budget, which `stop_reason` names | is trained on; `algorithm.endings.truncated` |
| `parse_error` | was cut at a reply whose tool call can't be read | is trained on; `algorithm.endings.parse_error` |
| `env_crash` | raised in `reset`, `step` or the like | has no score and no part in its baseline |
| `tool_infra` | lost what a tool depends on: a server, a remote environment, a simulated user | the same |
| `sandbox_lost` | lost its sandbox, or got none | the same |
| `policy_error` | got no reply from the policy | the same |
| `judge_failed` | raised or was late in a reward, or has a reward without a value | the same |
| `timeout` | was too late in another part: `reset`, or a reply | the same |
| `cancelled` | was cancelled from within | the same |

The failures are run again where `retries` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_rl.core.episode import Episode


class Ending(StrEnum):
    """How an episode ended; the module says what each means."""

    OK = "ok"
    TRUNCATED = "truncated"
    PARSE_ERROR = "parse_error"
    ENV_CRASH = "env_crash"
    TOOL_INFRA = "tool_infra"
    SANDBOX_LOST = "sandbox_lost"
    POLICY_ERROR = "policy_error"
    JUDGE_FAILED = "judge_failed"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


_BY_TYPE: Mapping[str, Ending] = {
    "CancelledError": Ending.CANCELLED,
    "PolicyError": Ending.POLICY_ERROR,
    "SandboxError": Ending.SANDBOX_LOST,
    "InfrastructureError": Ending.TOOL_INFRA,
    "RemoteError": Ending.TOOL_INFRA,
    "ToolServerError": Ending.TOOL_INFRA,
    "UserError": Ending.TOOL_INFRA,
}
"""Of the exceptions that say it by themselves, wherever they were raised."""


def ending_of(episode: Episode) -> Ending:
    """Return how an episode ended."""
    if (error := episode.error) is not None:
        if found := _BY_TYPE.get(error.type):
            return found
        if error.where == "score":
            return Ending.JUDGE_FAILED
        if error.type == "TimeoutError":
            return Ending.TIMEOUT
        return Ending.POLICY_ERROR if error.where == "policy" else Ending.ENV_CRASH
    if any(r.error is not None and r.weight != 0 for r in episode.rewards):
        return Ending.JUDGE_FAILED
    if episode.outcome == "terminated":
        return Ending.OK
    last = episode.messages[-1] if episode.messages else None
    if last is not None and last.role == "assistant" and any(call.error is not None for call in last.tool_calls):
        return Ending.PARSE_ERROR
    return Ending.TRUNCATED
