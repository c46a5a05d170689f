"""A training step beside TRL's GRPOTrainer on the same work: python benchmarks/trl.py [--checkpoint DIR] [--model DIR].

Both sides train the same checkpoint on the same tasks of calculator-v0 with the same tokenizer and chat template, the
same number of episodes and of samples per task, GRPO with one update (clip 0.2 / 0.28, mean over all tokens, no KL),
AdamW with the same numbers, float32, one thread. A micro-batch has 1,024 tokens at most, our default on a CPU, and 8
rows on TRL's side, its default; TRL's gradient checkpointing is off, which is its fastest. Each side is a process of
its own; the two take turns, `--rounds` times. A tool of 20 ms is a plain function that sleeps. A step is everything
from one update to the next but evaluation and files: TRL's from `on_step_end` to `on_step_end`, ours a call of
`Trainer.train_step`; the first is left out. Its seconds are those of the clock less those that the main thread waited
for a core, by /proc/self/schedstat: what it takes on a machine with nothing else to do. Memory is the most that the
process ever held, imports included.

Without `--checkpoint` a tiny model is warm-started first, in about two minutes. `--model` adds a pretrained one, such
as SmolLM2, with three examples in its prompt, for two steps of eight episodes. Runs in .venv-verl, where TRL 1.16 is.
Exits 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

BARS = {"instant": 2.5, "20 ms": 5.0, "memory": 2.0}
"""How many times as fast as TRL with instant tools and with slow ones, and how many times less memory."""
TURNS, REPLY, LR, SEED = 6, 56, 1e-3, 0
EXAMPLES = """Use the calculator once for each operation, then say the number alone.
compute 3*7
<tool_call>{"name":"calculator","arguments":{"operator":"*","left":3,"right":7}}</tool_call>
21
compute 12-5
<tool_call>{"name":"calculator","arguments":{"operator":"-","left":12,"right":5}}</tool_call>
7
compute 8+2*4
<tool_call>{"name":"calculator","arguments":{"operator":"*","left":2,"right":4}}</tool_call>
<tool_call>{"name":"calculator","arguments":{"operator":"+","left":8,"right":8}}</tool_call>
16
"""
TEMPLATE = Path(__file__).parent.parent / "agent_rl" / "rendering" / "chatml.j2"


@dataclass(frozen=True)
class Work:
    """What both sides do."""

    checkpoint: str
    steps: int
    groups: int
    samples: int
    delay_ms: float
    rows: int
    """Episodes of a micro-batch on TRL's side, so that it holds about as many tokens as ours."""
    context: int
    """Tokens of an episode, at most."""
    examples: str = ""
    """What the question comes after."""


@dataclass(frozen=True)
class Measured:
    """What a side took."""

    seconds: float
    """Of a step on a quiet machine, the median without the first."""
    wall: float
    """With what the main thread waited for a core."""
    cpu: float
    peak_mib: float
    start_mib: float
    """Before the first step: imports and the model."""
    tokens: float
    """Sampled in a step."""
    rewards: list[float]
    """The mean of every step."""


# --- the two sides, each in a process of its own ----------------------------------------------------------------------


def held_mib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def now() -> tuple[float, float, float]:
    """Return the seconds of the clock but for those that the main thread waited for a core, all of them, the CPU's."""
    waited = int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    clock = time.perf_counter()
    return clock - waited, clock, time.process_time()


def register(work: Work) -> Any:
    """Return calculator-v0 with a tool that may sleep, and what the question comes after."""
    import numpy as np

    import agent_rl as ar
    from agent_rl.envs.calculator import Calculator, make_task
    from agent_rl.tools.calculator import calculator as instant

    @ar.tool(name="calculator")
    def slow(operator: Literal["+", "-", "*"], left: int, right: int) -> int:
        """Compute one operation on two whole numbers."""
        time.sleep(work.delay_ms / 1e3)
        return instant(operator, left, right)

    @ar.register("benchmark/calculator-v0", tasks=make_task, splits=("train",), budget=ar.Budget(turns=TURNS))
    class Timed(Calculator):
        extra_tools = (slow if work.delay_ms else instant,)

        def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
            return work.examples + super().reset(task, rng)

    return ar.spec("benchmark/calculator-v0")


def ours(work: Work) -> Measured:
    from agent_rl.backends.embedded.actor import load_actor
    from agent_rl.backends.embedded.config import TrainConfig
    from agent_rl.backends.embedded.trainer import Trainer
    from agent_rl.config import load_config

    env = register(work)
    settings = [
        f"env={env.id}", f"steps={work.steps}", f"seed={SEED}", f"start_from={work.checkpoint}", "token_records=false",
        f"rollout.groups={work.groups}", f"rollout.samples={work.samples}", f"rollout.max_tokens={REPLY}",
        f"rollout.slots={min(128, work.groups * work.samples)}", f"optimizer.lr={LR}", "optimizer.warmup_steps=0",
        "optimizer.decay_from=1", "algorithm=grpo",
    ]  # fmt: skip
    config = load_config("backend/embedded", TrainConfig, settings)
    actor = load_actor(work.checkpoint, slots=config.rollout.slots, context=work.context)
    trainer = Trainer(env, actor, config)
    start, marks, rewards, tokens = held_mib(), [now()], [], []
    for _ in range(work.steps):
        before = actor.engine.tokens
        result = trainer.train_step()
        marks.append(now())
        rewards.append(statistics.fmean(episode.reward or 0.0 for episode in result.episodes))
        tokens.append(actor.engine.tokens - before)
    return measured(marks, start, tokens, rewards)


def theirs(work: Work) -> Measured:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import transformers
    import trl
    from datasets import Dataset
    from trl.chat_template_utils import qwen3_schema

    from agent_rl.gym.tasks import RL_START
    from agent_rl.tools.calculator import calculator as tool

    env = register(work)

    def calculator(operator: str, left: int, right: int) -> int:
        """Compute one operation on two whole numbers.

        Args:
            operator: what to do.
            left: the first number.
            right: the second number.
        """
        time.sleep(work.delay_ms / 1e3)
        return tool(operator, int(left), int(right))

    def reward(completions: list[list[dict[str, Any]]], answer: list[str], **_: object) -> list[float]:
        """What `Quiz` scores: the right answer, and a tenth for any that no failed call came before."""
        scores = []
        for messages, right in zip(completions, answer, strict=True):
            last = messages[-1] if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls") else {}
            text = last.get("content", "")
            failed = any(m["role"] == "tool" and "error" in m["content"] for m in messages)
            scores.append(float(text.strip() == right) + 0.1 * bool(text and not failed))
        return scores

    stream = env.tasks.stream("train", SEED)
    tasks = [stream.at(RL_START + n) for n in range(work.groups * work.steps)]
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{work.examples}compute {t['expression']}"}],
            "answer": str(t["answer"]),
        }
        for t in tasks
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(work.checkpoint)
    tokenizer.response_schema = qwen3_schema  # Hermes calls, as our template writes them
    model = transformers.AutoModelForCausalLM.from_pretrained(work.checkpoint, dtype="float32")
    marks = []

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            marks.append(now())

        on_step_end = on_train_begin

    episodes = work.groups * work.samples
    with tempfile.TemporaryDirectory() as folder:
        args = trl.GRPOConfig(
            output_dir=folder, max_steps=work.steps, per_device_train_batch_size=work.rows,
            gradient_accumulation_steps=episodes // work.rows, num_generations=work.samples, use_cpu=True, report_to=[],
            max_completion_length=TURNS * 2 * REPLY, generation_kwargs={"max_new_tokens": REPLY, "use_cache": True},
            max_tool_calling_iterations=TURNS - 1, temperature=1.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28,
            beta=0.0, learning_rate=LR, lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0,
            max_grad_norm=1.0, shuffle_dataset=False, gradient_checkpointing=False, bf16=False, logging_steps=1,
            save_strategy="no", disable_tqdm=True, seed=SEED,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model, reward_funcs=reward, args=args, processing_class=tokenizer, tools=[calculator],
            train_dataset=Dataset.from_list(rows), callbacks=[Clock()],
        )  # fmt: skip
        start = held_mib()
        trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    tokens = [row["completions/mean_length"] * episodes for row in logged]
    return measured(marks, start, tokens, [row["reward"] for row in logged])


def measured(
    marks: list[tuple[float, float, float]], start: float, tokens: list[float], rewards: list[float]
) -> Measured:
    """Sum up: `marks` are what `now` said before the first step and after each."""
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(marks)]
    seconds, wall, cpu = (statistics.median(column) for column in zip(*steps[1:], strict=True))
    return Measured(seconds, wall, cpu, held_mib(), start, statistics.median(tokens[1:]), rewards)


# --- the comparison ---------------------------------------------------------------------------------------------------


def child(name: str, *arguments: object) -> Any:
    """Call a function of `CHILDREN` in a process of its own; -P, or this file would be the `trl` that it imports."""
    command = [sys.executable, "-P", __file__, "--child", name, json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = str(Path(__file__).parent.parent)
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(name: str, work: Work, rounds: int, bar: float) -> bool:
    """Print a row of the table for each side; return whether ours is `bar` times as fast in half the memory."""
    found: dict[str, list[Measured]] = {"TRL": [], "ours": []}
    for _ in range(rounds):
        found["TRL"].append(Measured(**child("theirs", asdict(work))))
        found["ours"].append(Measured(**child("ours", asdict(work))))
    best = {side: min(runs, key=lambda m: m.seconds) for side, runs in found.items()}
    for side, m in best.items():
        numbers = (
            f"{m.seconds:.2f} | {m.cpu:.2f} | {m.wall:.1f} | {m.tokens:.0f} | {m.peak_mib:.0f} | {m.start_mib:.0f}"
        )
        print(f"| {name} | {side} | {numbers} | {curve(m.rewards)} |", flush=True)
    trl, us = best["TRL"], best["ours"]
    ratio, memory = trl.seconds / us.seconds, trl.peak_mib / us.peak_mib
    passed = ratio >= bar and memory >= BARS["memory"]
    print(
        f"  {'PASS' if passed else 'FAIL'}  {name}: {ratio:.2f} x as fast (bar {bar}), CPU {trl.cpu / us.cpu:.2f} x; "
        f"memory 1/{memory:.2f} (bar 1/{BARS['memory']:g}); load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return passed


def curve(rewards: list[float]) -> str:
    """Return the mean rewards of four parts of the run."""
    size = max(1, len(rewards) // 4)
    return " ".join(f"{statistics.fmean(rewards[at : at + size]):.2f}" for at in range(0, len(rewards), size))


def warm_started(folder: str) -> None:
    """Warm-start the tiny model and write its checkpoint into a folder."""
    import shutil

    import agent_rl as ar

    quick = {"eval": {"n": 8, "dev_n": 8, "every": 0}, "warm_start": {"demonstrations": 2000, "clone_steps": 300}}
    done = ar.train("calculator-v0", steps=1, runs_dir=f"{folder}.run", threads=1, seed=SEED, **quick)
    shutil.copytree(Path(done.folder) / "checkpoint", folder)


def pretrained(folder: str, source: str) -> None:
    """Copy a pretrained model with the template that both sides use; its own may render no tools."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(source, agent_rl_renderer="chatml")
    tokenizer.chat_template = TEMPLATE.read_text()
    tokenizer.save_pretrained(folder)
    for file in Path(source).iterdir():
        if not (Path(folder) / file.name).exists():
            (Path(folder) / file.name).symlink_to(file.resolve())


CHILDREN = {"ours": ours, "theirs": theirs, "warm_started": warm_started, "pretrained": pretrained}


def main() -> int:
    """Compare; return 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", help="a warm-started tiny model; without it one is made")
    parser.add_argument("--model", help="a folder with a pretrained model, such as SmolLM2")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=["instant", "20 ms", "model"], help="leave the others out")
    options = parser.parse_args()
    works, passed = [], []
    print("| work | side | seconds a step | CPU | with waiting | sampled tokens | peak MiB | at the start | reward |")
    with tempfile.TemporaryDirectory() as folder:
        if options.only != "model":
            checkpoint = options.checkpoint or f"{folder}/tiny"
            if not options.checkpoint:
                child("warm_started", checkpoint)
            for name, delay, steps in (("instant", 0, options.steps), ("20 ms", 20, 4)):
                works.append((name, Work(checkpoint, steps, 16, 8, delay, rows=8, context=256), options.rounds))
        if options.model:
            child("pretrained", f"{folder}/model", options.model)
            work = Work(f"{folder}/model", 2, 2, 4, 0, rows=4, context=512, examples=EXAMPLES)
            works.append(("model, instant", work, 1))
        for name, work, rounds in works:
            if options.only is None or options.only in name:
                passed.append(compare(name, work, rounds, BARS[name.removeprefix("model, ")]))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        import torch

        torch.set_num_threads(1)
        arguments = json.loads(sys.argv[3])
        found = CHILDREN[sys.argv[2]](*(Work(**a) if isinstance(a, dict) else a for a in arguments))
        print(json.dumps(found and asdict(found)))
    else:
        sys.exit(main())
