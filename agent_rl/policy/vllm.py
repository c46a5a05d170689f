"""vllm_policy: a policy that vLLM samples, in this program or behind an address."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated

from pydantic import Field, JsonValue

from agent_rl.concurrency import LoopThread
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.stateless import EngineOutput, Settings, StatelessEngine
from agent_rl.engines.vllm.in_process import LocalEngine
from agent_rl.engines.vllm.server import Server
from agent_rl.errors import ConfigError
from agent_rl.policy.by_name import register_policy
from agent_rl.policy.delegation import Delegation
from agent_rl.policy.shortening import Shortening
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering import load_renderer
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.config import RendererConfig


@register_policy("vllm")
@contextmanager
def vllm_policy(
    model: str | None = None,
    *,
    url: str | None = None,
    tokenizer: str | None = None,
    renderer: RendererConfig | str | None = None,
    params: SamplingParams | None = None,
    context: Annotated[int, Field(ge=2)] | None = None,
    concurrency: Annotated[int, Field(ge=1)] = 64,
    engine: Mapping[str, JsonValue] | None = None,
    shorten: Shortening | None = None,
    delegate: Delegation | None = None,
) -> Iterator[TokenPolicy]:
    """Yield a policy over vLLM, to roll out without training; on leaving, the engine or the connections are closed.

    Args:
        model: a folder in Hugging Face's format, or a model's name there; it is loaded into this program.
        url: the address of a vLLM server, instead: http://host:8000.
        tokenizer: its folder or name, if it is not with the model; a server's model is looked for where the server
            says that it loaded it from.
        renderer: as in `load_renderer`.
        params: how to sample.
        context: the longest sequence, in tokens; None for what the model or the server allows.
        concurrency: requests under way at a server at most.
        engine: more of vLLM's engine arguments, with `model` only.
        shorten: what becomes of a context that has grown too long.
        delegate: how often parts of the task may be given to sub-agents.

    Raises:
        ConfigError: if what is asked for can't be, with the way out.
        PolicyError: if the server can't be reached, or gives no token ids.
    """
    params = params or SamplingParams()
    if (model is None) == (url is None):
        raise ConfigError("policy=vllm needs policy.model=DIR, to run vLLM here, or policy.url=http://host:port")
    if url is not None and engine:
        raise ConfigError(f"policy.engine.{next(iter(engine))} is for policy.model: a server was started with its own")
    known = tokenizer or model
    rendered = None if known is None else _renderer(known, renderer)  # a mistake here shows before a model is loaded
    client = LocalEngine(model, context, engine or {}) if model is not None else Server(url or "", concurrency, context)
    loop = LoopThread("vllm")

    async def generate(sequence: str, token_ids: list[int], settings: Settings) -> EngineOutput:
        return await loop.run(client.generate(sequence, token_ids, settings))

    try:
        loop.wait(client.open())
        try:
            sampler = StatelessEngine(generate, client.context_limit, processed=client.processed)
            sampler.require(params)
            rendered = rendered or _renderer(client.root, renderer)
            yield TokenPolicy(sampler, rendered, params, shorten=shorten, delegate=delegate)
        finally:
            loop.wait(client.close())
    finally:
        loop.close()


def _renderer(tokenizer: str, asked: RendererConfig | str | None) -> Renderer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"policy=vllm needs {error.name}, for the tokenizer: in the checkout, pip install -e '.[train]'"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer in '{tokenizer}': name its folder with policy.tokenizer ({error})") from error
    return load_renderer(loaded, asked)
