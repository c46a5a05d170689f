"""EnvAgentLoop: verl's agent loop that runs an episode of any registered environment."""

from __future__ import annotations

import functools
import json
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from agent_rl.backends.verl.names import names_of, seed_of
from agent_rl.backends.verl.rows import rewards_of, rows_of
from agent_rl.backends.verl.sampler import ServerSampler
from agent_rl.backends.verl.settings import load_once
from agent_rl.policy.sampling import SamplingParams
from agent_rl.policy.token import TokenPolicy
from agent_rl.registry import spec
from agent_rl.rendering import load_renderer
from agent_rl.rollout.episode import Job, run_episode
from agent_rl.types import Episode

_renderer_of = functools.cache(load_renderer)
"""A tokenizer's renderer, made once a process: verl makes an agent loop for every episode."""


class EnvAgentLoop(AgentLoopBase):
    """Runs one episode per call; verl makes an instance for each.

    Whatever breaks in the environment is the episode's outcome: nothing is raised, so that one episode can't fail its
    group. Settings come from the file that `rollout.agent.agent_loop_config_path` names.
    """

    def __init__(
        self,
        *args: Any,
        env: str,
        env_args: dict[str, Any],
        imports: list[str],
        seed: int,
        max_tokens: int,
        tools: object = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        for file in imports:
            load_once(file)
        self._spec, self._env_args, self._seed, self._max_tokens = spec(env), dict(env_args), seed, max_tokens

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Run the row's task; return one output per trajectory."""
        task = json.loads(row["task"])
        params = SamplingParams(
            temperature=float(sampling_params["temperature"]),
            top_p=float(sampling_params["top_p"]),
            top_k=max(0, int(sampling_params["top_k"])),
            max_tokens=self._max_tokens,
        )
        sampler = ServerSampler(self.server_manager, int(self.rollout_config.max_model_len))
        group, id = names_of(row, greedy=params.temperature == 0)
        job = Job(self._spec, task, seed_of(row, task, self._seed), group, env_args=self._env_args, id=id)
        return outputs_of(await run_episode(job, TokenPolicy(sampler, _renderer_of(self.tokenizer), params)))


def outputs_of(episode: Episode) -> list[AgentLoopOutput]:
    """Return an episode as verl wants it, one output per row.

    The score that verl sees is for its reports; what is trained on comes from the episode itself, on the driver.
    """
    rows = rows_of(episode)
    return [
        AgentLoopOutput(
            prompt_ids=row.prompt_ids,
            response_ids=row.response_ids,
            response_mask=row.response_mask,
            response_logprobs=row.response_logprobs,
            routed_experts=row.routed_experts,
            reward_score=episode.reward or 0.0,
            num_turns=len(episode.messages),
            metrics=AgentLoopMetrics(generate_sequences=episode.seconds),
            extra_fields={
                **row.extra_fields,
                "min_global_steps": row.versions[0],
                "max_global_steps": row.versions[1],
                "reward_extra_info": rewards_of(episode),
            },
        )
        for row in rows
    ]
