"""Algorithms: pure functions over batches, composed by a config; no trainer state, both backends use them."""

from agent_rl.algorithms.algorithm import Algorithm, LossTerms
from agent_rl.algorithms.batch import Denominators, Rows, ScoredRows, WeightedRows, collate, to_samples
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.algorithms.experience import Experience
from agent_rl.algorithms.explain import explain, formula

__all__ = [
    "Algorithm",
    "AlgorithmConfig",
    "Denominators",
    "Experience",
    "LossTerms",
    "Rows",
    "ScoredRows",
    "WeightedRows",
    "collate",
    "explain",
    "formula",
    "to_samples",
]
