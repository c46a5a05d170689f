"""Algorithms: pure functions over batches, composed by a config; no trainer state, both backends use them."""

from agent_rl.algorithms.algorithm import Algorithm, AlgorithmConfig, LossTerms
from agent_rl.algorithms.batch import Batch, Denominators, collate, micro_batches, to_samples

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "Batch",
    "Denominators",
    "LossTerms",
    "collate",
    "micro_batches",
    "to_samples",
]
