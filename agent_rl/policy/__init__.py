"""Policies answer the environment: a script, or a renderer in front of an inference engine."""

from agent_rl.policy.base import AnyPolicy, Conversation, EnvPolicy, Policy, Prefix, Reply, Resumable
from agent_rl.policy.by_name import (
    PolicyConfig,
    SamplingSettings,
    ignored_sampling,
    open_policy,
    register_policy,
    sampling_params,
)
from agent_rl.policy.interruption import Interruption
from agent_rl.policy.scripted import Scripted, demonstrator, oracle
from agent_rl.policy.token import TokenPolicy

__all__ = [
    "AnyPolicy",
    "Conversation",
    "EnvPolicy",
    "Interruption",
    "Policy",
    "PolicyConfig",
    "Prefix",
    "Reply",
    "Resumable",
    "SamplingSettings",
    "Scripted",
    "TokenPolicy",
    "demonstrator",
    "ignored_sampling",
    "open_policy",
    "oracle",
    "register_policy",
    "sampling_params",
]
