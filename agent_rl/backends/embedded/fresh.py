"""What a run begins with that has no model to start from: demonstrations, and a model that knows their words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from agent_rl.backends.embedded.actor import Actor, actor_of, new_tokenizer
from agent_rl.backends.embedded.check import evaluated_tasks
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.embedded.warm_start import demonstrate, stored_demonstrations
from agent_rl.core.episode import Episode
from agent_rl.engines.embedded.device import device_of
from agent_rl.gym.registry import EnvSpec
from agent_rl.rendering import load_renderer
from agent_rl.rendering.base import Renderer
from agent_rl.rendering.chat_format import require_text

TOKENIZER_EPISODES = 1000
"""How many demonstrations a fresh model's tokenizer is trained on."""
MEASURED = 100
"""How many of them its context is made for."""
SHORTEST_CONTEXT = 256
"""Tokens."""


def fresh_actor(env: EnvSpec, config: TrainConfig) -> Actor:
    """Make an untrained actor whose tokenizer knows the words of the environment's demonstrations.

    Where neither the settings nor a budget say it, its context has room for twice their length.
    """
    demonstrations = demonstrations_of(env, config, TOKENIZER_EPISODES)
    tokenizer = new_tokenizer(demonstrations, config.vocab_size)
    tokens = config.rollout.context or env.budget.tokens
    if tokens is None:
        prompt = load_renderer(tokenizer, config.renderer).prompt
        longest = max((len(prompt(e.messages, ())) for e in demonstrations[:MEASURED]), default=0)
        tokens = min(max(SHORTEST_CONTEXT, 2 * longest), config.model.max_positions)
    model = make_model(config.model, len(tokenizer), config.seed).to(device_of(config.device))
    return actor_of(replace(env, budget=replace(env.budget, tokens=tokens)), config, model, tokenizer)


def demonstrations_of(
    env: EnvSpec,
    config: TrainConfig,
    n: int,
    renderer: Renderer | None = None,
    warn: Callable[[str], object] = lambda _: None,
) -> list[Episode]:
    """Return what a run's warm start learns from: stored episodes, or the environment's own scripts, `n` at most.

    `warn` is told why some of the stored ones are left out.

    Raises:
        RenderError: if they show an image.
    """
    if (stored := config.warm_start.episodes) is not None:
        but, successful = evaluated_tasks(config, env), config.warm_start.successful
        found = stored_demonstrations(env, stored, n, successful=successful, but=but, renderer=renderer, warn=warn)
    else:
        found = demonstrate(env, n, split=config.split, seed=config.seed, env_args=config.env_args, renderer=renderer)
    for episode in found:
        require_text(episode.messages, env.id)
    return found
