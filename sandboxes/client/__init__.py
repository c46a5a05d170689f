"""The host's side of a sandbox whose agent answers over a byte stream; for backends, ours and a user's."""

from agent_rl.sandboxes.client.backend import AgentSandboxes
from agent_rl.sandboxes.client.client import AgentSandbox
from agent_rl.sandboxes.client.recorded import RecordedSandbox
from agent_rl.sandboxes.client.remote import ENTRY, greeting

__all__ = ["ENTRY", "AgentSandbox", "AgentSandboxes", "RecordedSandbox", "greeting"]
