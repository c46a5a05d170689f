"""agent_rl.config: presets, settings, and errors."""

import re
import shlex
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import yaml
from hydra import initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from pydantic import BaseModel, ValidationError

from agent_rl.backends.embedded.config import TrainConfig
from agent_rl.backends.embedded.optimizer import OptimizerConfig
from agent_rl.backends.embedded.rollout_config import EmbeddedEvalConfig, EmbeddedRolloutConfig, InterruptionConfig
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.cli.chat import ChatSettings
from agent_rl.cli.check import JudgedCheckSettings
from agent_rl.cli.config_text import _entries, list_settings, write_config
from agent_rl.config import (
    ELSEWHERE,
    Section,
    _composed,
    choices,
    load_config,
    parse_setting,
    setting_names,
    write_setting,
)
from agent_rl.errors import ConfigError
from agent_rl.judge.config import JudgeConfig
from agent_rl.policy import PolicyConfig
from agent_rl.runs.config import RunConfig
from agent_rl.runs.fork import ForkSettings
from agent_rl.runs.play import PlaySettings
from agent_rl.runs.rollout import RolloutSettings


def load(*overrides: str) -> TrainConfig:
    return load_config("backend/embedded", TrainConfig, overrides)


def undocumented(config: BaseModel | type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, about, section, _ in _entries(config):
        if not about:
            yield prefix + name
        if section is not None:
            yield from undocumented(section, f"{prefix}{name}.")


@pytest.mark.parametrize(
    "config",
    [
        *(TrainConfig, VerlConfig, RolloutSettings, PlaySettings, ForkSettings, ChatSettings, JudgedCheckSettings),
        JudgeConfig,
    ],
)
def test_settings_say_what_they_are(config: type[BaseModel]) -> None:
    assert [*undocumented(config)] == []


def test_write_config_has_the_keys_of_null_sections() -> None:
    commented = re.search(r"^  # interrupt:\n((?:  #   .*\n)+)", write_config(load()), re.MULTILINE)
    assert commented is not None
    found = yaml.safe_load(re.sub("^  #", "", commented[1], flags=re.MULTILINE).replace("...", "null"))
    assert {*found} == {*InterruptionConfig.model_fields} and found["spread"] == 0
    assert "keys: after_tokens, text, per, spread, unless" in " ".join(list_settings(load()).split())


def test_load_config_composes_presets() -> None:
    config = load()
    assert config.env == "calculator-v0" and config.algorithm.name == "maxrl" and config.model.architecture == "qwen3"
    assert load("model=tiny_moe").model.architecture == "qwen3_moe"
    assert {"tiny", "tiny_moe"} <= set(choices("model")) and choices("no such group") == []


def test_algorithm_name_is_taken_for_its_preset() -> None:
    chosen = load("algorithm=gspo", "algorithm.entropy=0.1").algorithm
    assert load("algorithm.name=gspo", "algorithm.entropy=0.1").algorithm == chosen
    given = {"algorithm": {"name": "gspo", "entropy": 0.1}}
    assert load_config("backend/embedded", TrainConfig, settings=given).algorithm == chosen
    with pytest.raises(ConfigError, match="no algorithm 'gspoo'"):
        load("algorithm.name=gspoo")


@pytest.mark.parametrize(("backend", "schema"), [("embedded", TrainConfig), ("verl", VerlConfig)])
def test_schema_defaults_match_the_command_line(backend: str, schema: type[RunConfig]) -> None:
    given = {"env": "calculator-v0"} | ({"start_from": "m"} if schema is VerlConfig else {})
    composed = load_config(f"backend/{backend}", schema, [f"{key}={value}" for key, value in given.items()])
    presets = {"verl", "algorithm"}  # hardware=, algorithm=
    assert composed.model_dump(exclude=presets) == schema(**given).model_dump(exclude=presets)


def test_fresh_models_explore_and_others_are_left_as_they_are() -> None:
    def chosen(*settings: str) -> tuple[float, float | None, float, float]:
        config = load(*settings)
        first, second = config.rollout.temperature, config.rollout.retry_temperature
        return first, second, config.eval.sampled(config.rollout), config.optimizer.weight_decay

    assert chosen() == chosen("optimizer.lr=1e-3", "eval.n=8") == (1.3, 2.0, 1.0, 0.1)
    assert chosen("rollout.temperature=2", "optimizer.weight_decay=0") == (2.0, 2.0, 1.0, 0.0)
    assert chosen("rollout.retry_temperature=null") == chosen("env=nim-v0", "self_play=true") == (1.3, None, 1.0, 0.1)
    assert chosen("start_from=m") == chosen("algorithm=rft", "episodes=e.jsonl") == (1.0, None, 1.0, 0.0)
    assert chosen("start_from=m", "rollout.temperature=0.7") == (0.7, None, 0.7, 0.0)
    section = TrainConfig(env="calculator-v0", optimizer=OptimizerConfig(lr=1.0)).optimizer
    assert (section.lr, section.weight_decay) == (1.0, 0.1)


def sections(schema: type[Section]) -> Iterator[tuple[str, type[Section], object]]:
    for name, field in schema.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield name, kind, field.default
            yield from sections(kind)


@pytest.mark.parametrize("schema", [TrainConfig, VerlConfig])
def test_section_defaults_match_their_class(schema: type[Section]) -> None:
    """Else setting one key of a section would change the others."""
    found = list(sections(schema))
    assert len(found) > 8
    assert [name for name, kind, default in found if default != kind()] == []


def test_load_config_sets_any_key_of_the_schema() -> None:
    config = load("steps=3", "rollout.groups=5", "warm_start.batch=7", "env_args.level=2", "optimizer.beta1=0.8")
    assert (config.steps, config.rollout.groups, config.warm_start.batch) == (3, 5, 7)
    assert config.env_args == {"level": 2} and config.optimizer.beta1 == 0.8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("stepz=3", "no setting 'stepz'. Did you mean 'steps'?"),
        ("num_generations=8", "no setting 'num_generations'. Did you mean 'rollout.samples'?"),
        ("actor.ppo_epochs=2", "no setting 'actor.ppo_epochs'. Did you mean 'updates.epochs'?"),
        ("rollout.grops=3", "Did you mean 'rollout.groups'?"),
        ("algorithm=ggrpo", "no algorithm 'ggrpo'. Did you mean 'grpo'?"),
        ("steps", "write key=value"),
        ("steps=many", "steps='many'"),
        ("steps=-1", "steps=-1"),
        ("rollout.temperature=0", "rollout.temperature=0"),
        ("algorithm.aggregation=sum", "algorithm.aggregation='sum'"),
        ("episodes=runs/a", "episodes=runs/a: objective=ppo-clip learns from rollouts of the policy as it is"),
    ],
)
def test_load_config_names_wrong_settings(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(override)
    assert message in str(error.value)


def test_load_config_composes_amid_a_hydra_app() -> None:
    _composed.cache_clear()
    with initialize_config_module("agent_rl.configs", version_base=None):
        app = GlobalHydra.instance().hydra
        assert load("steps=3").steps == 3
        assert GlobalHydra.instance().hydra is app


def test_load_config_composes_in_threads_at_once() -> None:
    _composed.cache_clear()
    with ThreadPoolExecutor(4) as threads:
        assert [c.seed for c in threads.map(load, [f"seed={n}" for n in range(4)])] == [0, 1, 2, 3]


def test_load_config_refuses_exclusive_settings() -> None:
    with pytest.raises(ConfigError) as error:
        load("algorithm.routing.replay=R3")
    assert str(error.value).startswith("algorithm.routing is about a mixture") and "model=tiny_moe" in str(error.value)
    with pytest.raises(ConfigError) as error:
        load("algorithm.weight=icepop", "algorithm.proximal=rollout")
    assert str(error.value).startswith("algorithm: a correction") and len(str(error.value)) < 200
    assert load("model=tiny_moe", "algorithm.routing.replay=R3").algorithm.routing.replay == "R3"


def test_context_refuses_budgets_larger_than_the_model() -> None:
    config = load("model.max_positions=64")
    with pytest.raises(ConfigError, match="max_positions=64"):
        config.context(256)
    assert config.context(32) == 32 and config.context(None) == 64


def test_rollout_preset_has_exactly_the_schema_keys() -> None:
    assert set(load_config(None, RolloutSettings, []).model_dump()) == set(RolloutSettings.model_fields)


def test_load_config_chooses_a_section_by_its_name() -> None:
    settings = load_config(None, RolloutSettings, ["policy=vllm", "policy.model=m", "policy.engine.dtype=float32"])
    assert settings.policy == PolicyConfig(name="vllm", model="m", engine={"dtype": "float32"})
    later = load_config(None, RolloutSettings, ["policy.url=http://h:1", "policy=vllm"])
    assert later.policy == PolicyConfig(name="vllm", url="http://h:1")


def test_names_of_other_trainers_are_settings_here():
    known = {*setting_names(TrainConfig), *setting_names(RolloutSettings)}
    assert [ours for ours in ELSEWHERE.values() if ours not in known and not choices(ours)] == []
    assert not set(ELSEWHERE) & known


@pytest.mark.parametrize(
    ("settings", "tokens"), [((), 1024), (("device=cuda:1",), 4096), (("micro_batch_tokens=9",), 9)]
)
def test_forward_takes_more_tokens_on_a_gpu(settings: tuple[str, ...], tokens: int) -> None:
    assert load(*settings).forward_tokens == tokens


def test_eval_temperature_is_that_of_rollout_unless_it_is_set() -> None:
    rollout = EmbeddedRolloutConfig(temperature=1.3)
    assert EmbeddedEvalConfig().sampled(rollout) == 1.3
    assert EmbeddedEvalConfig(temperature=1.0).sampled(rollout) == 1.0
    with pytest.raises(ValidationError, match="temperature"):
        EmbeddedEvalConfig(temperature=0)  # that is the greedy evaluation


PLAIN = ["out=été.jsonl", "runs_dir=/tmp/日本", "policy=/home/josé/ck", "out=my file (1).jsonl", "out=/a b/c!.jsonl"]


@pytest.mark.parametrize("text", PLAIN)
def test_setting_takes_text_of_any_language_literally(text: str) -> None:
    assert parse_setting(text) == tuple(text.split("="))


@pytest.mark.parametrize(
    "text", ["it's", "a,b]", '"', "${", 'it\'s "x"', "a\\", "\\'", "12", "null", "été (1)", " a", "a\\\\'b"]
)
def test_written_setting_is_read_as_the_same_text(text: str) -> None:
    assert parse_setting(write_setting("out", text)) == ("out", text)


def test_refused_setting_is_answered_with_the_way_out() -> None:
    with pytest.raises(ConfigError) as refused:
        parse_setting("policy.text=it's")
    (word,) = shlex.split(str(refused.value).split("write ")[1])
    assert parse_setting(word) == ("policy.text", "it's")


@pytest.mark.parametrize(
    "setting", ["seed=99999999999999999999999", "optimizer.lr=inf", "rollout.temperature=inf", "eval.temperature=nan"]
)
def test_load_config_refuses_numbers_that_nothing_can_use(setting: str) -> None:
    with pytest.raises(ConfigError, match=setting.partition("=")[0]):
        load(setting)
