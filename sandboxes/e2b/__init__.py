"""E2B's microVMs as sandboxes."""

from __future__ import annotations

from agent_rl.sandboxes.e2b.backend import E2BSandboxes

__all__ = ["E2BSandboxes"]
