"""Modal's sandboxes."""

from __future__ import annotations

from agent_rl.sandboxes.modal.backend import ModalSandboxes

__all__ = ["ModalSandboxes"]
