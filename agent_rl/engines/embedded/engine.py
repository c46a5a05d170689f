"""Engine: continuous batching of many token sequences over a slot cache, in this process.

Every sequence keeps its slot, and with it its keys and values, over all its turns: a turn prefills only the tokens that
are new. Each step feeds every waiting sequence at once, decoding and prefilling ones together.

Randomness: a sequence draws its n-th token with the n-th number of its own generator, seeded at `open`. Who shares the
batch can't change the draw; it can change the last bits of the logits (kernels differ with the shape of the batch, by
about 1e-6), so a sampled id can differ only where the draw falls within that rounding of a boundary between two ids.
The same sequences opened in the same order give the same ids, bit for bit.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.core.trajectory import Completion, FinishReason, expert_dtype
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.forward import Forward, StepOutput
from agent_rl.engines.embedded.kv_cache import Feed, KVCache
from agent_rl.engines.embedded.module_forward import make_forward
from agent_rl.engines.embedded.parts import positions_of, rows_of
from agent_rl.engines.embedded.token_sampler import sample
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.moe.routes import experts_of
from agent_rl.seeds import Stream, rng

_log = logging.getLogger(__name__)

YIELDS = 4
"""Turns of the event loop between two steps, so that an episode whose reply is done can come back with its next one."""


class Sequence:
    """One growing sequence of token ids; opened by `Engine.open`."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._rng = rng(Stream.TOKENS, seed)
        self.uniform = float(self._rng.random())
        """The number that decides the next token."""
        self.slot: int | None = None
        self.fed: list[int] = []
        """The ids whose keys and values are in the slot."""
        self.feed: list[int] = []
        """The ids to put in with the next step."""
        self.params = SamplingParams()
        self.stop_ids: frozenset[int] = frozenset()
        self.future: asyncio.Future[Completion] | None = None
        self._refed = 0
        """How many of the fed positions were reported before and are fed again."""
        self._over: str | None = None
        """Why nothing more can be sampled."""
        self._clear()

    def _clear(self) -> None:
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        self._experts: list[Tensor] = []

    async def sample(self, ids: Seq[int], params: SamplingParams, stop_ids: frozenset[int]) -> Completion:
        """Append `ids` and sample. An empty `ids` continues an aborted sample.

        Raises:
            PolicyError: if the sequence is busy, over or empty, an id is out of range, `ids` don't fit the context, or
                the engine's step failed. After a failed or cancelled call the sequence is over: what it had sampled by
                then never reached the caller, whose token list would differ from the engine's.
        """
        if self._over is not None:
            raise PolicyError(f"this sequence is over: {self._over}; open a new one")
        if self.future is not None:
            raise PolicyError("this sequence is already sampling; await that call or abort it first")
        engine, feed = self._engine, [*self.feed, *ids]
        if not feed:
            raise PolicyError("nothing to sample from: the first call needs at least one token id")
        if min(feed) < 0 or max(feed) >= engine.vocab_size:
            bad = next(i for i in feed if not 0 <= i < engine.vocab_size)
            raise PolicyError(f"token id {bad} is outside the model's vocabulary of {engine.vocab_size}")
        if len(self.fed) + len(feed) >= engine.context_limit:
            raise PolicyError(
                f"{len(self.fed) + len(feed)} tokens leave no room in the engine's context of {engine.context_limit}; "
                "raise max_len or lower the environment's token budget"
            )
        self.feed, self.params, self.stop_ids = feed, params, stop_ids
        self.future = asyncio.get_running_loop().create_future()
        engine.submit(self)
        try:
            return await self.future
        except asyncio.CancelledError:
            self.abort()
            self._over = "a call was cancelled"
            raise

    def abort(self) -> None:
        """End a sample under way with `FinishReason.ABORT`; what it sampled so far is returned, and kept."""
        if self.future is not None:
            self.finish(FinishReason.ABORT)

    def close(self) -> None:
        """Abort, and give the slot to the next sequence that waits."""
        self.abort()
        self._over = "it was closed"
        self._engine.release(self)

    def fail(self, error: Exception) -> None:
        """Hand a step's error to the caller."""
        self._over = f"the engine's step failed: {type(error).__name__}: {error}"
        failure = PolicyError(self._over)
        failure.__cause__ = error
        self.finish(FinishReason.ABORT, failure)

    def rewind(self) -> None:
        """Feed everything again with the next step."""
        self._refed += len(self.fed)
        self.feed, self.fed = [*self.fed, *self.feed], []

    def accept(self, token: int, logprob: float, version: int, experts: Tensor | None) -> None:
        """Take a step's result; finish if the reply is complete."""
        self.fed += self.feed
        self.feed = [token]
        self.uniform = float(self._rng.random())
        self._ids.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        if experts is not None:
            self._experts.append(experts[self._refed :])
        self._refed = 0
        if token in self.stop_ids:
            self.finish(FinishReason.STOP)
        elif len(self._ids) >= self.params.max_tokens or len(self.fed) + 1 >= self._engine.context_limit:
            self.finish(FinishReason.LENGTH)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Resolve the pending call and leave the engine's queue."""
        future, self.future = self.future, None
        self._engine.withdraw(self)
        dtype = expert_dtype(self._engine.experts)
        completion = Completion(
            token_ids=tuple(self._ids),
            logprobs=tuple(self._logprobs),
            finish_reason=reason,
            policy_versions=tuple(self._versions),
            routed_experts=torch.cat(self._experts).cpu().numpy().astype(dtype) if self._experts else None,
        )
        self._clear()
        if future is None or future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(completion)


class Engine:
    """Samples from a Hugging Face causal LM for many sequences at once; implements `InferenceEngine`.

    `steps` and `tokens` count what was done; `version` is the version of the weights in use.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 64,
        max_len: int = 512,
        forward: Callable[[PreTrainedModel, KVCache], Forward] = make_forward,
    ) -> None:
        config = model.config.get_text_config()
        if slots < 1 or max_len < 2:
            raise ConfigError(f"an engine needs slots >= 1 and max_len >= 2, not {slots} and {max_len}")
        if max_len > ((positions := positions_of(model)) or max_len):
            raise ConfigError(f"max_len={max_len} exceeds the model's {positions} positions")
        heads = getattr(config, "num_attention_heads", None) or 1
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        cache_shape = (config.num_hidden_layers, slots, kv_heads, max_len, head_dim)
        self.cache = KVCache(*cache_shape, dtype=model.dtype, device=model.device)
        self.forward = forward(model, self.cache)
        self.vocab_size = rows_of(model)
        self.experts = experts_of(model)
        self.context_limit = max_len
        self.version = 0
        self.steps = self.tokens = 0
        self.slots = slots
        self._free = list(range(slots))[::-1]
        self._active: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._open: set[Sequence] = set()
        self._driver: asyncio.Task[None] | None = None

    def open(self, seed: int) -> Sequence:
        """Begin a sequence; it takes a slot with its first sample, and waits for one if all are taken."""
        sequence = Sequence(self, seed)
        self._open.add(sequence)
        return sequence

    def update_weights(self, version: int, *, recompute: bool = False) -> None:
        """Use the model's present weights from the next step on, also for sequences in mid-reply.

        Tokens sampled from now on are marked with `version`. With `recompute` the open sequences are fed again, so that
        no key or value of older weights is left.
        """
        self.forward.refresh()
        self.version = version
        _log.debug("weights of version %d are in use, with %d sequences open", version, len(self._open))
        if recompute:
            for sequence in self._open:
                sequence.rewind()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence that wants to sample, and start the engine's task if it has ended."""
        if sequence.slot is None and self._free and not self._waiting:
            sequence.slot = self._free.pop()
        (self._waiting if sequence.slot is None else self._active).append(sequence)
        self._ensure_driver(asyncio.get_running_loop())

    def _ensure_driver(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._driver is None or self._driver.done():
            self._driver = loop.create_task(self._drive())

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out of the queues; it keeps its slot."""
        for queue in (self._active, self._waiting):
            if sequence in queue:
                queue.remove(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free a closed sequence's slot."""
        self._open.discard(sequence)
        slot, sequence.slot = sequence.slot, None
        if slot is None:
            return
        self.cache.release(slot)
        if self._waiting:
            heir = self._waiting.popleft()
            heir.slot = slot
            self._active.append(heir)
            if heir.future is not None:  # always: it waits
                self._ensure_driver(heir.future.get_loop())
        else:
            self._free.append(slot)
        if not self._open:  # start over in order, so that what follows does not depend on who ended first
            self._free = list(range(self.slots))[::-1]

    async def _drive(self) -> None:
        while self._active:
            try:
                self.step()
            except Exception as error:
                for sequence in [*self._active, *self._waiting]:
                    sequence.fail(error)
                return
            for _ in range(YIELDS):
                await asyncio.sleep(0)

    @torch.inference_mode()
    def step(self) -> None:
        """Feed every active sequence and sample one token for each."""
        batch = sorted(self._active, key=lambda s: len(s.feed) > 1)  # stable: decoding sequences first
        output = self.forward(self.cache.layout([Feed(_slot(s), len(s.fed), s.feed) for s in batch]))
        ids, logprobs = sample(output.logits, [s.params for s in batch], [s.uniform for s in batch])
        self.steps += 1
        self.tokens += len(batch)
        rows = zip(batch, ids.tolist(), logprobs.tolist(), _routes(output, batch), strict=True)
        for sequence, token, logprob, experts in rows:
            sequence.accept(token, logprob, self.version, experts)


def _slot(sequence: Sequence) -> int:
    if sequence.slot is None:
        raise PolicyError("a sequence without a slot was scheduled")
    return sequence.slot


def _routes(output: StepOutput, batch: Seq[Sequence]) -> Seq[Tensor | None]:
    if output.experts is None:
        return [None] * len(batch)
    return torch.split(output.experts, [len(s.feed) for s in batch])
