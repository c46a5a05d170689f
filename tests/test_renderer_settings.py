"""`renderer=NAME` and its settings in training, in policies and checkpoints; models without a chat template."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import agent_rl as ar
from agent_rl.backends.embedded.actor import load_actor, make_actor
from agent_rl.backends.embedded.config import ModelConfig, TrainConfig
from agent_rl.backends.embedded.model import make_model
from agent_rl.backends.settings import training_config
from agent_rl.backends.verl.config.settings import VerlConfig, agent_loop
from agent_rl.config import load_config
from agent_rl.policy.by_name import PolicyConfig, open_policy
from agent_rl.policy.token import TokenPolicy
from agent_rl.rendering import ChatMLRenderer, TemplateRenderer, load_renderer, train_tokenizer
from agent_rl.rendering.config import RendererConfig
from agent_rl.rendering.support import Support
from agent_rl.runs.folder import save_config
from agent_rl.runs.rollout import RolloutSettings
from agent_rl.store.beside import renderer_settings

ASK, CALL = ar.Message("user", "What is 3*4?"), ar.ToolCall("call_0", "calculator", {"left": 3, "right": 4})
REFUSE = RendererConfig(name="template", missing="refuse")


def base_tokenizer() -> PreTrainedTokenizerFast:
    """As GPT-2's: bytes, one special token, no chat template."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["user:"], trainers.BpeTrainer(special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def test_base_model_is_told_of_plain_renderer() -> None:
    with pytest.raises(ar.RenderError, match=r"has no chat template, as base models have none: set renderer=plain"):
        load_renderer(base_tokenizer())
    with pytest.raises(ar.RenderError, match="by eos_token, which"):
        load_renderer(PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())), "plain")


def test_plain_renderer_appends_and_reads_calls(tmp_path: Path) -> None:
    tokenizer = base_tokenizer()
    renderer, tools = load_renderer(tokenizer, "plain"), ar.make("calculator-v0").tools
    prompt = renderer.prompt([ASK], tools)
    shown = tokenizer.decode(prompt)
    assert shown.startswith("system:\n# Tools") and '"name": "calculator"' in shown
    assert shown.endswith("<|endoftext|>\nuser:\nWhat is 3*4?<|endoftext|>\nassistant:\n")
    said = ar.Message("assistant", "I look.", tool_calls=(CALL,))
    reply, result = renderer.reply(said), ar.Message("tool", "12", tool_call_id="call_0")
    assert reply[-1] == tokenizer.eos_token_id and renderer.parse(reply, prompt, tools) == said
    bridge = renderer.bridge(prompt, reply, [result], tools)
    assert bridge is not None
    assert [*prompt, *reply, *bridge.closing, *bridge.ids] == renderer.prompt([ASK, said, result], tools)
    tokenizer.save_pretrained(tmp_path)
    assert load_renderer(AutoTokenizer.from_pretrained(tmp_path)).prompt([ASK], tools) == prompt


def test_plain_renderer_begins_as_the_tokenizer_does() -> None:
    tokenizer = base_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    begin = tokenizer.bos_token_id
    assert begin not in load_renderer(tokenizer, "plain").prompt([ASK], ())  # as of GPT-2, which begins with none
    parts = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.backend_tokenizer.post_processor = parts
    renderer = load_renderer(tokenizer, "plain")
    prompt = renderer.prompt([ASK], ())
    bridge = renderer.bridge(prompt, renderer.reply(ar.Message("assistant", "12")), [ASK])
    assert prompt[0] == begin and begin not in [*prompt[1:], *bridge.ids]


def test_checkpoint_remembers_the_renderer_that_was_asked_for(tmp_path: Path) -> None:
    tokenizer = train_tokenizer([])
    model = make_model(ModelConfig(hidden=16, layers=1, heads=1, kv_heads=1, head_dim=16, intermediate=16), 432, seed=0)
    asked = RendererConfig(name="template", options={"greeting": "hi"})
    make_actor(model, tokenizer, slots=1, context=64, renderer=asked).save(tmp_path / "checkpoint")
    renderer = load_actor(tmp_path / "checkpoint", slots=1, context=64).renderer
    assert isinstance(renderer, TemplateRenderer) and renderer._template.options == {"greeting": "hi"}
    policy = ar.load(tmp_path / "checkpoint", renderer="chatml")
    assert isinstance(policy.renderer, ChatMLRenderer)
    named = PolicyConfig.model_validate({"name": str(tmp_path), "renderer": {"name": "template", "missing": "refuse"}})
    with (
        pytest.raises(ar.RenderError, match=r"leaves out what renderer\.missing=system would write: tools"),
        open_policy(named, ar.SamplingParams(), ar.spec("calculator-v0")),
    ):
        pass
    named = PolicyConfig.model_validate({"name": str(tmp_path), "renderer": "template"})
    with open_policy(named, ar.SamplingParams(), ar.spec("calculator-v0")) as opened:
        assert isinstance(opened, TokenPolicy) and isinstance(opened.renderer, TemplateRenderer)
        assert opened.renderer.support == Support(tools="system", reasoning="content")


def test_training_takes_a_renderer_on_both_backends() -> None:
    settings = ("renderer=template", "renderer.missing=refuse")
    assert load_config("backend/embedded", TrainConfig, settings).renderer == REFUSE
    options = load_config("backend/embedded", TrainConfig, ["renderer.options.enable_thinking=false"]).renderer
    assert options == RendererConfig(options={"enable_thinking": False})
    run = training_config("calculator-v0", backend="verl", start_from="some/model", renderer="template-fork")
    assert isinstance(run, VerlConfig)
    (loop,) = agent_loop(run, Path("run"))
    assert RendererConfig.model_validate_json(str(loop["renderer"])) == RendererConfig(name="template-fork")


def test_wrong_renderer_settings_are_refused() -> None:
    with pytest.raises(ar.ConfigError, match=r"renderer\.mising'.*Did you mean 'renderer\.missing'"):
        load_config("backend/embedded", TrainConfig, ["renderer.mising=refuse"])
    with pytest.raises(ar.ConfigError, match=r"renderer\.missing='drop'"):
        load_config("backend/embedded", TrainConfig, ["renderer.missing=drop"])
    with pytest.raises(ar.ConfigError, match="renderer=chatml has no options, got"):
        load_renderer(train_tokenizer([]), RendererConfig(name="chatml", options={"x": 1}))


def test_verify_reads_the_renderer_beside_the_episodes(tmp_path: Path) -> None:
    run, rollout = tmp_path / "run", tmp_path / "rollout"
    for folder in (run, rollout):
        folder.mkdir()
        (folder / "episodes.jsonl").touch()
    assert renderer_settings(run) is None
    save_config(run, TrainConfig(env="calculator-v0", renderer=REFUSE))
    assert renderer_settings(run) == REFUSE
    policy = PolicyConfig.model_validate({"name": "vllm", "renderer": "qwen3"})
    save_config(rollout, RolloutSettings(policy=policy), "episodes.yaml")
    assert renderer_settings(rollout) == RendererConfig(name="qwen3")
