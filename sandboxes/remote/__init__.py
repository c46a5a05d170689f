"""Sandboxes on other machines: a server that opens them for its clients, and the backend that they use."""

from __future__ import annotations

from agent_rl.sandboxes.remote.backend import RemoteSandboxes

__all__ = ["RemoteSandboxes"]
