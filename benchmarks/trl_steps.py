"""What `trl.py` compares: a step of ours and one of TRL's, and both updates on the same batches."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

TURNS, REPLY = 6, 56
EPS = 1e-4
"""What TRL adds to the standard deviation that it divides advantages by; it has no setting for it."""
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
    lr: float
    seed: int = 0
    """Of the tasks and of all that is sampled."""
    examples: str = ""
    """What the question comes after."""
    device: str = "cpu"


@dataclass(frozen=True)
class Measured:
    """What a side took."""

    seconds: float
    """Of a step on a quiet machine, the median without the first."""
    wall: float
    """With what the main thread waited for a core."""
    cpu: float
    peak_mib: float
    """The most that the process ever held; on a GPU what was reserved there, not counting CUDA's own."""
    start_mib: float
    """Before the first step: imports and the model."""
    tokens: float
    """Sampled in a step."""
    rewards: list[float]
    """The mean of every step."""


def held_mib() -> float:
    import resource

    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def now() -> tuple[float, float, float]:
    """Return the seconds of the clock but for those that the main thread waited for a core, all of them, the CPU's."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
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


def our_trainer(work: Work) -> Any:
    from agent_rl.backends.embedded.actor import load_actor
    from agent_rl.backends.embedded.config import TrainConfig
    from agent_rl.backends.embedded.trainer import Trainer
    from agent_rl.config import load_config

    env = register(work)
    settings = [
        f"env={env.id}", f"steps={work.steps}", f"seed={work.seed}", f"start_from={work.checkpoint}",
        f"rollout.groups={work.groups}", f"rollout.samples={work.samples}", f"rollout.max_tokens={REPLY}",
        f"rollout.slots={min(128, work.groups * work.samples)}", f"optimizer.lr={work.lr}", "optimizer.warmup_steps=0",
        "optimizer.decay_from=1", "algorithm=grpo", f"algorithm.advantage.eps={EPS}", "token_records=false",
        f"device={work.device}",
    ]  # fmt: skip
    config = load_config("backend/embedded", TrainConfig, settings)
    actor = load_actor(work.checkpoint, slots=config.rollout.slots, context=work.context, device=work.device)
    return Trainer(env, actor, config)


def ours(work: Work) -> Measured:
    trainer = our_trainer(work)
    actor = trainer.actor
    start, marks, rewards, tokens = held_mib(), [now()], [], []
    for _ in range(work.steps):
        before = actor.engine.tokens
        result = trainer.train_step()
        marks.append(now())
        rewards.append(statistics.fmean(episode.reward or 0.0 for episode in result.episodes))
        tokens.append(actor.engine.tokens - before)
    return measured(marks, start, tokens, rewards)


def their_trainer(work: Work, env: Any, folder: str, callbacks: list[Any]) -> Any:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import transformers
    import trl
    from datasets import Dataset
    from trl.chat_template_utils import qwen3_schema, qwen3_template

    from agent_rl.gym.tasks import RL_START
    from agent_rl.tools.calculator import calculator as tool

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

    stream = env.tasks.stream("train", work.seed)
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
    tokenizer.response_template = qwen3_template  # the same for transformers from 5.13 on
    model = transformers.AutoModelForCausalLM.from_pretrained(work.checkpoint, dtype="float32")
    episodes = work.groups * work.samples
    args = trl.GRPOConfig(
        output_dir=folder, max_steps=work.steps, per_device_train_batch_size=work.rows,
        gradient_accumulation_steps=episodes // work.rows, num_generations=work.samples,
        use_cpu=work.device == "cpu", report_to=[], max_completion_length=TURNS * 2 * REPLY,
        generation_kwargs={"max_new_tokens": REPLY, "use_cache": True}, max_tool_calling_iterations=TURNS - 1,
        temperature=1.0, loss_type="dapo", epsilon=0.2, epsilon_high=0.28, beta=0.0, learning_rate=work.lr,
        lr_scheduler_type="constant", adam_beta1=0.9, adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0,
        shuffle_dataset=False, gradient_checkpointing=False, bf16=False, logging_steps=1, save_strategy="no",
        disable_tqdm=True, seed=work.seed,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model, reward_funcs=reward, args=args, processing_class=tokenizer, tools=[calculator],
        train_dataset=Dataset.from_list(rows), callbacks=callbacks,
    )  # fmt: skip


def theirs(work: Work) -> Measured:
    from transformers import TrainerCallback

    marks = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            marks.append(now())

        on_step_end = on_train_begin

    with tempfile.TemporaryDirectory() as folder:
        trainer = their_trainer(work, register(work), folder, [Clock()])
        start = held_mib()
        trainer.train()
    logged = [row for row in trainer.state.log_history if "reward" in row]
    tokens = [row["completions/mean_length"] * work.groups * work.samples for row in logged]
    return measured(marks, start, tokens, [row["reward"] for row in logged])


def same(work: Work) -> list[list[float]]:
    """Let TRL's loss and optimizer learn what ours learns: its loss and norm, ours, and how far gradients differ."""
    import torch

    mine, found = our_trainer(work), []
    with tempfile.TemporaryDirectory() as folder:
        other = their_trainer(work, mine.spec, folder, [])
    twin, optimizer = other.model.train(), other.create_optimizer()
    other.current_gradient_accumulation_steps = other.args.steps_per_generation
    padding = other.processing_class.pad_token_id
    gradients, step = list[torch.Tensor](), mine.optimizer.step

    def recorded(scale: float) -> float:
        gradients[:] = [parameter.grad.clone() for parameter in mine.optimizer.parameters]
        return step(scale)

    mine.optimizer.step = recorded
    for _ in range(work.steps):
        batch = mine.rollouts.sample(mine.step)
        x = batch.experience(mine.algorithm)
        rows, scores = x.rows, x.scores.view(work.groups, work.samples)
        advantages = ((scores - scores.mean(1, True)) / (scores.std(1, keepdim=True) + EPS)).flatten().float()
        loss = 0.0
        for part in torch.arange(len(rows)).split(work.rows):
            part_loss = other._compute_loss(twin, inputs_of(rows, part, advantages[rows.episode], padding, work.device))
            part_loss.backward()
            loss += part_loss.item()
        theirs = [parameter.grad.clone() for parameter in twin.parameters()]
        norm = float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0))
        optimizer.step()
        optimizer.zero_grad()
        metrics = mine.update(x)
        mine.step += 1
        mine.actor.engine.update_weights(mine.step)
        apart = sum(float((a - b).square().sum()) for a, b in zip(gradients, theirs, strict=True)) ** 0.5 / norm
        reward = float(scores.mean())
        found.append([reward, metrics["train/loss"], loss, metrics["train/grad_norm"], norm, apart])
    return found


def inputs_of(rows: Any, part: Any, advantages: Any, padding: int, device: str) -> dict[str, Any]:
    """Return some of our rows as TRL has them: prompts padded on the left, what follows on the right."""
    import torch

    some = rows.padded(part)
    first = some.loss_mask.int().argmax(1)
    before, after = int(first.max()), int((some.lengths - first).max())
    where = torch.arange(-before, after) + first[:, None]
    there = (where >= 0) & (where < some.lengths[:, None])
    place = where.clamp(0, some.token_ids.shape[1] - 1)
    ids = some.token_ids.gather(1, place).masked_fill(~there, padding)
    sampled = (some.loss_mask.gather(1, place) & there).long()
    inputs = {
        "prompt_ids": ids[:, :before], "prompt_mask": there[:, :before].long(), "completion_ids": ids[:, before:],
        "completion_mask": there[:, before:].long(), "tool_mask": sampled[:, before:], "advantages": advantages[part],
        "num_items_in_batch": rows.loss_mask.sum(),
    }  # fmt: skip
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def measured(
    marks: list[tuple[float, float, float]], start: float, tokens: list[float], rewards: list[float]
) -> Measured:
    """Sum up: `marks` are what `now` said before the first step and after each."""
    steps = [[b - a for a, b in zip(*pair, strict=True)] for pair in pairwise(marks)]
    seconds, wall, cpu = (statistics.median(column) for column in zip(*steps[1:], strict=True))
    return Measured(seconds, wall, cpu, held_mib(), start, statistics.median(tokens[1:]), rewards)


def warm_started(folder: str) -> None:
    """Warm-start the tiny model and write its checkpoint into a folder."""
    import shutil

    import agent_rl as ar

    quick = {"eval": {"n": 8, "dev_n": 8, "every": 0}, "warm_start": {"demonstrations": 2000, "clone_steps": 300}}
    done = ar.train("calculator-v0", steps=1, runs_dir=f"{folder}.run", threads=1, seed=0, **quick)
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


CHILDREN = {"ours": ours, "theirs": theirs, "same": same, "warm_started": warm_started, "pretrained": pretrained}


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    given = [Work(**a) if isinstance(a, dict) else a for a in json.loads(sys.argv[2])]
    result = CHILDREN[sys.argv[1]](*given)
    print(json.dumps(asdict(result) if is_dataclass(result) else result))
