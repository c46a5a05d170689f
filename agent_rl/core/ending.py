"""Endings: a finer class of how an episode ended than its outcome, derived from what it stores.

| ending | the episode | what happens to it |
|---|---|---|
| `ok` | came to the task's own end | is trained on |
| `truncated` | ran out of a budget, which `stop_reason` names | is trained on; `algorithm.endings.truncated` |
| `parse_error` | was cut at a reply whose tool call can't be read | is trained on; `algorithm.endings.parse_error` |
| `sandbox_ended` | ended its own sandbox, by what its code did | is trained on as a failure: it earns nothing |
| `env_crash` | raised in `reset`, `step` or the like | has no score and no part in its baseline |
| `tool_infra` | lost what a tool depends on: a server, a remote environment, a simulated user | the same |
| `sandbox_lost` | lost its sandbox to the infrastructure, or got none | the same |
| `policy_error` | got no reply from the policy | the same |
| `judge_failed` | raised or was late in a reward, or has a reward without a value | the same |
| `timeout` | was too late in another part: `reset`, or a reply | the same |
| `cancelled` | was cancelled from within | the same |

The failures are run again where `retries` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Ending(StrEnum):
    """How an episode ended; the module says what each means."""

    OK = "ok"
    TRUNCATED = "truncated"
    PARSE_ERROR = "parse_error"
    SANDBOX_ENDED = "sandbox_ended"
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


def ending_of(
    where: str, type: str, *, is_done: bool, is_unjudged: bool, is_unread: bool, has_ended_sandbox: bool = False
) -> Ending:
    """Return how an episode ended.

    Args:
        where: the stage that failed; an empty string if none did.
        type: the name of its exception, or of the class that it derives from, as `Failure.kind` says.
        is_done: whether the task came to its own end.
        is_unjudged: whether a reward that counts failed.
        is_unread: whether the last message is a reply with a tool call that can't be read.
        has_ended_sandbox: whether the policy's code ended its sandbox.
    """
    if has_ended_sandbox:
        return Ending.SANDBOX_ENDED
    if not where:
        cut = Ending.PARSE_ERROR if is_unread else Ending.TRUNCATED
        return Ending.JUDGE_FAILED if is_unjudged else Ending.OK if is_done else cut
    if found := _BY_TYPE.get(type):
        return found
    if where == "score":
        return Ending.JUDGE_FAILED
    if type == "TimeoutError":
        return Ending.TIMEOUT
    return Ending.POLICY_ERROR if where == "policy" else Ending.ENV_CRASH
