"""The pages that users read, taken apart: blocks of code, lines for a shell, code inside a text."""

from __future__ import annotations

import re

from tree import ROOT

OF_VERL = (
    *(
        "set_loss_fn",
        "bypass_mode",
        "adv_estimator",
        "loss_mode",
        "loss_agg_mode",
        "vanilla",
        "kl_penalty",
        "rollout_rs",
    ),
    *("rollout_is=token", "reinforce_plus_plus", "tir_optimal_token_baseline", "norm_adv_by_std_in_grpo=False"),
    *("throughput", "time_per_step", "total_num_tokens", "resume_mode", "trainer.default_local_dir"),
    "moe_load_balance_metrics_interval",
)
"""Names of verl in the pages; `tests/on_verl/test_page.py` finds them there."""


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def shell_lines(text: str) -> list[str]:
    """Return what follows a prompt, without the comment after it."""
    return [line.partition("  #")[0].strip() for line in re.findall(r"^\$ (.*)", text, re.MULTILINE)]


def inline(text: str) -> list[str]:
    """Return the code inside sentences and tables, each piece on one line."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", prose)]


def commands(text: str) -> list[str]:
    """Return every command of a page once, of its blocks and its text."""
    found = dict.fromkeys(re.sub(r"source <\((.*)\)", r"\1", line) for line in (*shell_lines(text), *inline(text)))
    return [line for line in found if re.match(r"(agent-rl|make|pip install)( |$)", line)]
