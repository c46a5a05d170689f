"""Engine: continuous batching of many token sequences over a paged cache, in this process.

Every sequence keeps its pages, and with them its keys and values, over all its turns: a turn prefills only the tokens
that are new. Each step feeds one token of every decoding sequence and up to `PREFILL` tokens of the others together.

Sequences that open with the same ids share the pages that hold them, whoever opened them and why: their keys and values
are computed once (`pages.Pages.share`). Sequences that come in one step with one prompt even share its logits. Pages of
older weights are not shared with new sequences.

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
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_rl.core.trajectory import Completion, FinishReason, expert_dtype
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.forward import Forward
from agent_rl.engines.embedded.kv_cache import KVCache
from agent_rl.engines.embedded.layout import Feed
from agent_rl.engines.embedded.module_forward import make_forward
from agent_rl.engines.embedded.pages import PAGE, Table
from agent_rl.engines.embedded.parts import positions_of, rows_of
from agent_rl.engines.embedded.token_sampler import sample
from agent_rl.errors import ConfigError, PolicyError
from agent_rl.moe.routes import experts_of
from agent_rl.seeds import Stream, rng

_log = logging.getLogger(__name__)

PREFILL = 2048
"""Tokens of prefilling sequences in a step: bounds its memory, whatever the contexts' lengths. A multiple of `PAGE`, so
that what a step leaves of a long prompt begins with a page, where pages can be shared."""
KEPT = 2**24
"""Bytes of keys and values that an idle engine keeps for the next sequence; more is given back, and an update has it:
taking it again costs a step nothing that could be measured."""
YIELDS = 4
"""Turns of the event loop between two steps, so that an episode whose reply is done can come back with its next one."""


class Sequence:
    """One growing sequence of token ids; opened by `Engine.open`."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._rng = rng(Stream.TOKENS, seed)
        self.uniform = float(self._rng.random())
        """The number that decides the next token."""
        self.table: Table | None = None
        """Its pages; None while it waits for a slot."""
        self.fed: list[int] = []
        """The ids whose keys and values are in the pages."""
        self.feed: list[int] = []
        """The ids to put in with the next steps."""
        self.params = SamplingParams()
        self.stop_ids: frozenset[int] = frozenset()
        self.future: asyncio.Future[Completion] | None = None
        self._routed = 0
        """Of how many positions the experts were collected."""
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
            PolicyError: if the sequence is busy, over or empty, an id is out of range, `ids` don't fit the context,
                another thread samples, or the engine's step failed. After a failed or cancelled call the sequence is
                over: what it had sampled by then never reached the caller, whose token list would differ from the
                engine's.
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
        engine.require_loop()
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
        """Feed everything again with the next steps."""
        self._collect()
        self.feed, self.fed = [*self.fed, *self.feed], []

    def advance(self, count: int) -> list[int]:
        """Count the next ids as fed; return them."""
        ids, self.feed = self.feed[:count], self.feed[count:]
        self.fed += ids
        return ids

    def accept(self, token: int, logprob: float, version: int) -> None:
        """Take the id that was sampled when all was fed; finish if the reply is complete."""
        self.feed = [token]
        self.uniform = float(self._rng.random())
        self._ids.append(token)
        self._logprobs.append(logprob)
        self._versions.append(version)
        if token in self.stop_ids:
            self.finish(FinishReason.STOP)
        elif len(self._ids) >= self.params.max_tokens or len(self.fed) + 1 >= self._engine.context_limit:
            self.finish(FinishReason.LENGTH)

    def _collect(self) -> None:
        """Take the experts of positions that were fed for the first time."""
        routes = self._engine.cache.routes
        if routes is not None and self.table is not None and len(self.fed) > self._routed:
            pages = torch.tensor([page.number for page in self.table.pages], device=routes.device)
            self._experts.append(routes[pages].flatten(0, 1)[self._routed : len(self.fed)])
            self._routed = len(self.fed)

    def finish(self, reason: FinishReason, error: Exception | None = None) -> None:
        """Resolve the pending call and leave the engine's queue."""
        if error is None:
            self._collect()
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
        if slots < 1 or max_len < 2:
            raise ConfigError(f"an engine needs slots >= 1 and max_len >= 2, not {slots} and {max_len}")
        if max_len > ((positions := positions_of(model)) or max_len):
            raise ConfigError(
                f"max_len={max_len} exceeds the model's {positions} positions; set rollout.context={positions}, or "
                f"policy.context={positions} of a policy, or less"
            )
        self.cache = KVCache(max_len, dtype=model.dtype, device=model.device)
        self.forward = forward(model, self.cache)
        self.vocab_size = rows_of(model)
        self.experts = experts_of(model)
        self.context_limit = max_len
        self.version = 0
        self._released = False
        self.steps = self.tokens = 0
        self.slots = slots
        self._seats = slots
        self._active: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._open: set[Sequence] = set()
        self._driver: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

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
        self._released = False
        self.cache.pages.forget()
        self.version = version
        _log.debug("weights of version %d are in use, with %d sequences open", version, len(self._open))
        if recompute:
            for sequence in self._open:
                sequence.rewind()
                if sequence.table is not None:
                    self.cache.pages.release(sequence.table)

    def release_weights(self) -> None:
        """Give back the memory of the copy of the weights, which an update has better use for."""
        self.forward.release()
        self._released = True

    def require_loop(self) -> None:
        """Serve the running event loop from now on.

        Raises:
            PolicyError: if the one that was served still runs, in another thread.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and self._loop.is_running():
                raise PolicyError(
                    "this model is sampled in another thread at the moment: wait until that ends, or load the model "
                    "once for each thread"
                )
            self._loop = loop

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence that wants to sample, and start the engine's task if it has ended."""
        if sequence.table is None and self._seats and not self._waiting:
            self._seats -= 1
            sequence.table = Table()
        (self._waiting if sequence.table is None else self._active).append(sequence)
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
        """Free a closed sequence's slot and pages."""
        self._open.discard(sequence)
        table, sequence.table = sequence.table, None
        if table is None:
            return
        self.cache.pages.release(table)
        if self._waiting:
            heir = self._waiting.popleft()
            heir.table = Table()
            self._active.append(heir)
            if heir.future is not None:  # always: it waits
                self._ensure_driver(heir.future.get_loop())
        else:
            self._seats += 1
        if not self._open and self.cache.nbytes > KEPT:
            self.cache.clear()

    async def _drive(self) -> None:
        while self._active:
            try:
                self.step()
            except Exception as error:
                for sequence in [*self._active, *self._waiting]:
                    sequence.fail(error)
                self.cache.pages.forget()
                return
            for _ in range(YIELDS):
                await asyncio.sleep(0)

    @torch.inference_mode()
    def step(self) -> None:
        """Feed every active sequence as far as a step goes, and sample one token for each that is fed wholly."""
        if self._released:
            raise PolicyError("the engine gave its weights back for an update: call update_weights before it samples")
        turns = self._plan()
        fed = sorted((t for t in turns if t.ids), key=_order)
        rows = {id(t): row for row, t in enumerate(fed)}
        done = [t for t in turns if not t.sequence.feed]
        layout = self.cache.layout([Feed(t.table, t.ids) for t in fed], [rows[id(t.like or t)] for t in done])
        output = self.forward(layout)
        self.cache.pages.settle()
        if output.experts is not None:
            self.cache.store_routes(layout, output.experts)
        self.steps += 1
        if not done:
            return
        sequences = [t.sequence for t in done]
        ids, logprobs = sample(output.logits, [s.params for s in sequences], [s.uniform for s in sequences])
        self.tokens += len(done)
        for sequence, token, logprob in zip(sequences, ids.tolist(), logprobs.tolist(), strict=True):
            sequence.accept(token, logprob, self.version)

    def _plan(self) -> list[_Turn]:
        """Give each active sequence its part of the step, in their order; what exceeds it waits."""
        pages, budget = self.cache.pages, PREFILL
        turns: list[_Turn] = []
        ends: dict[int, _Turn] = {}
        for sequence in self._active:
            table = _table(sequence)
            if len(sequence.feed) > 1:
                sequence.advance(pages.share(table, sequence.feed, ends))
            if not sequence.feed:  # another one's ids of this very step end with the same
                turns.append(_Turn(sequence, table, [], ends[table.pages[-1].number]))
                continue
            count = min(len(sequence.feed), budget)
            if count < len(sequence.feed):
                count -= (table.length + count) % PAGE
                if count <= 0:
                    continue
            ids = sequence.advance(count)
            budget -= count if count > 1 else 0
            pages.write(table, ids)
            turns.append(_Turn(sequence, table, ids))
            ends[table.pages[-1].number] = turns[-1]
        return turns


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """What a sequence does in a step."""

    sequence: Sequence
    table: Table
    ids: list[int]
    """To feed."""
    like: _Turn | None = None
    """Who feeds the same ids, if it feeds none itself."""


def _order(turn: _Turn) -> int:
    """Decoding sequences come first, then prefilling ones, with those of similar length side by side."""
    return turn.table.length if len(turn.ids) > 1 else 0


def _table(sequence: Sequence) -> Table:
    if sequence.table is None:
        raise PolicyError("a sequence without a slot was scheduled")
    return sequence.table
