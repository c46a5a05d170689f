"""Warm start: teach a fresh model to copy, then to behave like noisy demonstrations.

Two phases; a pretrained model has the second, and only if it is asked for. *Copying*: random strings that repeat, until
the model has found induction (its loss on the repeats falls below a gate); a tool-using model that can't copy a number
from one message to the next learns nothing else. *Cloning*: the demonstrations' own tokens, environment tokens weighted
low, with some copying mixed in.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_rl.backends.embedded.optimizer import Optimizer, schedule
from agent_rl.backends.embedded.precision import PrecisionConfig
from agent_rl.backends.embedded.scoring import score_tokens
from agent_rl.backends.embedded.warm_checkpoint import WarmCheckpoint
from agent_rl.backends.embedded.warm_start_config import WarmStartConfig
from agent_rl.core.episode import Episode, Failure, Origin
from agent_rl.core.messages import JSON
from agent_rl.core.trajectory import Trajectory
from agent_rl.core.turns import replies
from agent_rl.errors import ConfigError
from agent_rl.gym.env import Env, Script
from agent_rl.gym.mixture import assign, members_of
from agent_rl.gym.registry import BUILTIN, EnvSpec
from agent_rl.gym.tasks import episode_seed, task_key
from agent_rl.moe.balance import balance_loss
from agent_rl.moe.routes import routed
from agent_rl.policy.scripted import Scripted, demonstrator
from agent_rl.rendering.base import Renderer
from agent_rl.rollout.job import Job
from agent_rl.rollout.pool import run_jobs
from agent_rl.runs.commands import command
from agent_rl.seeds import Stream, rng
from agent_rl.store.episodes import read_episodes
from agent_rl.view.conversation import clean

_log = logging.getLogger(__name__)


def demonstrate(
    env: EnvSpec,
    n: int,
    *,
    split: str,
    seed: int,
    env_args: Mapping[str, JSON] | None = None,
    renderer: Renderer | None = None,
) -> list[Episode]:
    """Run the environments' own noisy scripts on the first `n` tasks of a split; with token ids if there is a renderer.

    Raises:
        ConfigError: if the environment has no demonstrations.
    """
    tasks, origin = env.tasks.stream(split, seed), Origin("demonstration", split)
    assigned = (assign(env, env_args or {}, tasks.at(position)) for position in range(n))
    jobs = [
        Job(spec, task, episode_seed(seed, task, i), env_args=args, origin=origin)
        for i, (spec, args, task) in enumerate(assigned)
    ]
    episodes = asyncio.run(run_jobs(jobs, demonstrator(renderer)))
    for job, episode in zip(jobs, episodes, strict=True):
        if episode.error is not None:
            raise ConfigError(_what_broke(job.spec, episode, episode.error))
    return episodes


def _what_broke(env: EnvSpec, episode: Episode, error: Failure) -> str:
    """Return what a demonstration failed with, where and on which task, and how to look for more such."""
    task = json.dumps(episode.task, ensure_ascii=False, default=str)
    look = command("check", env.id, imports=[env.file] if env.file is not None and env.id not in BUILTIN else [])
    said = f"failed in {error.where}: {_said(error)}"
    return f"a demonstration of {env.id} {said}; its task is {clean(task[:300])}; look for more with: {look}"


def _said(error: Failure) -> str:
    return clean(f"{error.type}: {error.message[:500]}")


def stored_demonstrations(
    env: EnvSpec,
    path: str,
    n: int,
    *,
    successful: bool = True,
    but: Container[str] = (),
    renderer: Renderer | None = None,
    warn: Callable[[str], object] = _log.warning,
) -> list[Episode]:
    """Play the replies of stored episodes again; with token ids if there is a renderer.

    Those with a call that could not be read are left out, as its text is not kept, and those whose last reply was cut:
    it would be learned as one that ends there.

    Args:
        env: the environment, or a mixture, that they are of; others are passed over.
        path: an episode file or a run's folder.
        n: how many, at most.
        successful: whether to take only those that succeed, when they were stored and again.
        but: the keys of tasks to leave out.
        renderer: of the model that is to learn from them.
        warn: is told of those that ended in an error as they were played again.

    Raises:
        ConfigError: if there are none.
        StoreError: if the file can't be read.
    """
    specs = {member.spec.id: member.spec for member in members_of(env, {})}
    fitting = (
        episode
        for episode in read_episodes(path)
        if episode.env in specs and episode.turns and (episode.success or not successful)
        if task_key(episode.task) not in but and not episode.cut_in_reply
        if not any(call.error for reply in replies(episode) for call in reply.tool_calls)
    )
    jobs = [_played_again(specs[episode.env], episode, renderer) for episode in islice(fitting, n)]
    played = asyncio.run(run_jobs(jobs, demonstrator(renderer)))
    found = [episode for episode in played if episode.error is None and (episode.success or not successful)]
    broken = [episode.error for episode in played if episode.error is not None]
    why = f"{len(broken)} of {len(played)} ended in an error, such as {_said(broken[0])}; " if broken else ""
    if not found:
        which = "succeeded, stored and played again, " if successful else "could be played again "
        raise ConfigError(
            f"warm_start.episodes={path}: no episode of {env.id} {which}in a task that the run does not evaluate on; "
            f"{why}`agent-rl play` stores some, warm_start.successful=false takes failures, too"
        )
    if why:
        warn(f"warm_start.episodes={path}: played again, {why}they are left out")
    return found


def _played_again(env: EnvSpec, episode: Episode, renderer: Renderer | None) -> Job:
    def replied(env: Env, seed: int) -> Script:
        yield from (reply for reply in replies(episode))  # a generator: observations are sent to it

    return Job(
        env,
        episode.task,
        episode.seed,
        episode.group_id,
        replace(env.budget, turns=episode.turns),
        episode.env_args,
        origin=Origin("demonstration", episode.origin.split),
        policy=Scripted(replied, renderer),
    )


@dataclass(frozen=True, slots=True)
class WarmStep:
    """Progress of the warm start."""

    phase: str
    step: int
    of: int
    loss: float


_Rows = list[tuple[list[int], list[float]]]


def warm_start(
    model: PreTrainedModel,
    demonstrations: Sequence[Trajectory],
    config: WarmStartConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    token_budget: int = 2**31,
    precision: PrecisionConfig = PrecisionConfig(),  # noqa: B008 - frozen
    on_step: Callable[[WarmStep], None] = lambda _: None,
    checkpoint: WarmCheckpoint | None = None,
) -> None:
    """Train a model in place on trajectories of scripted episodes, in micro-batches of `token_budget` padded tokens.

    What a fork repeats of its parent is learned there only. The special tokens, space and newline of the tokenizer
    separate the strings to copy. The seed is of the order of demonstrations and of these strings. `on_step` is called
    after every step. Steps that `checkpoint` remembers are not taken again: their batches are drawn and passed over, so
    that those behind them are what they would have been.

    Raises:
        ConfigError: if there are no demonstrations.
        CheckpointError: if what `checkpoint` remembers is damaged, or of other demonstrations.
        Interrupted: if the run of `checkpoint` was asked to stop.
    """
    if not demonstrations:
        raise ConfigError("there are no demonstrations to clone")
    _log.info("warm start on %d demonstrations", len(demonstrations))
    random = rng(Stream.WARM_START, seed)
    blanks = [i for text in (" ", "\n") for i in tokenizer.encode(text, add_special_tokens=False)]
    separators = sorted({*tokenizer.get_added_vocab().values(), *blanks})
    alphabet = sorted({i for trajectory in demonstrations for i in trajectory.token_ids.tolist()} - set(separators))
    optimizer = Optimizer(model, config.optimizer, scale_loss=precision.autocast == "float16")
    model.eval()  # without dropout, as in training, so that steps are the same again

    if checkpoint is not None:
        checkpoint.restore(model, optimizer, [len(demonstrations), sum(map(len, demonstrations))])
    taken = iter(checkpoint.losses.copy() if checkpoint else ())

    def learn(phase: str, step: int, of: int, batch: _Rows, scale: float) -> float:
        """Take a step, unless it was taken before an interruption; return its loss."""
        if (before := next(taken, None)) is not None:
            return before
        loss = _backward(model, optimizer, batch, config, token_budget, precision)
        optimizer.step(scale)
        on_step(WarmStep(phase, step, of, loss))
        if checkpoint is not None:
            checkpoint.after_step(model, optimizer, loss)
        return loss

    recent: deque[float] = deque(maxlen=5)
    for step in range(config.copy_steps):
        scale = schedule(config.optimizer, step, total=2**31)  # no fall: how long this lasts, the gate decides
        copied = _copies(config.batch, alphabet, separators, random)
        recent.append(learn("copying", step, config.copy_steps, copied, scale))
        if len(recent) == recent.maxlen and float(np.mean(recent)) < config.copy_gate:
            break
    copies = min(round(config.batch * config.copy_share), config.batch - 1)
    order = _epochs(demonstrations, config.batch - copies, random)
    for step in range(config.clone_steps):
        env_weight = config.env_weight * (1 - step / config.clone_steps)
        cloned = [_row(trajectory, env_weight) for trajectory in next(order)]
        batch = cloned + _copies(copies, alphabet, separators, random)
        scale = schedule(config.optimizer, step + config.optimizer.warmup_steps, config.clone_steps)
        learn("cloning", step, config.clone_steps, batch, scale)


def _backward(
    model: PreTrainedModel,
    optimizer: Optimizer,
    batch: _Rows,
    config: WarmStartConfig,
    token_budget: int,
    precision: PrecisionConfig,
) -> float:
    """Add up the gradients of a batch, a micro-batch at a time; return its loss."""
    total, whole = 0.0, sum(sum(weights[1:]) for _, weights in batch)
    tokens = sum(len(ids) for ids, _ in batch)
    for part in _parts(batch, token_budget):
        ids, weights = (x.to(model.device) for x in _padded(part))
        wanted = None if config.env_weight else weights > 0  # all need logits where the environment's are learned, too
        with routed(model) as routes:
            logprobs = score_tokens(model, ids, wanted=wanted, precision=precision).logprobs
        loss = -(logprobs * weights).sum() / whole
        if config.balance and routes.logits:
            lengths = torch.tensor([len(row_ids) for row_ids, _ in part], device=ids.device)
            real = torch.arange(ids.shape[1] - 1, device=ids.device) < lengths[:, None]
            share = int(lengths.sum()) / tokens
            loss = loss + config.balance * share * balance_loss(routes, real, model.config.num_experts_per_tok)
        optimizer.backward(loss)
        total += float(loss.detach())
    return total


def _row(trajectory: Trajectory, env_weight: float) -> tuple[list[int], list[float]]:
    """Return a trajectory's ids and the weight of each, that of what it repeats of another 0."""
    weights = np.where(trajectory.loss_mask, 1.0, env_weight)
    if trajectory.forked_from is not None:
        weights[: trajectory.forked_from.position] = 0
    return trajectory.token_ids.tolist(), weights.tolist()


def _parts(batch: _Rows, token_budget: int) -> Iterator[_Rows]:
    """Cut a batch in two by length, so that short rows are not padded to the long ones', and then to the budget."""
    batch = sorted(batch, key=lambda row: len(row[0]))
    cut = (len(batch) + 1) // 2
    for half in filter(None, (batch[:cut], batch[cut:])):
        count = max(1, token_budget // len(half[-1][0]))
        yield from (half[start : start + count] for start in range(0, len(half), count))


def _epochs(demonstrations: Sequence[Trajectory], batch: int, rng: np.random.Generator) -> Iterator[list[Trajectory]]:
    """Yield batches without end, in another order each epoch; what doesn't fill a batch is left out of the epoch.

    Their composition is random, not by length: Muon takes a step of full size whatever the gradient's size, and a
    batch of nothing but short guesses would spend it on noise.
    """
    while True:
        order = rng.permutation(len(demonstrations))
        for start in range(0, max(1, len(demonstrations) - batch + 1), batch):
            yield [demonstrations[i] for i in order[start : start + batch]]


def _copies(
    count: int, alphabet: Sequence[int], separators: Sequence[int], rng: np.random.Generator, length: int = 64
) -> _Rows:
    """Random strings, each followed by a repeat of itself or of its tail; only the repeats are learned."""
    rows: _Rows = []
    letters, marks = np.asarray(alphabet), np.asarray(separators)
    for _ in range(count):
        ids, weights = list[int](), list[float]()
        while len(ids) < length:
            string = rng.choice(letters, rng.integers(3, min(11, len(letters) + 1)), replace=False).tolist()
            filler = rng.choice(letters, rng.integers(0, 4)).tolist()
            mark = int(rng.choice(marks))
            start = int(rng.integers(0, max(1, len(string) - 3))) if rng.random() < 0.5 else 0
            repeat = string[start:]
            known = [float(start == 0), *[1.0] * (len(repeat) - 1)]  # where a tail begins can't be known
            ids += [mark, *string, *filler, mark, *repeat]
            weights += [0.0] * (len(string) + len(filler) + 2) + known
        rows.append((ids[:length], weights[:length]))
    return rows


def _padded(rows: _Rows) -> tuple[Tensor, Tensor]:
    ids = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    weights = pad_sequence([torch.tensor(weights) for _, weights in rows], batch_first=True)
    weights[:, 0] = 0
    return ids, weights
