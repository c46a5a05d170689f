"""Run verl on two CPU cores: python -m verl_cpu.run SETTINGS."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from verl_cpu.settings import ENVIRONMENT, FOLDER, REFERENCE, SEPARATE, SETTINGS


def main() -> None:
    """Train, and print the run's folder on the last line."""
    os.environ.update(ENVIRONMENT)  # before verl is imported
    from agent_rl.algorithms import Algorithm
    from agent_rl.algorithms.config import AlgorithmConfig
    from agent_rl.backends.verl.config.settings import VerlConfig
    from agent_rl.backends.verl.driver.run import start

    given = json.loads(sys.argv[1])
    settings = SETTINGS
    if given.get("async", {}).get("mode") == "separate":
        settings = SETTINGS | SEPARATE | {FOLDER: str(Path.cwd())}
    algorithm = AlgorithmConfig.model_validate(given.get("algorithm", {}))
    settings = settings | (REFERENCE if Algorithm(algorithm).needs_reference else {})
    print(start(VerlConfig.model_validate({**given, "verl": {**settings, **given.get("verl", {})}})))


if __name__ == "__main__":
    main()
