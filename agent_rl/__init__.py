"""agent_rl: a gym and trainer for multi-turn, tool-using language-model agents."""

from typing import TYPE_CHECKING

from agent_rl.api import Run, evaluate, run, train
from agent_rl.core.episode import Episode, Failure, Outcome, Reward, StepRecord, StopReason
from agent_rl.core.messages import JSON, Message, Step, Task, ToolCall, ToolErrorKind
from agent_rl.core.trajectory import Completion, FinishReason, Fork, Source, Span, Trajectory
from agent_rl.engines.base import SamplingParams
from agent_rl.errors import (
    AgentRLError,
    CheckpointError,
    ConfigError,
    DamagedEpisodeError,
    DefinitionError,
    InfrastructureError,
    NameCollisionError,
    PolicyError,
    RegistryError,
    RenderError,
    SandboxError,
    StoreError,
    TrajectoryError,
    UnknownEnvError,
)
from agent_rl.gym.budget import Budget
from agent_rl.gym.env import Env, Observation, Script, ToolEnv
from agent_rl.gym.registry import EnvSpec, env_ids, load_file, make, register, spec
from agent_rl.gym.reward import group_reward, reward
from agent_rl.gym.sandboxed import SandboxedEnv
from agent_rl.gym.tasks import TaskSource, TaskStream
from agent_rl.gym.tool import Tool, ToolSpec, tool
from agent_rl.policy import TokenPolicy, demonstrator, oracle
from agent_rl.policy.by_name import register_policy
from agent_rl.rendering import load_renderer, train_tokenizer
from agent_rl.rendering.by_name import register_renderer
from agent_rl.sandboxes.registry import register_sandbox
from agent_rl.version import __version__

if TYPE_CHECKING:
    from agent_rl.algorithms.components import advantage, objective, shaping
    from agent_rl.algorithms.components import episode_filter as filter

__all__ = [
    "__version__",
    "AgentRLError",
    "Budget",
    "CheckpointError",
    "Completion",
    "ConfigError",
    "DamagedEpisodeError",
    "DefinitionError",
    "Env",
    "EnvSpec",
    "Episode",
    "Failure",
    "FinishReason",
    "Fork",
    "InfrastructureError",
    "JSON",
    "Message",
    "NameCollisionError",
    "Observation",
    "Outcome",
    "PolicyError",
    "RegistryError",
    "RenderError",
    "Reward",
    "Run",
    "SandboxError",
    "SandboxedEnv",
    "SamplingParams",
    "Script",
    "Source",
    "Span",
    "Step",
    "StepRecord",
    "StopReason",
    "StoreError",
    "Task",
    "TaskSource",
    "TaskStream",
    "Tool",
    "ToolCall",
    "TokenPolicy",
    "ToolEnv",
    "ToolErrorKind",
    "ToolSpec",
    "Trajectory",
    "TrajectoryError",
    "UnknownEnvError",
    "advantage",
    "demonstrator",
    "env_ids",
    "group_reward",
    "evaluate",
    "filter",
    "load_file",
    "load_renderer",
    "make",
    "objective",
    "oracle",
    "register",
    "register_policy",
    "register_renderer",
    "register_sandbox",
    "reward",
    "run",
    "shaping",
    "spec",
    "tool",
    "train",
    "train_tokenizer",
]

_NEED_TORCH = {"advantage": "advantage", "filter": "episode_filter", "objective": "objective", "shaping": "shaping"}


def __getattr__(name: str) -> object:
    if name in _NEED_TORCH:  # imported where they are used: `import agent_rl` needs no torch
        from agent_rl.algorithms import components

        return getattr(components, _NEED_TORCH[name])
    raise AttributeError(f"module 'agent_rl' has no attribute '{name}'")
