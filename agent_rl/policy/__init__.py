"""Policies: who answers the environment. A script, or a renderer in front of an inference engine."""

from agent_rl.policy.base import Conversation, Opening, Policy, Prefix, Reply, Resumable
from agent_rl.policy.interrupt import Interrupt
from agent_rl.policy.sampling import Sampler, SamplerSession, SamplingParams
from agent_rl.policy.scripted import Scripted, demonstrator, oracle
from agent_rl.policy.token import TokenPolicy

__all__ = [
    "Conversation",
    "Interrupt",
    "Opening",
    "Policy",
    "Prefix",
    "Reply",
    "Resumable",
    "Sampler",
    "SamplerSession",
    "SamplingParams",
    "Scripted",
    "TokenPolicy",
    "demonstrator",
    "oracle",
]
