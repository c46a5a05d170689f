"""Gymnasium's own checker, on the environment as `gymnasium.make` gives it."""

from __future__ import annotations

import re
import warnings
from typing import Any

from agent_rl.checks.bench import Bench
from agent_rl.checks.report import place
from agent_rl.gym.published import gymnasium_id
from agent_rl.worker_threads import in_thread

_COLOURS = re.compile(r"\x1b\[\d+m")


async def check_gymnasium(bench: Bench) -> None:
    """Find what Gymnasium's checker objects to, once nothing else is left to mend: it finds that again."""
    import gymnasium

    if bench.findings or gymnasium_id(bench.spec.id) not in gymnasium.registry:
        bench.skipped["gymnasium"] = "mend the findings first" if bench.findings else "it is not registered there"
        return
    where = place(bench.cls)
    for problem in await in_thread(lambda: _objections(bench), "gymnasium's checker"):
        bench.find("gymnasium", problem, where, "let gymnasium.utils.env_checker.check_env pass without a warning")


def _objections(bench: Bench) -> list[str]:
    import gymnasium
    from gymnasium.utils.env_checker import check_env

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        settings: dict[str, Any] = {**bench.env_args, "split": bench.spec.tasks.splits[0]}
        env = gymnasium.make(gymnasium_id(bench.spec.id), **settings).unwrapped
        try:
            check_env(env)
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
        finally:
            env.close()
    return [_COLOURS.sub("", str(warning.message)) for warning in said]
