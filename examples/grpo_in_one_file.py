"""GRPO in one file: a model of 0.1 M parameters learns the right door for each key in half a minute, on one thread.

    python examples/grpo_in_one_file.py

It is made of the parts that `agent_rl` exports and torch, without the trainer: an environment, a policy that appends
token ids, episodes, advantages, a loss under the mask of sampled tokens, an optimizer's step. The model is first cloned
from demonstrations that try doors at random; they open it in two tries 44 times in 100. Rewards alone say which key
opens which door: success climbs to nearly 100 %.

`agent-rl train` does the same with every algorithm, checkpoints, evaluation and a report.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import agent_rl as ar
from agent_rl.engines.embedded import Engine

KEYS = {"red": "north", "green": "south", "blue": "east", "black": "west"}
"""Which door each key opens. The policy never sees this table."""
DOORS = tuple(KEYS.values())


# --- 1. An environment: two tries to open a door ---


@ar.register("doors-v0", tasks={"train": [{"key": key} for key in KEYS]}, budget=ar.Budget(turns=2))
class Doors(ar.Env):
    """A key, and four doors of which it opens one."""

    def reset(self, task: ar.Task, rng: np.random.Generator) -> str:
        """Hand over a key."""
        self.fitting = KEYS[str(task["key"])]
        self.opened = False
        return f"key {task['key']}"

    def step(self, action: ar.Message) -> ar.Step:
        """Try the key on the door that the policy names."""
        self.opened = action.content == self.fitting
        return ar.Step("open" if self.opened else "locked", terminated=self.opened)

    @ar.reward
    def entered(self, episode: ar.Episode) -> bool:
        """Whether the door was opened."""
        return self.opened

    def demonstrate(self, rng: np.random.Generator) -> ar.Script:
        """Try doors at random."""
        while True:
            yield str(rng.choice(DOORS))


# --- 2. Episodes as tensors ---


def rows_of(episodes: Sequence[ar.Episode]) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, the mask of sampled tokens and the log-probabilities they were sampled with, `[B, T]` each."""
    trajectories = [episode.trajectories[0] for episode in episodes]  # one each: nothing here rewrites the past
    width = max(len(trajectory) for trajectory in trajectories)
    ids = torch.zeros(len(trajectories), width, dtype=torch.long)
    mask, sampled_with = torch.zeros(len(trajectories), width), torch.zeros(len(trajectories), width)
    for row, trajectory in enumerate(trajectories):
        ids[row, : len(trajectory)] = torch.from_numpy(trajectory.token_ids)
        sampled_with[row, : len(trajectory)] = torch.from_numpy(np.nan_to_num(trajectory.logprobs))
        for span in trajectory.spans:  # who wrote each token: the prompt, the policy, the environment or the template
            if span.source is ar.Source.POLICY:
                mask[row, span.start : span.stop] = 1.0
    return ids, mask, sampled_with


def logprobs_of(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Return the log-probability of each token given those before it, `[B, T]`; 0 for the first."""
    logits = model(ids[:, :-1]).logits
    picked = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return pad(picked, (1, 0))


# --- 3. GRPO ---


def advantages_of(episodes: Sequence[ar.Episode]) -> Tensor:
    """Return each episode's reward less the mean of its group, over the group's standard deviation, `[B]`."""
    groups: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group_id].append(reward_of(episode))
    found = []
    for episode in episodes:
        rewards = np.array(groups[episode.group_id])
        found.append((reward_of(episode) - rewards.mean()) / (rewards.std() + 1e-6))
    return torch.tensor(found, dtype=torch.float32)


def reward_of(episode: ar.Episode) -> float:
    """Return the total reward; an episode that broke has none, and no place in this small example."""
    if episode.reward is None:
        raise RuntimeError(f"episode {episode.id} is not scored: {episode.error}")
    return episode.reward


def grpo_loss(model: PreTrainedModel, episodes: Sequence[ar.Episode], clip: float = 0.2) -> Tensor:
    """Return PPO's clipped loss with group-relative advantages, the mean over all sampled tokens."""
    ids, mask, sampled_with = rows_of(episodes)
    advantages = advantages_of(episodes)[:, None]
    ratio = (logprobs_of(model, ids) - sampled_with).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * mask).sum() / mask.sum()


# --- 4. The loop ---


def main(steps: int = 40, samples: int = 32, updates: int = 4, seed: int = 0) -> list[float]:
    """Train from nothing; return the success of each step's episodes.

    Args:
        steps: batches of episodes to learn from.
        samples: episodes of each key, a group.
        updates: gradient steps per batch; the clipped ratio bounds what they do together.
        seed: of everything that is random.
    """
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    tokenizer = ar.train_tokenizer([*KEYS, *DOORS, "key", "open", "locked"])
    renderer = ar.load_renderer(tokenizer)
    model = tiny_model(len(tokenizer))
    clone(model, ar.run("doors-v0", ar.demonstrator(renderer), n=len(KEYS), samples=40, seed=seed))

    engine = Engine(model, slots=64, max_len=256)
    policy = ar.TokenPolicy(engine, renderer, ar.SamplingParams(temperature=1.0, max_tokens=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    curve = []
    for step in range(steps):
        episodes = ar.run("doors-v0", policy, n=len(KEYS), samples=samples, seed=seed + step)
        for _ in range(updates):
            loss = grpo_loss(model, episodes)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        engine.update_weights(step + 1)  # the next step's tokens carry this version
        curve.append(float(np.mean([episode.success for episode in episodes])))
        print(f"step {step + 1:2d}  success {curve[-1]:6.1%}")
    return curve


def tiny_model(vocabulary: int) -> PreTrainedModel:
    """Make an untrained Qwen3 of two layers."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, tie_word_embeddings=True, **shape, **heads))


def clone(model: PreTrainedModel, demonstrations: Sequence[ar.Episode], steps: int = 60) -> None:
    """Teach a fresh model to name doors: maximise the likelihood of what the demonstrations wrote."""
    ids, mask, _ = rows_of(demonstrations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(steps):
        rows = torch.randint(len(ids), (16,))
        loss = -(logprobs_of(model, ids[rows]) * mask[rows]).sum() / mask[rows].sum()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print("cloned demonstrations that try doors at random")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    main(steps=chosen.steps, seed=chosen.seed)
