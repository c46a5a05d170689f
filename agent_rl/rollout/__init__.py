"""Rollout: run one episode, a group of them, or a pool; say how it went."""

from agent_rl.rollout.episode import run_episode
from agent_rl.rollout.evaluation import Evaluation, Rate, summarise
from agent_rl.rollout.group import run_groups, score_groups, stream_finished
from agent_rl.rollout.job import Branch, Job, continuation
from agent_rl.rollout.pool import group_jobs, run_jobs, split_jobs, stream_jobs

__all__ = [
    "Branch",
    "Evaluation",
    "Job",
    "Rate",
    "continuation",
    "group_jobs",
    "run_episode",
    "run_groups",
    "run_jobs",
    "score_groups",
    "split_jobs",
    "stream_finished",
    "stream_jobs",
    "summarise",
]
