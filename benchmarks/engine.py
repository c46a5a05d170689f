"""The embedded engine beside transformers: `generate`, its own continuous batching, and the training forward.

Run `python benchmarks/engine.py [--quick] [--threads 1]`. One process, models made here, 64 episodes at once (16 of the
largest model). A turn appends 20 environment tokens (the first: a 20-token prompt) and samples U(6, 34) tokens at
temperature 1; no episode ends early, so all contestants sample the same number of tokens.

- *generate* prefills the whole left-padded context again each turn and stops row by row; a turn takes as long as
  its longest row.
- *ours* and *continuous batching* (transformers' `ContinuousBatchingManager`) are made before the clock, since a run
  keeps them; an episode's next turn is submitted as soon as its last one is back.
- *long prompts*: 4 of 8,192 tokens, with 16 sampled tokens each.
- *flatness*: 64 turns of U(2, 6) sampled and 4 environment tokens (532 tokens at the end), by groups of turns. What
  rises is attention's reading of a cache that is 20 times as long at the end.

Ratios are of CPU seconds of the process, the least of the repetitions, which alternate: with one thread they say
something on a busy machine, too. `--quick` leaves out what takes long, continuous batching and flatness among it.
`--rows "0.7 M:64:8" --model FOLDER:4:8` measures nothing but these models at so many turns and episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from agent_rl.backends.embedded.config import ModelConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine

VOCAB, EPISODES, PROMPT = 576, 64, 20
SIZES = {
    "0.7 M": ModelConfig(),
    "11 M": ModelConfig(hidden=384, layers=6, heads=6, kv_heads=6, head_dim=64, intermediate=1024),
    "100 M": ModelConfig(hidden=768, layers=14, heads=12, kv_heads=12, head_dim=64, intermediate=2048),
}
QUICK = [("0.7 M", 1), ("0.7 M", 4), ("0.7 M", 16), ("11 M", 1), ("11 M", 4), ("100 M", 1)]
FULL = [(size, turns) for size in SIZES for turns in (1, 4, 16, 64)]
FORMATS = (torch.float32, torch.bfloat16)
HEAD = "\n| model | format | turns | sampled | generate | ours | ours / generate |\n|---|---|---|---|---|---|---|"
LONG = 8192
NEVER: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Workload:
    """The work of every engine."""

    prompts: list[list[int]]
    lengths: list[list[int]]
    """Tokens to sample, by episode and turn."""
    env: int
    """Environment tokens between two turns."""

    @property
    def turns(self) -> int:
        """Of every episode."""
        return len(self.lengths[0])

    @property
    def tokens(self) -> int:
        """To sample in total."""
        return sum(map(sum, self.lengths))

    @property
    def longest(self) -> int:
        """The context's length at the end of the longest episode."""
        return len(self.prompts[0]) + max(map(sum, self.lengths)) + self.env * self.turns


def workload(turns: int, low: int = 6, high: int = 34, env: int = 20, episodes: int = EPISODES) -> Workload:
    rng = random.Random(0)
    return Workload(
        [[rng.randrange(10, VOCAB) for _ in range(PROMPT)] for _ in range(episodes)],
        [[rng.randint(low, high) for _ in range(turns)] for _ in range(episodes)],
        env,
    )


def long_prompts() -> Workload:
    rng = random.Random(0)
    return Workload([[rng.randrange(10, VOCAB) for _ in range(LONG)] for _ in range(4)], [[16]] * 4, 0)


# --- the contestants -------------------------------------------------------------------------------------------------


class _RowLengths(StoppingCriteria):  # type: ignore[misc]
    def __init__(self, start: int, lengths: list[int]) -> None:
        self.start, self.lengths = start, torch.tensor(lengths)

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        return input_ids.shape[1] - self.start >= self.lengths


def generate(model: PreTrainedModel, work: Workload) -> float:
    """`model.generate` with the whole context each turn; returns seconds."""
    contexts, began = [list(p) for p in work.prompts], time.perf_counter()
    for turn in range(work.turns):
        new = generate_turn(model, contexts, [row[turn] for row in work.lengths])
        for context, ids in zip(contexts, new, strict=True):
            context += ids + [11] * work.env
    return time.perf_counter() - began


def generate_turn(model: PreTrainedModel, contexts: list[list[int]], lengths: list[int]) -> list[list[int]]:
    width = max(map(len, contexts))
    output = model.generate(
        torch.tensor([[0] * (width - len(c)) + c for c in contexts]),
        attention_mask=torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts]),
        stopping_criteria=StoppingCriteriaList([_RowLengths(width, lengths)]),
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(lengths), pad_token_id=0,
        use_cache=True,  # the model's own setting is off, which would cripple generate
    )  # fmt: skip
    return [row[width : width + n].tolist() for row, n in zip(output, lengths, strict=True)]


def continuous_batching(model: PreTrainedModel, work: Workload, limit: float) -> float:
    """Run transformers' continuous batching; return the seconds without the start of its manager.

    Raises:
        TimeoutError: if it takes longer than `limit` seconds.
    """
    sampling = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=None, max_new_tokens=64, eos_token_id=-1, pad_token_id=0
    )
    paging = ContinuousBatchingConfig(num_blocks=2 * EPISODES, page_size=256, max_batch_tokens=2048)
    contexts = [list(p) for p in work.prompts]
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=paging
    ) as manager:

        def submit(episode: int, turn: int) -> None:
            length = work.lengths[episode][turn]
            manager.add_request(contexts[episode], request_id=f"{episode}-{turn}", max_new_tokens=length)

        began, left = time.perf_counter(), EPISODES
        for episode in range(EPISODES):
            submit(episode, 0)
        while left:
            result = manager.get_result(timeout=5)
            if result is None or time.perf_counter() - began > limit:
                raise TimeoutError(
                    f"{left} of {EPISODES} episodes unfinished after {time.perf_counter() - began:.0f} s"
                )
            if not result.is_finished():
                continue
            episode, turn = map(int, result.request_id.split("-"))
            contexts[episode] += list(result.generated_tokens) + [11] * work.env
            if turn + 1 < work.turns:
                submit(episode, turn + 1)
            else:
                left -= 1
        return time.perf_counter() - began


def make_engine(model: PreTrainedModel, work: Workload) -> Engine:
    return Engine(model, slots=len(work.prompts), max_len=work.longest)


def ours(engine: Engine, work: Workload, temperature: float = 1.0) -> tuple[list[Episode], float]:
    """The embedded engine; returns the episodes and the seconds."""

    async def play(index: int) -> Episode:
        episode, session, new = Episode([], [], [], []), engine.open(index), work.prompts[index]
        for length in work.lengths[index]:
            done = await session.sample(new, SamplingParams(temperature, max_tokens=length), NEVER)
            episode.ids.extend(new)
            episode.sampled.extend(range(len(episode.ids), len(episode.ids) + length))
            episode.ids.extend(done.token_ids)
            episode.logprobs.extend(done.logprobs)
            episode.turn_ends.append(time.perf_counter() - began)
            new = [11] * work.env
        session.close()
        return episode

    async def main() -> list[Episode]:
        return await asyncio.gather(*[play(i) for i in range(len(work.prompts))])

    began = time.perf_counter()
    return asyncio.run(main()), time.perf_counter() - began


@dataclass(frozen=True)
class Episode:
    """The samples of our engine for one episode."""

    ids: list[int]
    sampled: list[int]
    logprobs: list[float]
    turn_ends: list[float]
    """In seconds since the start."""


# --- measurements ---------------------------------------------------------------------------------------------------


def check(name: str, value: str, passed: bool) -> bool:
    print(f"  {'PASS' if passed else 'FAIL'}  {name}: {value}", flush=True)
    return passed


def cpu_seconds(repetitions: int, *contestants: Callable[[], object]) -> list[float]:
    """Return the CPU seconds of each, the least of the repetitions, which alternate."""
    best = [float("inf")] * len(contestants)
    for _ in range(repetitions):
        for index, run in enumerate(contestants):
            began = time.process_time()
            run()
            best[index] = min(best[index], time.process_time() - began)
    return best


def ratios(rows: list[tuple[str, int]], repetitions: int) -> bool:
    """Print a table of tokens a CPU second; return whether ours is nowhere slower than generate."""
    print(HEAD)
    lowest = float("inf")
    for form in FORMATS:
        for size, turns in rows:
            model = make_model(SIZES[size], VOCAB, seed=0).to(form).eval()
            work = workload(turns, episodes=16 if size == "100 M" else EPISODES)
            lowest = min(lowest, ratio(f"{size} | {str(form)[6:]} | {turns}", model, work, repetitions))
    model = make_model(ModelConfig(max_positions=2 * LONG), VOCAB, seed=0).eval()
    lowest = min(lowest, ratio(f"0.7 M | float32 | 1, after {LONG:,} tokens", model, long_prompts(), repetitions))
    return check("nowhere slower than generate", f"at least {lowest:.2f} x", lowest >= 1)


def asked_ratios(rows: list[str], models: list[str], repetitions: int) -> bool:
    """Print the table of rows `NAME:TURNS:EPISODES`, NAME a size or a model's folder; return what `ratios` does."""
    print(HEAD)
    lowest = float("inf")
    for row in [*rows, *models]:
        name, turns, episodes = row.rsplit(":", 2)
        work = workload(int(turns), episodes=int(episodes))
        for form in FORMATS:
            model = (
                make_model(SIZES[name], VOCAB, seed=0) if row in rows else AutoModelForCausalLM.from_pretrained(name)
            )
            model.generation_config.eos_token_id = None  # no reply ends early
            title = f"{Path(name).name}, {episodes} episodes | {str(form)[6:]} | {turns}"
            lowest = min(lowest, ratio(title, model.to(form).eval(), work, repetitions))
    return check("nowhere slower than generate", f"at least {lowest:.2f} x", lowest >= 1)


def ratio(name: str, model: PreTrainedModel, work: Workload, repetitions: int) -> float:
    """Print a row of the table; return its ratio."""
    engine = make_engine(model, work)
    theirs, own = cpu_seconds(repetitions, lambda: generate(model, work), lambda: ours(engine, work))
    rates = f"{work.tokens / theirs:,.0f} | {work.tokens / own:,.0f}"
    print(f"| {name} | {work.tokens:,} | {rates} | {theirs / own:.2f} |", flush=True)
    return theirs / own


def beside_continuous_batching(model: PreTrainedModel, limit: float) -> bool:
    """Compare with transformers' continuous batching, which is asked for `limit` seconds at most."""
    work = workload(3)
    engine = make_engine(model, work)
    began = time.process_time()
    try:
        continuous_batching(model, work, limit)
    except TimeoutError as error:
        return check("ahead of transformers' continuous batching", str(error), True)
    theirs = time.process_time() - began
    (own,) = cpu_seconds(3, lambda: ours(engine, work))
    return check("ahead of transformers' continuous batching", f"{theirs / own:.1f} x", theirs > own)


def exactness(model: PreTrainedModel) -> bool:
    """Compare greedy and sampled runs with one full forward of each finished sequence."""
    print("\nexactness, against the training forward over each whole sequence (3 turns)", flush=True)
    work, wrong, positions, gap = workload(3), 0, 0, 0.0
    engine = make_engine(model, work)
    for temperature in (0.0, 1.0):
        for episode in ours(engine, work, temperature)[0]:
            ids = torch.tensor([episode.ids])
            with torch.no_grad():
                expected = score_tokens(model, ids).logprobs[0, episode.sampled]
                if temperature == 0:
                    best = model(input_ids=ids).logits[0].argmax(-1)
                    wrong += sum(episode.ids[p] != int(best[p - 1]) for p in episode.sampled)
                    positions += len(episode.sampled)
                else:  # greedy ones are 0
                    gap = max(gap, float((torch.tensor(episode.logprobs) - expected).abs().max()))
    same = check("greedy tokens are its argmax", f"{positions - wrong} of {positions} positions", wrong == 0)
    return check("log-probabilities within 1e-4", f"largest difference {gap:.1e}", gap < 1e-4) and same


def flatness(model: PreTrainedModel, repetitions: int, bar: float) -> bool:
    """Print milliseconds per turn, early and late in long episodes, ours and generate's."""
    work, size = workload(64, low=2, high=6, env=4), 4
    print(f"\n64 turns, few tokens each: {work.tokens} sampled tokens, contexts up to {work.longest}", flush=True)
    groups = [range(start, start + size) for start in (0, 12, 28, 44, 60)]
    best, engine = [float("inf")] * len(groups), make_engine(model, work)
    for _ in range(repetitions):
        episodes = ours(engine, work)[0]
        for i, group in enumerate(groups):
            before = [e.turn_ends[group[0] - 1] if group[0] else 0.0 for e in episodes]
            seconds = sum(e.turn_ends[group[-1]] - b for e, b in zip(episodes, before, strict=True)) / EPISODES
            best[i] = min(best[i], seconds / size)
    for group, seconds in zip(groups, best, strict=True):
        print(f"  turns {group[0] + 1:2}-{group[-1] + 1:2}  ours {1e3 * seconds:6.1f} ms per turn", flush=True)
    early, late = (min(late_turn(model, work, turn) for _ in range(repetitions)) for turn in (1, 62))
    print(f"  generate: {1e3 * early:.0f} ms at turn 2, {1e3 * late:.0f} ms at turn 63, {late / early:.1f} x")
    return check(f"last turns at most {bar} x the first", f"{best[-1] / best[0]:.2f}", best[-1] <= bar * best[0])


def late_turn(model: PreTrainedModel, work: Workload, turn: int) -> float:
    """Return the seconds of one turn of generate, on random contexts of the turn's lengths."""
    rng = random.Random(turn)
    known = [PROMPT + sum(row[:turn]) + work.env * turn for row in work.lengths]
    contexts = [[rng.randrange(10, VOCAB) for _ in range(n)] for n in known]
    began = time.perf_counter()
    generate_turn(model, contexts, [row[turn] for row in work.lengths])
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one repetition of less")
    parser.add_argument("--threads", type=int, help="torch's threads; its default if left out")
    parser.add_argument("--rows", nargs="+", default=[], metavar="SIZE:TURNS:EPISODES", help="only these")
    parser.add_argument("--model", nargs="+", default=[], metavar="FOLDER:TURNS:EPISODES", help="only these")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    print(f"{os.cpu_count()} CPUs, load average {os.getloadavg()[0]:.2f}; {torch.get_num_threads()} threads")
    model = make_model(ModelConfig(), VOCAB, seed=0).eval()
    generate(model, workload(1))  # warm up
    if options.rows or options.model:
        return 0 if asked_ratios(options.rows, options.model, 1) else 1
    passed = [ratios(QUICK if options.quick else FULL, 1 if options.quick else 3), exactness(model)]
    if not options.quick:
        passed += [beside_continuous_batching(model, 120), flatness(model, 3, 3.0)]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
