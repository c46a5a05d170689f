"""agent_rl.backends.verl.driver.preflight: missing resources are reported before verl waits for them."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from agent_rl.backends.verl.config.settings import VerlConfig
from agent_rl.backends.verl.driver.preflight import (
    Node,
    Request,
    missing_on_node,
    missing_resources,
    required_modules,
)


def verl(gpus: int = 1, *, nodes: int = 1, units: int = 8, rollout_nodes: int = 0, device: str = "cuda") -> DictConfig:
    rollout = {"nnodes": rollout_nodes, "n_gpus_per_node": gpus, "tensor_model_parallel_size": 2}
    rollout |= {"data_parallel_size": 1, "checkpoint_engine": {"backend": "nccl"}}
    mode = {"trainer_mode": "separate_async" if rollout_nodes else "sync"}
    return OmegaConf.create(
        {
            "trainer": {"nnodes": nodes, "n_gpus_per_node": gpus, "v1": mode, "device": device},
            "actor_rollout_ref": {"rollout": rollout, "model": {"override_config": {}}},
            "transfer_queue": {
                "backend": {"storage_backend": "SimpleStorage", "SimpleStorage": {"num_data_storage_units": units}}
            },
        }
    )


def cluster(*nodes: tuple[float, float]) -> list[Node]:
    return [Node(f"id{i}", f"10.0.0.{i}", cpus, gpus) for i, (cpus, gpus) in enumerate(nodes)]


@pytest.mark.parametrize(
    ("config", "nodes"),
    [
        (verl(1), [(13, 1)]),
        (verl(1, units=1), [(6, 1)]),
        (verl(8), [(34, 8)]),
        (verl(8, nodes=2), [(29, 8), (29, 8)]),
        (verl(8, rollout_nodes=1), [(64, 8), (64, 8)]),
        (verl(4, rollout_nodes=1), [(64, 8)]),  # both pools on one machine
    ],
)
def test_preflight_passes_a_sufficient_cluster(config: DictConfig, nodes: list[tuple[float, float]]) -> None:
    assert missing_resources(config, cluster(*nodes), joined=False) == []


@pytest.mark.parametrize(
    ("config", "nodes", "said"),
    [
        (verl(1), (2, 1), r"reserves 13 of Ray's CPUs and 2 are free: 9 for its TransferQueue, 3 beside the GPUs"),
        (verl(1), (2, 1), r"set verl\.transfer_queue.*num_data_storage_units=1 .*ray_init\.num_cpus=13"),
        (verl(1), (12, 1), r"12 are free"),
        (verl(8), (16, 8), r"reserves 34 of Ray's CPUs and 16 are free"),
        (verl(1), (64, 0), r"verl\.trainer\.nnodes and n_gpus_per_node reserve 1 GPUs .* Ray has: 0 on 10\.0\.0\.0"),
        (verl(8, rollout_nodes=1), (64, 8), r"beside those of training, as async\.mode=separate samples on its own"),
    ],
)
def test_preflight_names_missing_resources_and_settings(
    config: DictConfig, nodes: tuple[float, float], said: str
) -> None:
    (problem,) = missing_resources(config, cluster(nodes), joined=False)
    with pytest.raises(AssertionError, match=f"(?i){said}"):
        raise AssertionError(problem)


def test_preflight_names_ray_start_for_joined_clusters() -> None:
    (problem,) = missing_resources(verl(1), cluster((2, 1)), joined=True)
    assert "`ray start --num-cpus=13`" in problem


def test_preflight_refuses_gpus_spread_over_nodes() -> None:
    (problem,) = missing_resources(verl(8), cluster((64, 4), (64, 4)), joined=True)
    assert "4 on 10.0.0.0, 4 on 10.0.0.1" in problem


def request(runs: Path, **changes: object) -> Request:
    (runs / "config.json").write_text("{}")
    settings = {"env": "calculator-v0", "start_from": str(runs), "runs_dir": str(runs)} | changes
    marker = runs / ".preflight"
    marker.touch()
    return Request(VerlConfig.model_validate(settings), str(marker), {"numpy": "install it"}, 1)


def test_node_check_passes_a_complete_node(tmp_path: Path) -> None:
    assert missing_on_node(request(tmp_path)) == []


def test_node_check_names_missing_parts(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    own.write_text("import not_installed_here\n")
    asked = request(tmp_path)
    (tmp_path / "model").mkdir()
    asked = Request(
        asked.config.model_copy(update={"start_from": str(tmp_path / "model"), "imports": (str(own),)}),
        asked.marker,
        {"not_installed_either": "pip install it"},
        10**15,
    )
    found = "\n".join(missing_on_node(asked))
    assert "not_installed_either is not installed: pip install it" in found
    assert "ModuleNotFoundError: No module named 'not_installed_here'" in found
    assert "a checkpoint takes about 1000000 GB" in found and "has no config.json: put it on a file system" in found
    Path(asked.marker).unlink()
    assert "is not the driver's: put it on a file system that all nodes mount" in missing_on_node(asked)[0]


def test_node_check_asks_the_hub_for_a_model(tmp_path: Path) -> None:
    (problem,) = missing_on_node(request(tmp_path, start_from="mispelt/model"))
    assert problem.startswith("no model in 'mispelt/model'") and "as a name on Hugging Face's hub it can't" in problem


def test_node_check_makes_the_environment(tmp_path: Path) -> None:
    (problem,) = missing_on_node(request(tmp_path, env_args={"depth": 3}))
    assert "no argument 'depth'" in problem
    (problem,) = missing_on_node(request(tmp_path, imports=[str(tmp_path / "gone.py")]))
    assert "gone.py: no such file" in problem


def test_required_modules_follow_the_config() -> None:
    plain, critic = VerlConfig.model_validate({"env": "e", "start_from": "m"}).algorithm, {"where": "separate"}
    with_critic = VerlConfig.model_validate(
        {"env": "e", "start_from": "m", "algorithm": {"advantage": "gae", "critic": critic}}
    ).algorithm
    assert "attn_implementation=sdpa" in required_modules(verl(), plain)["flash_attn"]
    assert "loads every critic with it" in required_modules(verl(), with_critic)["flash_attn"]
    sdpa = verl()
    sdpa.actor_rollout_ref.model.override_config = {"attn_implementation": "sdpa"}
    assert "flash_attn" not in required_modules(sdpa, plain) and "cupy" not in required_modules(sdpa, plain)
    assert "cupy" in required_modules(verl(2, rollout_nodes=1), plain)
    assert "flash_attn" not in required_modules(verl(device="cpu"), with_critic)


def test_preflight_names_every_shortage() -> None:
    gpus, cpus = missing_resources(verl(8), cluster((2, 0)), joined=False)
    assert "reserve 8 GPUs" in gpus and "reserves 34 of Ray's CPUs and 2 are free" in cpus
