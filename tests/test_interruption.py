"""agent_rl.policy.interruption: overlong replies are made to answer, by tokens without loss."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from agent_rl.algorithms import to_samples
from agent_rl.backends.embedded.actor import load_actor
from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.rollout_config import InterruptionConfig
from agent_rl.backends.embedded.trainer import Trainer
from agent_rl.config import load_config
from agent_rl.core.episode import Episode, StopReason
from agent_rl.core.messages import Message, Step
from agent_rl.core.trajectory import Source
from agent_rl.engines.base import SamplingParams
from agent_rl.engines.embedded.engine import Engine
from agent_rl.engines.scripted import ScriptedEngine
from agent_rl.errors import ConfigError
from agent_rl.gym.budget import Budget
from agent_rl.gym.registry import spec
from agent_rl.policy import Interruption, TokenPolicy
from agent_rl.policy.interruption import interruptions
from agent_rl.rollout import continuation, run_episode
from agent_rl.rollout.evaluation import trajectory_metrics
from tests.doubles import CALL, Dice, dice_spec, example_episode, run_dice, sampled, small_renderer
from tests.engines import VOCAB, full_logprobs, shaken, tiny
from tests.runs import config
from tests.test_engine import router_choices


def ids(text: str) -> tuple[int, ...]:
    return tuple(small_renderer().reply(Message("assistant", text))[:-1])


STOP = small_renderer().reply(Message("assistant", ""))[-1]
THOUGHT = ids("hmqkzjwvybdf")
LATE = ids(" so ")
SIX = (*ids("6"), STOP)
AFTER = Interruption(4, LATE)


def played(
    *replies: tuple[int, ...], interrupt: Interruption = AFTER, max_tokens: int = 10, budget: Budget | None = None
) -> tuple[Episode, ScriptedEngine]:
    engine = ScriptedEngine(sampled(replies))
    policy = TokenPolicy(engine, small_renderer(), SamplingParams(max_tokens=max_tokens), interrupt)
    return run_dice(policy, budget=budget), engine


def spans(episode: Episode) -> list[tuple[Source, int, int]]:
    return [(s.source, s.turn, s.stop - s.start) for t in episode.trajectories for s in t.spans[1:]]


def test_interruption_continues_a_long_reply_within_its_turn():
    call = tuple(small_renderer().reply(CALL))
    episode, engine = played(THOUGHT, call, SIX, max_tokens=4 + len(call))
    (trajectory,), (session,) = episode.trajectories, engine.sessions
    assert trajectory.token_ids.tolist() == session.token_ids
    assert [p.max_tokens for p in session.params] == [4, len(call), 4]
    (env,) = (n for source, _, n in spans(episode) if source is Source.ENV)
    assert spans(episode) == [
        (Source.POLICY, 0, 4),
        (Source.TEMPLATE, 0, len(LATE)),
        (Source.POLICY, 0, len(call)),
        (Source.TEMPLATE, 0, 1),
        (Source.ENV, 1, env),
        (Source.POLICY, 1, len(SIX)),
    ]
    mask = trajectory.loss_mask
    assert trajectory.token_ids[mask].tolist() == [*THOUGHT[:4], *call, *SIX]
    order = [*range(4), *range(len(call)), *range(len(SIX))]
    np.testing.assert_array_equal(trajectory.logprobs[mask], np.float32([-0.001 * (i + 1) for i in order]))
    said, final = (m for m in episode.messages if m.role == "assistant")
    assert said.content == "hmqk so " and [c.name for c in said.tool_calls] == ["roll"] and final.content == "6"
    assert episode.success and episode.stop_reason is StopReason.DONE
    (sample,) = to_samples([episode])
    assert sample.loss_mask.tolist() == mask.tolist() and sample.rewards[mask][-1] == 1.0


def test_interruption_leaves_short_replies_alone():
    episode, engine = played(SIX)
    assert [s for s, _, _ in spans(episode)] == [Source.POLICY]
    assert [p.max_tokens for p in engine.sessions[0].params] == [4]


def test_interruption_leaves_the_rest_to_the_answer():
    episode, _ = played(THOUGHT, THOUGHT)
    assert spans(episode) == [(Source.POLICY, 0, 4), (Source.TEMPLATE, 0, len(LATE)), (Source.POLICY, 0, 6)]
    assert episode.stop_reason is StopReason.LENGTH


def test_interruption_spares_replies_with_ended_thoughts():
    ended = Interruption(4, LATE, unless=lambda ids: THOUGHT[2] in ids)
    episode, engine = played(THOUGHT, SIX, interrupt=ended)
    assert spans(episode) == [(Source.POLICY, 0, 4), (Source.POLICY, 0, len(SIX))]
    assert [p.max_tokens for p in engine.sessions[0].params] == [4, 6]
    elsewhere = Interruption(4, LATE, unless=lambda ids: THOUGHT[4] in ids)  # it comes later than the interruption
    assert spans(played(THOUGHT, SIX, interrupt=elsewhere)[0])[1] == (Source.TEMPLATE, 0, len(LATE))


def test_interruption_finds_the_end_of_a_thought_in_the_text():
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    bpe.train_from_iterator(["so.</think> 7 </think>"], trainers.BpeTrainer(show_progress=False))
    ended = InterruptionConfig(after_tokens=4, text="so", unless="</think>")
    unless = ended.with_ids(lambda text: bpe.encode(text).ids, bpe.decode).unless
    assert unless is not None and not unless(bpe.encode("so. 7").ids)
    said = bpe.encode("so.</think> 7").ids
    assert not {*bpe.encode("</think>").ids} <= {*said} and unless(said)  # other ids than of its own


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_interruption_tokens_count_in_the_context(spare):
    start = played(SIX)[0].trajectories[0].spans[0].stop
    budget = Budget(tokens=start + 4 + len(LATE) + spare)
    episode, engine = played(THOUGHT, THOUGHT, budget=budget)
    if spare:
        assert spans(episode)[1:] == [(Source.TEMPLATE, 0, len(LATE)), (Source.POLICY, 0, spare)]
    else:  # no room for an answer
        assert spans(episode) == [(Source.POLICY, 0, 4 + len(LATE))]
    assert episode.stop_reason is StopReason.TOKENS
    assert len(episode.trajectories[0]) == budget.tokens == len(engine.sessions[0].token_ids)


def test_interruption_per_episode_counts_its_tokens_together():
    call = tuple(small_renderer().reply(CALL))
    limit = Interruption(len(call) + 2, LATE, per="episode")
    episode, engine = played(call, THOUGHT, call, SIX, interrupt=limit, max_tokens=64)
    own = [s for s in spans(episode) if s[0] is Source.POLICY or s[2] == len(LATE)]
    assert own == [
        (Source.POLICY, 0, len(call)),
        (Source.POLICY, 1, 2),
        (Source.TEMPLATE, 1, len(LATE)),
        (Source.POLICY, 1, len(call)),
        (Source.TEMPLATE, 2, len(LATE)),  # nothing is left: the reply begins with it
        (Source.POLICY, 2, len(SIX)),
    ]
    assert episode.trajectories[0].token_ids.tolist() == engine.sessions[0].token_ids
    assert episode.messages[-1].content == " so 6"
    assert trajectory_metrics([episode, example_episode()]) == {
        "rollout/forks": 0.0,
        "rollout/delegated": 0.0,
        "rollout/interrupted": 2 / 5,
        "rollout/broken_rewards": 0.0,
    }
    twice = example_episode(trajectories=example_episode().trajectories * 3)
    assert trajectory_metrics([twice, episode])["rollout/forks"] == 1.0
    assert trajectory_metrics([]) == dict.fromkeys(
        ("rollout/forks", "rollout/delegated", "rollout/interrupted", "rollout/broken_rewards"), 0.0
    )


class Patient(Dice):
    """Goes on for three turns, whatever is said."""

    snapshot_attributes = ("left",)

    async def reset(self, task, rng):
        self.left = 3
        return "go"

    async def step(self, action):
        self.left -= 1
        return Step("go on", terminated=not self.left)


@pytest.mark.parametrize("turn", [1, 2])
def test_continuation_interrupts_as_the_whole_episode_does(turn):
    """The count and the point are the episode's; what a reply was given to begin with is no part of its prompt."""
    reply = ids("abcdefgh")
    limit = Interruption(len(reply) + 6, LATE, per="episode", spread=5)

    def policy() -> TokenPolicy:
        return TokenPolicy(ScriptedEngine(sampled([(*reply, STOP)] * 9)), small_renderer(), interrupt=limit)

    def later(episode: Episode) -> list[tuple[Source, int]]:
        spans = episode.trajectories[0].spans
        first = next(i for i, s in enumerate(spans) if s.turn == turn and s.source not in (Source.PROMPT, Source.ENV))
        return [(s.source, s.stop - s.start) for s in spans[first:]]

    for seed in range(4):
        whole = run_dice(policy(), cls=Patient, seed=seed, snapshots=True)
        assert later(whole).count((Source.TEMPLATE, len(LATE))) == 3 - turn
        job = continuation(dice_spec(Patient), whole, turn, 77, snapshots=True)
        child = asyncio.run(run_episode(job, policy()))
        assert later(child) == later(whole) and child.messages == whole.messages
        if turn == 1:
            again = asyncio.run(run_episode(continuation(dice_spec(Patient), child, 2, 7), policy()))
            assert again.error is not None and "continue the parent" in again.error.message


def test_interruption_point_depends_on_the_seed():
    spread = Interruption(20, LATE, spread=5)
    points = [spread.point(seed, turn, 0) for seed in range(40) for turn in range(3)]
    assert set(points) == {15, 16, 17, 18, 19, 20}
    assert points == [spread.point(seed, turn, 0) for seed in range(40) for turn in range(3)]
    assert len({spread.point(0, turn, 0) for turn in range(20)}) > 1
    whole = Interruption(20, LATE, per="episode", spread=5)
    assert {whole.point(0, turn, 0) for turn in range(20)} == {whole.point(0, 0, 3) + 3}  # one point an episode
    assert whole.point(0, 0, 100) == 0


def test_interruption_refuses_meaningless_settings():
    with pytest.raises(ConfigError, match=r"set interrupt\.text"):
        Interruption(4, ())
    for bad in ({"after_tokens": 0}, {"after_tokens": 4, "spread": 4}):
        with pytest.raises(ConfigError, match="after_tokens="):
            Interruption(ids=LATE, **bad)
    with pytest.raises(ConfigError, match="leaves nothing of a reply's max_tokens=4"):
        played(THOUGHT, max_tokens=4)
    with pytest.raises(ConfigError, match="a token that ends a reply"):
        played(THOUGHT, interrupt=Interruption(4, SIX))
    late = ("after_tokens: 56", "leaves nothing of max_tokens=56")
    wide = ("after_tokens: 9, spread: 9", "spread=9 must be at least 0 and below")
    for key, message in (late, wide):
        with pytest.raises(ConfigError, match=message):
            load_config("backend/embedded", TrainConfig, ["rollout.interrupt={text: hm, " + key + "}"])
    with pytest.raises(ValidationError, match="text"):
        InterruptionConfig(after_tokens=4, text="")


# The embedded engine


@pytest.mark.parametrize("per", ["reply", "episode"])
def test_interruption_scores_as_the_engine_sampled(per):
    model = shaken(tiny("qwen3_moe"))
    with torch.no_grad():  # as many outputs as the renderer has tokens
        model.resize_token_embeddings(512)
    shaken(model, 1)
    assert model.config.vocab_size > VOCAB
    engine = Engine(model, slots=1, max_len=250)
    params = SamplingParams(max_tokens=30)
    policy = TokenPolicy(engine, small_renderer(), params, Interruption(9, LATE, per))
    tried = (run_dice(policy, budget=Budget(turns=1), seed=seed).trajectories[0] for seed in range(20))
    trajectory = next(t for t in tried if t.loss_mask.sum() > 9 + 5)  # which seed: the processor's rounding decides
    assert interruptions(trajectory) == 1
    mask = torch.from_numpy(trajectory.loss_mask)
    trained = full_logprobs(model, trajectory.token_ids.tolist())
    torch.testing.assert_close(
        trained[mask], torch.from_numpy(trajectory.logprobs)[mask], atol=2e-4, rtol=0, check_dtype=False
    )
    routes = trajectory.routed_experts
    assert routes is not None
    np.testing.assert_array_equal(routes[:-1], router_choices(model, trajectory.token_ids[:-1].tolist()))


def test_interruption_works_in_training(folder: Path, tmp_path: Path):
    rollout = {"groups": 3, "samples": 4, "slots": 8, "max_tokens": 24}
    rollout |= {"interrupt": {"after_tokens": 6, "spread": 2, "text": "<tool_call>7", "unless": "<tool_call>"}}
    algorithm = {"proximal": "recompute", "entropy": 0.01}
    settings = config(tmp_path, rollout=rollout, algorithm=algorithm)

    def step() -> tuple[list[Episode], dict[str, float]]:
        actor = load_actor(folder / "checkpoint", slots=8, context=256)
        result = Trainer(spec("calculator-v0"), actor, settings).train_step()
        given = actor.tokenizer.encode("<tool_call>7", add_special_tokens=False)
        for t in (t for e in result.episodes for t in e.trajectories):
            for a, b in zip(t.spans, t.spans[1:], strict=False):
                if a.source is Source.TEMPLATE and b.source is Source.POLICY:
                    assert t.token_ids[a.start : a.stop].tolist() == given and a.turn == b.turn
        return result.episodes, result.metrics

    (episodes, metrics), (again, _) = step(), step()
    assert 0 < metrics["rollout/interrupted"] <= 1
    assert metrics["mismatch/gap_max"] < 1e-4 and metrics["mismatch/source_template"] < 1e-4
    assert [e.messages for e in episodes] == [e.messages for e in again]


def test_interruption_works_in_evaluation(folder: Path, tmp_path: Path):
    rollout = {"max_tokens": 24, "slots": 8, "interrupt": {"after_tokens": 1, "text": "7"}}
    actor = load_actor(folder / "checkpoint", slots=8, context=256)
    trainer = Trainer(spec("calculator-v0"), actor, config(tmp_path, rollout=rollout))
    tasks = [trainer.spec.tasks.get("eval", i) for i in range(4)]
    _, episodes = trainer.evaluate(tasks, trainer.rollouts.params_of(0), "eval", "check")
    assert trajectory_metrics(episodes)["rollout/interrupted"] > 0
