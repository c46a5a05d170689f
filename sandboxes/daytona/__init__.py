"""Daytona's sandboxes."""

from __future__ import annotations

from agent_rl.sandboxes.daytona.backend import DaytonaSandboxes

__all__ = ["DaytonaSandboxes"]
