"""Actor: the embedded model with its tokenizer, renderer and engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from agent_rl.algorithms import Algorithm
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.fine_tuning import freeze_parameters, new_adapter
from agent_rl.backends.embedded.rollout_config import InterruptionConfig
from agent_rl.core.episode import Episode
from agent_rl.core.messages import Message
from agent_rl.engines.base import SamplingParams, TrainedEngine, WeightFormat
from agent_rl.engines.embedded.model_folder import in_format, load_model, make_engine, save_model
from agent_rl.engines.embedded.parts import rows_of, usual_context
from agent_rl.engines.embedded.threads import use_threads
from agent_rl.engines.model_files import BASE, base_model, written
from agent_rl.errors import CheckpointError
from agent_rl.gym.registry import EnvSpec
from agent_rl.policy.delegation import Delegation
from agent_rl.policy.shortening import Shortening
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering import load_renderer, train_tokenizer
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.by_name import remember_renderer
from agent_rl.rendering.config import RendererConfig
from agent_rl.rendering.generation import text_ends
from agent_rl.rendering.hermes import write_call

OTHERS_MAX_TOKENS = 1024
"""Of one reply of a model whose `generation_config.json` does not say."""


@dataclass(frozen=True, slots=True)
class Actor:
    """A model that can be sampled from and trained; a checkpoint in Hugging Face's format when saved."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    renderer: Renderer
    engine: TrainedEngine

    def params(self, temperature: float, max_tokens: int | None = None) -> SamplingParams:
        """Return how to sample at a temperature; with the model's own limit of a reply if none is given."""
        own = self.model.generation_config.max_new_tokens or OTHERS_MAX_TOKENS
        return SamplingParams(temperature=temperature, max_tokens=max_tokens or own)

    def policy(
        self,
        params: SamplingParams,
        interrupt: InterruptionConfig | None = None,
        shorten: Shortening | None = None,
        delegate: Delegation | None = None,
    ) -> TokenPolicy:
        """Return a policy over the model; `params` and the rest as in `TokenPolicy`."""
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        cut = interrupt.with_ids(encode, self.decode) if interrupt else None
        return TokenPolicy(self.engine, self.renderer, params, cut, shorten, delegate)

    def save(self, folder: Path) -> None:
        """Write model and tokenizer, in the format that `transformers` loads."""
        save_model(self.model, self.tokenizer, folder)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, for people."""
        return str(self.tokenizer.decode(list(ids)))


def make_actor(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    slots: int = 64,
    context: int = 512,
    weights: WeightFormat = "float32",
    renderer: RendererConfig | None = None,
) -> Actor:
    """Make an actor of a model and its tokenizer; `save` leaves the renderer that is asked for with the tokenizer.

    Its engine samples `slots` sequences at a time, each of `context` tokens at most, with a copy of the weights that is
    rounded to `weights`.

    Raises:
        CheckpointError: if what the renderer writes has token ids that the model lacks.
    """
    engine = make_engine(model, tokenizer, slots=slots, context=context, weights=weights)
    if renderer is not None:
        remember_renderer(tokenizer, renderer)
    loaded = load_renderer(tokenizer, renderer)
    require_rows(tokenizer, loaded, rows_of(model))
    _remember_ends(model, tokenizer, loaded)
    return Actor(model, tokenizer, loaded, engine)


def _remember_ends(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, renderer: Renderer) -> None:
    """Name what ends a reply in the generation config, beside the model's own: a checkpoint ends replies as its run."""
    ends = renderer.stop_ids | text_ends(tokenizer.name_or_path)
    first = {tokenizer.eos_token_id} & ends  # which transformers takes for a missing padding token
    ordered = [*first, *sorted(ends - first)]
    model.generation_config.eos_token_id = ordered[0] if len(ordered) == 1 else ordered


def require_rows(tokenizer: PreTrainedTokenizerBase, renderer: Renderer, rows: int) -> None:
    """Refuse a tokenizer whose text or whose marks of a conversation are beyond a model's rows of embeddings.

    A token that was added to it and that nothing writes may be beyond: Gemma 3's for images is, in models of text.

    Raises:
        CheckpointError: with the numbers and the ways out.
    """
    largest = max(tokenizer.vocab_size - 1, *renderer.prompt([Message("user", "a")], ()))
    if largest >= rows:
        raise CheckpointError(
            f"the tokenizer of {tokenizer.name_or_path!r} writes token ids up to {largest}, and the model has "
            f"embeddings of {rows} tokens: take the tokenizer that belongs to it, or, if tokens were added on purpose, "
            "give the model room first: model.resize_token_embeddings(len(tokenizer)), and save both"
        )


def actor_of(env: EnvSpec, config: TrainConfig, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> Actor:
    """Make an actor of a run's model, and give torch the threads that suit it."""
    rollout, context = config.rollout, config.context(env.budget.tokens)
    use_threads(model, config.threads, config.processes)
    return make_actor(
        model, tokenizer, slots=rollout.slots, context=context, weights=rollout.weights, renderer=config.renderer
    )


def load_actor(
    folder: str | Path,
    *,
    slots: int = 64,
    context: int | None = None,
    weights: WeightFormat = "float32",
    device: str = "cpu",
    renderer: RendererConfig | None = None,
) -> Actor:
    """Load a checkpoint in Hugging Face's format, as `Actor.save`, or another tool, wrote it; see `make_actor`.

    Its context is the usual one if None is given.

    Raises:
        CheckpointError: if there is none in the folder, or its tokenizer is not the model's.
        ConfigError: if this machine has no such device.
    """
    model, tokenizer = load_model(folder, device)
    context = context or usual_context(model)
    return make_actor(model, tokenizer, slots=slots, context=context, weights=weights, renderer=renderer)


@contextmanager
def sampled_as_set(actor: Actor, config: TrainConfig) -> Iterator[Actor]:
    """Yield the actor with the engine of the settings; vLLM's process ends with the context.

    Raises:
        ConfigError: if vLLM is not installed, or can't run the model.
    """
    if config.engine == "torch":
        yield actor
        return
    from agent_rl.engines.vllm.synced import SyncedEngine

    own = actor.engine
    engine = SyncedEngine(
        actor.model, actor.tokenizer, slots=own.slots, context=own.context_limit, arguments=config.engine_args
    )
    with closing(engine):
        yield replace(actor, engine=engine)


def fine_tune(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, config: TrainConfig, folder: Path) -> None:
    """Make a whole model what a run trains: in its format, with a fresh adapter, with parts that keep their values.

    An adapter is worth nothing without the model that it was trained on. Where nobody else has that, because it was
    made here, or `start_from` is an adapter itself or a file of another format, the run's folder gets it.

    Raises:
        ConfigError: if the model has not so many layers or no such modules, or `peft` is missing.
    """
    if config.lora is not None:
        start = config.start_from
        if start is None or Path(start).is_file() or base_model(start) is not None:
            base = (folder / BASE).resolve()
            with written(base):
                save_model(model, tokenizer, base)
            start = str(base)
        model.name_or_path = start
    in_format(model, config.dtype)
    if config.lora is not None:
        new_adapter(model, config.lora, config.freeze, config.seed)
    freeze_parameters(model, config.freeze)


def load_reference(folder: Path, config: TrainConfig, actor: Actor) -> PreTrainedModel | None:
    """Return the policy that the run's algorithm compares with, if it does.

    With adapters that is the model itself: `Trainer` switches them off, and they began without effect.
    """
    if not Algorithm(config.algorithm).needs_reference:
        return None
    return actor.model if config.lora else load_model(folder, config.device, dtype=config.dtype)[0]


def new_tokenizer(episodes: Iterable[Episode], vocab_size: int) -> PreTrainedTokenizerBase:
    """Train a tokenizer on what was said in episodes."""
    messages = [message for episode in episodes for message in episode.messages]
    return train_tokenizer([text for m in messages for text in (m.content, *map(write_call, m.tool_calls))], vocab_size)
