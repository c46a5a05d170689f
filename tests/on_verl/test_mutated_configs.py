"""Mistakes in overrides of verl's keys: a hundred seeded mutants of a valid config, each refused by its key."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from transformers import Qwen3Config

from agent_rl.backends.verl.config.config_check import compose_verl
from agent_rl.backends.verl.config.config_keys import domain_of, readable_keys
from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver.preflight import join_ray
from agent_rl.backends.verl.driver.run import dry_run
from agent_rl.backends.verl.driver.secret_settings import without_secrets
from agent_rl.config import load_config
from agent_rl.errors import ConfigError

MUTANTS = 100
VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
WRONG_TYPES = {"bool": "perhaps", "int": 1.5, "float": "a lot", "text": 7, "list": 3, "ints": "all", "betas": [0.9]}
UNREAD = (
    "actor_rollout_ref.actor.use_torch_compile",
    "actor_rollout_ref.actor.use_remove_padding",
    "actor_rollout_ref.actor.use_fused_kernels",
    "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.actor.freeze_vision_tower",
    "actor_rollout_ref.actor.rollout_n",
    "actor_rollout_ref.model.tiled_mlp.enabled",
    "actor_rollout_ref.nccl_timeout",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class",
    "actor_rollout_ref.rollout.over_sample_rate",
    "actor_rollout_ref.rollout.multi_stage_wake_up",
    "actor_rollout_ref.rollout.skip_tokenizer_init",
    "trainer.balance_batch",
    "trainer.val_before_train",
    "trainer.default_local_dir",
    "trainer.resume_mode",
    "trainer.esi_redundant_time",
    "trainer.ray_wait_register_center_timeout",
    "transfer_queue.enable",
)
"""Keys of verl 0.9.1's own config files that change nothing in a run of agent_rl's."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    Qwen3Config(max_position_embeddings=40960).save_pretrained(folder)
    return str(folder)


def settings(model: str, *overrides: str) -> VerlConfig:
    return load_config("backend/verl", VerlConfig, [f"start_from={model}", *overrides])


def typo(random_: random.Random, word: str) -> str:
    """A word with a letter dropped, doubled or swapped with the next."""
    at = random_.randrange(len(word) - 1)
    dropped, doubled = word[:at] + word[at + 1 :], word[: at + 1] + word[at:]
    swapped = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return random_.choice((dropped, doubled, swapped))


def outside(domain: str) -> object:
    """A value of the right type that a domain does not take."""
    if bound := re.match(r"(int|float)(>=|>)(-?\d+)", domain):
        return int(bound[3]) - (1 if bound[2] == ">=" else 0)
    if re.match(r"(int|float)[\[(]", domain):
        return 1.5
    return typo(random.Random(0), domain.split("|")[0]) if "|" in domain else "fp12"


def mutants() -> list[tuple[str, object]]:
    """Overrides with one mistake each: a key misspelt, unread, of a wrong type, or out of bounds."""
    random_ = random.Random(0)
    keys = sorted(key for key in readable_keys() if not key.endswith("*"))
    found: list[tuple[str, object]] = [(key, "x") for key in UNREAD]
    while len(found) < MUTANTS:
        key = random_.choice(keys)
        domain = readable_keys()[key].removesuffix("?")
        section, _, name = key.rpartition(".")
        kind = re.split(r"[>\[(]", domain)[0]
        match random_.choice(("key", "section", "type", "bounds", "vllm")):
            case "key" if (wrong := f"{section}.{typo(random_, name)}") and domain_of(wrong) is None:
                found.append((wrong, 1))
            case "section" if (wrong := f"{typo(random_, section)}.{name}") and domain_of(wrong) is None:
                found.append((wrong, 1))
            case "type" if kind in WRONG_TYPES:
                found.append((key, WRONG_TYPES[kind]))
            case "bounds" if (kind in ("int", "float") and domain != kind) or "|" in domain:
                found.append((key, outside(domain)))
            case "vllm":
                argument = random_.choice(("max_num_seqs", "max_logprobs", "enable_prefix_caching", "swap_space"))
                found.append((f"{VLLM}.{typo(random_, argument)}", 1))
    return found


def test_compose_refuses_every_mutant(model: str) -> None:
    valid = settings(model, "hardware=none", "verl.actor_rollout_ref.actor.use_dynamic_bsz=true")
    survivors, unnamed = [], []
    for key, value in mutants():
        given = valid.model_dump(by_alias=True)
        given["verl"] = {**valid.verl, key: value}
        try:
            compose_verl(VerlConfig.model_validate(given), Path("/runs/r"))
        except (ConfigError, ValueError) as error:
            unnamed += [] if key in str(error) else [(key, value, str(error))]
        else:
            survivors.append((key, value))
    assert survivors == [] and unnamed == []


NAMED = {
    "fsdp_config.mixed_precision.param_dtyp": "float32",
    "fsdp_config.mixed_precision.param_dtype": "fp12",
    "optim.optimizer": "AdamWW",
    "checkpoint.save_contents": ["hf_model"],
    "fsdp_config.fsdp_size": 3,
}
ROLLOUT = {
    "agent.num_workers": 0,
    "max_num_seqs": -5,
    "dtype": "bfloat",
    "name": "hf",
    "top_p": 0.5,
    "logprobs_mode": "raw_logprobs",
    "gpu_memory_utilization": "0.5",
    "engine_kwargs.vllm.max_num_seq": 4,
    "engine_kwargs.vllm.max_num_seqs": "many",
}
FOUND = {f"actor_rollout_ref.actor.{key}": value for key, value in NAMED.items()}
FOUND |= {f"actor_rollout_ref.rollout.{key}": value for key, value in ROLLOUT.items()}


@pytest.mark.parametrize("key", FOUND)
def test_compose_refuses_wrong_values(key: str, model: str) -> None:
    valid = settings(model, "hardware=gpu_8x80gb")
    given = valid.model_dump(by_alias=True)
    given["verl"] = {**valid.verl, key: FOUND[key]}
    with pytest.raises(ConfigError, match=re.escape(key)):
        compose_verl(VerlConfig.model_validate(given), Path("/runs/r"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.actor.optim.clip_grad", 0.5),
        ("actor_rollout_ref.actor.optim.override_optimizer_config.eps", 1e-6),
        ("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype", "fp32"),
        ("actor_rollout_ref.actor.checkpoint.save_contents", ["model", "optimizer", "extra"]),
        ("actor_rollout_ref.rollout.max_num_seqs", 64),
        (f"{VLLM}.max_logprobs", 5),
        (f"{VLLM}.enable_prefix_caching", False),
        ("actor_rollout_ref.model.override_config.attn_implementation", "sdpa"),
        ("actor_rollout_ref.model.override_config.attention_dropout", 0.1),
        ("ray_kwargs.ray_init.address", "auto"),
        ("ray_kwargs.ray_init.num_gpus", 2),
        ("ray_kwargs.ray_init.runtime_env.env_vars.API_KEY", "secret"),
        ("trainer.logger", ["console", "wandb"]),
        ("transfer_queue.backend.SimpleStorage.num_data_storage_units", 1),
    ],
)
def test_compose_passes_right_values(key: str, value: object, model: str) -> None:
    valid = settings(model)
    given = valid.model_dump(by_alias=True)
    given["verl"] = {**valid.verl, key: value}
    compose_verl(VerlConfig.model_validate(given), Path("/runs/r"))


API_KEY = "ray_kwargs.ray_init.runtime_env.env_vars.API_KEY"


def test_without_secrets_stores_references_to_the_environment() -> None:
    stored = without_secrets({"verl": {API_KEY: "x", "a.b": "x"}})
    assert stored == {"verl": {API_KEY: "${oc.env:API_KEY}", "a.b": "x"}}


def test_dry_run_and_errors_of_ray_show_no_secret(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(model, "env=calculator-v0", f"verl.{API_KEY}=sk-1")
    assert "${oc.env:API_KEY}" in (said := dry_run(config)) and "sk-1" not in said

    def init(**given: object) -> None:
        raise ConnectionError("no cluster")

    monkeypatch.setattr("ray.init", init)
    with pytest.raises(ConfigError, match=r"env_vars.*\{oc.env:API_KEY\}.*no cluster") as raised:
        join_ray(compose_verl(config, Path("/runs/r")))
    assert "sk-1" not in str(raised.value)
