"""Algorithms: pure functions over batches, composed by a config; no trainer state, both backends use them."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agent_rl.algorithms.algorithm import Algorithm
    from agent_rl.algorithms.batch import Denominators, Rows, ScoredRows, WeightedRows
    from agent_rl.algorithms.config import AlgorithmConfig
    from agent_rl.algorithms.experience import Experience
    from agent_rl.algorithms.loss import LossTerms
    from agent_rl.algorithms.samples import collate, to_samples

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
    "to_samples",
]

_MODULES = {
    "Algorithm": "algorithm",
    "AlgorithmConfig": "config",
    "Experience": "experience",
    "LossTerms": "loss",
    "collate": "samples",
    "to_samples": "samples",
}


def __getattr__(name: str) -> object:
    """Import a name's module when it is asked for: most need torch, the config does not."""
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'batch')}"), name)
