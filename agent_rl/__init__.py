"""agent_rl: a gym and trainer for multi-turn, tool-using language-model agents."""

import importlib
import typing

from agent_rl.api import check, evaluate, load, run, train
from agent_rl.backends.run import Run
from agent_rl.checks.report import CheckReport, Finding
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
from agent_rl.store.episodes import EpisodeWriter, read_episodes
from agent_rl.version import __version__

if typing.TYPE_CHECKING:
    from agent_rl.algorithms.components import advantage, objective, shaping
    from agent_rl.algorithms.components import episode_filter as filter
    from agent_rl.gym.from_gym import GymnasiumEnv, from_gym

__all__ = ["__version__"]
# environments
__all__ += ["Env", "ToolEnv", "SandboxedEnv", "Budget", "Observation", "Script", "register", "make", "spec", "env_ids"]
__all__ += ["load_file", "EnvSpec", "check", "CheckReport", "Finding", "from_gym", "GymnasiumEnv"]
# what an environment declares
__all__ += ["tool", "Tool", "ToolSpec", "reward", "group_reward"]
# nouns
__all__ += ["Message", "ToolCall", "Step", "Task", "JSON", "Episode", "EpisodeGroup", "Origin", "Reward", "Failure"]
__all__ += ["Outcome", "StopReason", "Trajectory", "Span", "Source", "Fork", "Completion", "FinishReason"]
# running and training
__all__ += [
    "run",
    "evaluate",
    "train",
    "load",
    "Run",
    "Evaluation",
    "Job",
    "run_jobs",
    "Policy",
    "AnyPolicy",
    "TokenPolicy",
]
__all__ += ["SamplingParams", "oracle", "demonstrator", "load_renderer", "train_tokenizer"]
# stored episodes
__all__ += ["read_episodes", "EpisodeWriter"]
# parts of one's own
__all__ += ["advantage", "objective", "shaping", "filter", "register_policy", "register_renderer", "register_sandbox"]
# errors
__all__ += ["AgentRLError", "ConfigError", "RegistryError", "UnknownEnvError", "NameCollisionError", "DefinitionError"]
__all__ += ["TrajectoryError", "RenderError", "StoreError", "DamagedEpisodeError", "CheckpointError"]
__all__ += ["InfrastructureError", "Interrupted", "PolicyError", "SandboxError"]

_COMPONENTS, _FROM_GYM = "agent_rl.algorithms.components", "agent_rl.gym.from_gym"
_LAZY = {
    **{name: (_COMPONENTS, name) for name in ("advantage", "objective", "shaping")},
    "filter": (_COMPONENTS, "episode_filter"),
    **{name: (_FROM_GYM, name) for name in ("GymnasiumEnv", "from_gym")},
}


def __getattr__(name: str) -> object:
    """Import what needs torch, or Gymnasium, when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'agent_rl' has no attribute '{name}'")
    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)
