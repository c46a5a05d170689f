"""The command line, `agent-rl COMMAND`."""

from agent_rl.cli.parser import main

__all__ = ["main"]
