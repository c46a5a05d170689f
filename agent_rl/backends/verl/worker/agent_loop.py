"""EnvAgentLoop: verl's agent loop that runs an episode of any registered environment."""

from __future__ import annotations

import functools
import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedTokenizerBase
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from agent_rl.backends.verl.worker.routes import FSDP_STRATEGIES, ROLLOUT, RouteShape
from agent_rl.backends.verl.worker.rows import load_continuation, rewards_of, rows_of
from agent_rl.core.ending import Ending
from agent_rl.core.episode import Episode
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.resuming import ResumingEngine
from agent_rl.engines.stateless import EngineOutput, Generate, Settings, StatelessEngine
from agent_rl.gym.budget import Budget, BudgetConfig
from agent_rl.gym.mixture import assign, environment_of
from agent_rl.judge.base import Judge
from agent_rl.judge.config import JudgeConfig
from agent_rl.judge.reward import use_judge
from agent_rl.judge.run import judge_of_worker
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering import Renderer, load_renderer
from agent_rl.rendering.config import RendererConfig
from agent_rl.rollout.episode import run_episode
from agent_rl.rollout.job import Job
from agent_rl.rollout.naming import names_of, origin_of, seed_of
from agent_rl.rollout.watch import watch_log

LONGEST_S = 3600.0
"""How long an environment, and a reply, may take where neither the environment nor the run says it."""


@functools.cache
def _renderer_of(tokenizer: PreTrainedTokenizerBase, settings: str) -> Renderer:
    """Return the run's renderer, made once a process: verl makes an agent loop for every episode."""
    return load_renderer(tokenizer, RendererConfig.model_validate_json(settings))


@functools.cache
def _judge_of(settings: str, folder: str, workers: int) -> Judge | None:
    """Return the run's judge, made once a process: it keeps to limits, and has a file of calls."""
    log = Path(folder) / f"judge_calls-{socket.gethostname()}-{os.getpid()}.jsonl"
    return judge_of_worker(JudgeConfig.model_validate_json(settings), log, workers)


class Client(Protocol):
    """What is used of `verl.workers.rollout.llm_server.LLMServerClient`."""

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        """Return a `TokenOutput`."""
        ...


class VerlEngine(StatelessEngine):
    """Implements `InferenceEngine`. A sequence's requests go to the same server, which has its prefix in the cache.

    Args:
        client: verl's.
        context_limit: the servers' `max_model_len`.
        extra: sampling parameters that verl adds to every request, such as `repetition_penalty`.
    """

    def __init__(self, client: Client, context_limit: int, extra: Settings | None = None) -> None:
        hint = "actor_rollout_ref.rollout.calculate_log_probs must be true"
        super().__init__(_generate(client), context_limit, extra or {}, hint=hint)


def _generate(client: Client) -> Generate:
    async def generate(sequence: str, token_ids: list[int], settings: Settings) -> EngineOutput:
        output = await client.generate(sequence, prompt_ids=token_ids, sampling_params={**settings, "logprobs": True})
        return EngineOutput(
            output.token_ids,
            output.log_probs or (),
            aborted=output.stop_reason == "aborted",
            routed_experts=output.routed_experts,
            # a reply that weights changed under has a range of versions; all its tokens count as old as the oldest
            version=int(output.extra_fields.get("min_global_steps") or 0),
        )

    return generate


_engine_of = functools.cache(VerlEngine)
"""A client's engine, made once a process: it remembers what the servers can do."""


class EnvAgentLoop(AgentLoopBase):
    """Runs one episode per call; verl makes an instance for each.

    Whatever breaks in the environment is the episode's outcome: nothing is raised, so that one episode can't fail its
    group. Settings come from the file that `rollout.agent.agent_loop_config_path` names.
    """

    def __init__(
        self,
        *args: Any,
        env: str | list[dict[str, Any]],
        env_args: dict[str, Any],
        imports: list[str],
        seed: int,
        max_tokens: int,
        budget: dict[str, Any] | None = None,
        retries: dict[str, int] | None = None,
        judge: dict[str, Any] | None = None,
        renderer: str = "{}",
        folder: str = ".",
        tools: object = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        watch_log()
        self._env = environment_of({"env": env, "env_args": env_args, "imports": imports})  # the rows have the tasks
        self._env_args, self._seed, self._max_tokens, self._renderer = dict(env_args), seed, max_tokens, renderer
        workers = int(self.config.actor_rollout_ref.rollout.agent.num_workers) if judge else 1
        self._judge = _judge_of(JudgeConfig.model_validate(dict(judge or {})).model_dump_json(), folder, workers)
        self._budget, self._retries = dict(budget or {}), {Ending(k): n for k, n in (retries or {}).items()}

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> list[AgentLoopOutput]:
        """Run the row's task, or the branch that it holds; return one output per trajectory."""
        compared = row.get("greedy") == row["session_id"]
        params = SamplingParams(
            temperature=0.0 if compared else float(sampling_params["temperature"]),
            top_p=float(sampling_params["top_p"]),
            top_k=max(0, int(sampling_params["top_k"])),
            max_tokens=self._max_tokens,
        )
        sampler = ResumingEngine(_engine_of(self.server_manager, int(self.rollout_config.max_model_len)))
        policy = TokenPolicy(sampler, _renderer_of(self.tokenizer, self._renderer), params)
        with use_judge(self._judge):
            episode = await run_episode(self._job(row, params), policy)
        asked = self.data_config.agent_rl
        outputs, routes = outputs_of(episode, experts=asked.store_experts), asked.routes
        strategy = self.config.actor_rollout_ref.actor.strategy
        return outputs if routes is None else with_routes(outputs, RouteShape(**routes), strategy)

    def _job(self, row: dict[str, Any], params: SamplingParams) -> Job:
        """What a row asks for."""
        if "branch" in row:
            job = load_continuation(row["branch"], self._env)
            return replace(job, budget=episode_budget(job.spec.budget, self._budget), retries=self._retries)
        env, env_args, task = assign(self._env, self._env_args, json.loads(row["task"]))
        greedy = params.temperature == 0
        origin = origin_of(row, greedy=greedy)
        group, id = names_of(origin, int(row["index"]), digits=7)
        return Job(
            env,
            task,
            seed_of(origin, task, self._seed, int(row["again"])),
            group,
            episode_budget(env.budget, self._budget),
            env_args=env_args,
            id=id,
            origin=origin,
            snapshots=bool(row.get("snapshots")),
            retries=self._retries,
        )


def episode_budget(own: Budget, wanted: dict[str, Any]) -> Budget:
    """Return an episode's budget; nothing is waited for without an end, as its whole group would wait with it."""
    budget = BudgetConfig.model_validate(wanted).instead_of(own)
    return replace(budget, seconds=budget.seconds or LONGEST_S, reply_seconds=budget.reply_seconds or LONGEST_S)


def outputs_of(episode: Episode, *, experts: bool = False) -> list[AgentLoopOutput]:
    """Return an episode as verl wants it, one output per row; the first may carry its experts for the store.

    The score that verl sees is for its reports; what is trained on comes from the episode itself, on the driver.
    """
    rows = rows_of(episode, experts=experts)
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


class RoutedOutput(AgentLoopOutput):
    """An output with unchanged routes: verl's would have 16 bits, and expert 0 where none is known."""

    def as_dict(self) -> dict[str, Any]:
        """Return the row's fields."""
        return {**super().as_dict(), ROLLOUT: torch.from_numpy(self.routed_experts)}


def with_routes(outputs: list[AgentLoopOutput], shape: RouteShape, strategy: str) -> list[AgentLoopOutput]:
    """Give every output routes of the batch's common shape, in the form for its engine."""
    for output in outputs:
        length = len(output.prompt_ids) + len(output.response_ids)
        output.routed_experts = shape.row(output.routed_experts, length)
    if strategy in FSDP_STRATEGIES:
        return [RoutedOutput(**dict(output)) for output in outputs]
    return [output.model_copy(update={ROLLOUT: output.routed_experts.clip(0)}) for output in outputs]
