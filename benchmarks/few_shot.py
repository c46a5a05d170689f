"""What an untrained language model does with solved tasks in its prompt: the level that training has to leave behind.

    python benchmarks/few_shot.py MODEL ENV [--examples 3] [--n 64] [--context 1024] [--max-tokens 64]
                                  [--renderer chatml] [--env-args KEY=VALUE ...]

The examples are what the environment's oracle does on the first tasks of `train`; they come before each held-out task,
as a conversation that has been. Success is printed sampled at temperature 1, and greedy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

import agent_rl as ar
from agent_rl.config import parse_setting


def main() -> int:
    """Print a row of a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("env")
    parser.add_argument("--examples", type=int, default=3)
    parser.add_argument("--n", type=int, default=64)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--renderer", default="chatml")
    parser.add_argument("--env-args", nargs="*", default=[])
    options = parser.parse_args()
    env_args = dict(map(parse_setting, options.env_args))
    solved = ar.run(options.env, "oracle", n=options.examples, env_args=env_args)
    examples = [message for episode in solved for message in episode.messages if message.role != "system"]
    env = with_examples(ar.spec(options.env), examples, options.n)
    cells = []
    for temperature in (1.0, 0.0):
        how = {"max_tokens": options.max_tokens, "context": options.context, "renderer": options.renderer}
        policy = ar.load(options.model, temperature, **how)
        cells.append(str(ar.evaluate(env, policy, n=options.n, concurrency=8, env_args=env_args).success).strip())
    print(f"| {options.env}, {len(solved)} examples | {' | '.join(cells)} |")
    return 0


def with_examples(env: ar.EnvSpec, examples: Sequence[ar.Message], n: int) -> type[ar.Env]:
    """Return an environment with the first `n` held-out tasks of another, texts, each behind solved ones."""

    class FewShot(env.cls):  # type: ignore[name-defined, misc]
        def reset(self, task: ar.Task, rng: np.random.Generator) -> list[ar.Message]:
            return [*examples, ar.Message("user", super().reset(task, rng))]

    rows = [dict(task) for task in env.tasks.distinct("eval", n)]
    ar.register("few-shot-v0", tasks={"eval": rows}, budget=env.budget)(FewShot)
    return FewShot


if __name__ == "__main__":
    sys.exit(main())
