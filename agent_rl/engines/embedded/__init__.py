"""The embedded engine: continuous batching of a torch model, on a CPU or one GPU."""

from agent_rl.engines.embedded.engine import Engine

__all__ = ["Engine"]
