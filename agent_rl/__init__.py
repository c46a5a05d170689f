"""agent_rl: a gym and trainer for multi-turn, tool-using language-model agents."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from agent_rl.api import Run, evaluate, run, train
from agent_rl.core.episode import Episode, EpisodeGroup, Failure, Origin, Outcome, Reward, StopReason
from agent_rl.core.messages import JSON, Message, Step, Task, ToolCall
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
from agent_rl.gym.tool import Tool, ToolSpec, tool
from agent_rl.policy import AnyPolicy, Policy, TokenPolicy, demonstrator, oracle
from agent_rl.policy.by_name import register_policy
from agent_rl.rendering import load_renderer, train_tokenizer
from agent_rl.rendering.by_name import register_renderer
from agent_rl.rollout import Evaluation, Job, run_jobs
from agent_rl.runs.stop import Interrupted
from agent_rl.sandboxes.registry import register_sandbox
from agent_rl.version import __version__

if TYPE_CHECKING:
    from agent_rl.algorithms.components import advantage, episode_filter, objective, shaping
    from agent_rl.store.episodes import EpisodeWriter, read_episodes

__all__ = [
    "__version__",
    # environments
    "Budget",
    "Env",
    "EnvSpec",
    "Observation",
    "SandboxedEnv",
    "Script",
    "ToolEnv",
    "env_ids",
    "load_file",
    "make",
    "register",
    "spec",
    # declarations
    "Tool",
    "ToolSpec",
    "group_reward",
    "reward",
    "tool",
    # nouns
    "Completion",
    "Episode",
    "EpisodeGroup",
    "Failure",
    "FinishReason",
    "Fork",
    "JSON",
    "Message",
    "Origin",
    "Outcome",
    "Reward",
    "Source",
    "Span",
    "Step",
    "StopReason",
    "Task",
    "ToolCall",
    "Trajectory",
    # running
    "AnyPolicy",
    "Evaluation",
    "Job",
    "Policy",
    "Run",
    "SamplingParams",
    "TokenPolicy",
    "demonstrator",
    "evaluate",
    "load_renderer",
    "oracle",
    "run",
    "run_jobs",
    "train",
    "train_tokenizer",
    # stored
    "EpisodeWriter",
    "read_episodes",
    # extending
    "advantage",
    "episode_filter",
    "objective",
    "register_policy",
    "register_renderer",
    "register_sandbox",
    "shaping",
    # errors
    "AgentRLError",
    "CheckpointError",
    "ConfigError",
    "DamagedEpisodeError",
    "DefinitionError",
    "InfrastructureError",
    "Interrupted",
    "NameCollisionError",
    "PolicyError",
    "RegistryError",
    "RenderError",
    "SandboxError",
    "StoreError",
    "TrajectoryError",
    "UnknownEnvError",
]

_LAZY = {
    "EpisodeWriter": "agent_rl.store.episodes",
    "advantage": "agent_rl.algorithms.components",
    "episode_filter": "agent_rl.algorithms.components",
    "objective": "agent_rl.algorithms.components",
    "read_episodes": "agent_rl.store.episodes",
    "shaping": "agent_rl.algorithms.components",
}
"""Names that are imported when they are asked for, as their modules take long or need torch."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'agent_rl' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value


for _name in __all__:  # tracebacks say agent_rl.ConfigError; other classes need their module's names for annotations
    if isinstance(_value := globals().get(_name), type) and issubclass(_value, BaseException):
        _value.__module__ = "agent_rl"
