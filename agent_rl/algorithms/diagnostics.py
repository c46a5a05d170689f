"""Diagnostics: how far the policy that sampled (mu) is from the one the trainer starts from (old), and how old it is.

Nothing here has a gradient or changes training. The ratio is w = old / mu and the gap log w, over sampled tokens of the
whole batch; both as in `corrections`, in float64, with log-ratios clamped to ± 20 before exponentiation. Names are
verl's where the numbers are. A metric that is not defined for a batch is left out: an empty batch has none, and a
correlation needs two different values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from agent_rl.algorithms.corrections import Weights, clamped_exp, k3, rollout_gap
from agent_rl.algorithms.objectives.base import MAX_LOG_RATIO
from agent_rl.errors import ConfigError

TURNS = 8
"""Turns that have a metric of their own; later ones share one."""
STALE = 4
"""The staleness from which on versions are counted together."""
STALENESS = [f"policy_version/staleness_{n}" for n in (*range(STALE), f"{STALE}+")]


def mismatch(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    turns: Tensor,
    *,
    source: Tensor | None = None,
    source_names: Sequence[str] = (),
    episode: Tensor | None = None,
    age: Tensor | None = None,
) -> dict[str, float]:
    """Measure the gap between mu and old over a whole batch; all arguments are `[B, T]`.

    Rows with the same number in `episode`, int64 `[B]`, are one sequence; each is one by itself if it is left out.

    verl's `rollout_corr/*` are as in its `rollout_corr_helper` without truncation: mean, max, min, std (of the
    population) and effective sample size are of w itself, where verl takes the last two of truncated weights, which
    hides what they should show. Sequences with nothing sampled take no part in the means over them; verl counts them as
    perplexity 1. KL is KL(mu || old), in nats per token.

    Also:

    - `mismatch/gap_mean`, `gap_max`: of |log w|; with `turn_0` … `turn_7` and `turn_8+` its mean by turn, and with
      `source_NAME` by source, e.g. of the token before, which is what the two engines may have read differently; tokens
      whose source, a number, has no name among `source_names` are not reported. With `age`, in versions of the weights,
      `age_0` … `age_3` and `age_4+`.
    - `mismatch/seq_eff_sample_size`: the effective sample size of the sequences' products of w, as a share of them.
      Near 1 / sequences, one decides a sequence-level correction.
    - `training/rollout_probs_diff_*` and `training/rollout_actor_probs_pearson_corr`: of |exp(old) - exp(mu)| and
      between the two (verl's debug metrics; MiniMax-M1, arXiv 2506.13585).
    """
    if not mask.any():
        return {}
    gaps = rollout_gap(old_logprobs, rollout_logprobs, mask)
    gap, size = gaps[mask], gaps[mask].abs()
    ratio = clamped_exp(gap)
    found = {
        "rollout_corr/kl": -gap.mean(),
        "rollout_corr/k3_kl": k3(gap).mean(),
        "rollout_corr/chi2_token": ratio.square().mean() - 1,
        "rollout_corr/rollout_is_mean": ratio.mean(),
        "rollout_corr/rollout_is_max": ratio.max(),
        "rollout_corr/rollout_is_min": ratio.min(),
        "rollout_corr/rollout_is_std": ratio.std(correction=0),
        "rollout_corr/rollout_is_eff_sample_size": _ess(ratio),
        "mismatch/gap_mean": size.mean(),
        "mismatch/gap_max": size.max(),
    }
    old, mu = (torch.where(mask, x.detach().double(), 0.0) for x in (old_logprobs, rollout_logprobs))
    found |= _by_sequence(old, mu, mask, episode)
    found |= _probabilities(old[mask], mu[mask])
    found |= _means("mismatch/turn_", size, turns[mask].clamp(max=TURNS), [*map(str, range(TURNS)), f"{TURNS}+"])
    if source is not None:
        found |= _means("mismatch/source_", size, source[mask], source_names)
    if age is not None:
        found |= gap_by_age(size, age[mask])
    return {name: float(value) for name, value in found.items()}


def gap_by_age(gaps: Tensor, age: Tensor) -> dict[str, Tensor]:
    """Return `mismatch/age_0` … `age_3` and `age_4+`: the mean size of tokens' gaps by their age, both `[n]`."""
    return _means("mismatch/age_", gaps, age.clamp(max=STALE), [*map(str, range(STALE)), f"{STALE}+"])


def correction_metrics(weights: Weights, mask: Tensor, episode: Tensor | None = None) -> dict[str, float]:
    """Return how much of the sampled tokens, `mask`, a correction rejected, and the spread of the weights left.

    `rollout_corr/rollout_rs_masked_fraction` is the share of sampled tokens that are rejected, and
    `rollout_rs_seq_masked_fraction` the share of sequences, as in `mismatch`, that lost any (verl's; it counts rows
    with nothing sampled, too). Over kept tokens are `mismatch/weight_mean`, `weight_max`, `weight_eff_sample_size` and
    `weight_zero_fraction`, the share that weighs nothing, as with IcePop; without kept tokens (for the second: without
    weight) they are left out.
    """
    if not mask.any():
        return {}
    lost = mask & ~weights.keep
    lost_of, sampled_of = _sums(lost, episode), _sums(mask, episode)
    found = {
        "rollout_corr/rollout_rs_masked_fraction": lost.sum() / mask.sum(),
        "rollout_corr/rollout_rs_seq_masked_fraction": (lost_of > 0).sum() / (sampled_of > 0).sum(),
    }
    kept = weights.weight[mask & weights.keep].detach().double()
    if len(kept):
        found["mismatch/weight_mean"], found["mismatch/weight_max"] = kept.mean(), kept.max()
        found["mismatch/weight_zero_fraction"] = (kept == 0).double().mean()
        if kept.any():
            found["mismatch/weight_eff_sample_size"] = _ess(kept)
    return {name: float(value) for name, value in found.items()}


def policy_version_histogram(versions: Tensor, current: int) -> dict[str, float]:
    """Return the shares of sampled tokens by how many versions their weights are behind `current`.

    `policy_version/staleness_0` … `staleness_3` and `staleness_4+`; nothing if nothing was sampled, which is a negative
    version.

    Raises:
        ConfigError: if a token is from a version that is yet to come.
    """
    sampled = versions[versions >= 0]
    if not len(sampled):
        return {}
    newest = int(sampled.max())
    if newest > current:
        raise ConfigError(
            f"tokens were sampled by version {newest}, after current={current}: pass the trainer's version"
        )
    counts = torch.bincount((current - sampled).clamp(max=STALE), minlength=STALE + 1)
    shares = (counts.double() / len(sampled)).tolist()
    return dict(zip(STALENESS, shares, strict=True))


def tool_error_metrics(advantages: Tensor, tool_errors: Tensor, trained: Tensor) -> dict[str, float]:
    """Say whether failed tool calls are being trained away, or towards.

    Training pushes away from failed calls while episodes that have them do worse than others: a correlation that rises
    towards 0 and above says that the reward has stopped to care.

    `advantage/with_tool_errors` and `advantage/without_tool_errors` are the means over episodes, `[E]`, that have a
    failed call or have none, and `advantage/tool_error_correlation` is Pearson's, between the number of failed calls
    and the advantage, a mean over sampled tokens where they differ. Only those that are trained on count. What is not
    defined is left out: a mean over nothing, a correlation of constants.
    """
    values, errors = advantages[trained].double(), tool_errors[trained].double()
    found: dict[str, float] = {}
    for name, some in (("with_tool_errors", values[errors > 0]), ("without_tool_errors", values[errors == 0])):
        if len(some):
            found[f"advantage/{name}"] = float(some.mean())
    if len(values) and values.min() < values.max() and errors.min() < errors.max():
        found["advantage/tool_error_correlation"] = float(torch.corrcoef(torch.stack([errors, values]))[0, 1])
    return found


def _sums(x: Tensor, episode: Tensor | None) -> Tensor:
    """The sums over sequences, float64."""
    sums = x.double().sum(-1)
    if episode is None:
        return sums
    ids, index = torch.unique(episode, return_inverse=True)
    return sums.new_zeros(len(ids)).index_add(0, index, sums)


def _by_sequence(old: Tensor, mu: Tensor, mask: Tensor, episode: Tensor | None) -> dict[str, Tensor]:
    old, mu, counts = (_sums(x, episode) for x in (old, mu, mask))
    known = counts > 0
    old, mu, counts = old[known], mu[known], counts[known]
    training, rollout = -old / counts, -mu / counts
    diff, product = training - rollout, clamped_exp(old - mu)
    return {
        "rollout_corr/training_ppl": clamped_exp(training).mean(),
        "rollout_corr/training_log_ppl": training.mean(),
        "rollout_corr/rollout_ppl": clamped_exp(rollout).mean(),
        "rollout_corr/rollout_log_ppl": rollout.mean(),
        "rollout_corr/log_ppl_diff": diff.mean(),
        "rollout_corr/log_ppl_abs_diff": diff.abs().mean(),
        "rollout_corr/log_ppl_diff_max": diff.max(),
        "rollout_corr/log_ppl_diff_min": diff.min(),
        "rollout_corr/ppl_ratio": clamped_exp(diff).mean(),
        "rollout_corr/chi2_seq": product.square().mean() - 1,
        "mismatch/seq_eff_sample_size": _ess(product),
    }


def _probabilities(old: Tensor, mu: Tensor) -> dict[str, Tensor]:
    old, mu = (x.clamp(max=MAX_LOG_RATIO).exp() for x in (old, mu))
    diff = (old - mu).abs()
    found = {"training/rollout_probs_diff_max": diff.max(), "training/rollout_probs_diff_mean": diff.mean()}
    if len(diff) > 1:
        found["training/rollout_probs_diff_std"] = diff.std()
    if old.min() < old.max() and mu.min() < mu.max():
        found["training/rollout_actor_probs_pearson_corr"] = torch.corrcoef(torch.stack([old, mu]))[0, 1]
    return found


def _means(prefix: str, values: Tensor, index: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """The mean of values by index, for indices that occur and have a name."""
    chosen = ((name, values[index == i]) for i, name in enumerate(names))
    return {prefix + name: some.mean() for name, some in chosen if len(some)}


def _ess(weights: Tensor) -> Tensor:
    """Kish's effective sample size as a share of the samples, (sum w)^2 / (n sum w^2)."""
    return weights.sum().square() / (len(weights) * weights.square().sum())
