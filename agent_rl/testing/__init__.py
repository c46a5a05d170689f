"""For tests outside agent_rl: a sandbox that runs nothing, and the contract of every sandbox backend."""

from agent_rl.testing.fake_sandboxes import FakeSandbox, FakeSandboxes
from agent_rl.testing.sandbox_contract import CONTRACT, check_sandboxes

__all__ = ["CONTRACT", "FakeSandbox", "FakeSandboxes", "check_sandboxes"]
