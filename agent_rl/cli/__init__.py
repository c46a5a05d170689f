"""The command line: `agent-rl init | envs | check | algorithms | train | rollout | view | doctor | sandbox`."""

from agent_rl.cli.parser import main

__all__ = ["main"]
