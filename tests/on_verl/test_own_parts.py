"""A user's advantage and objective, from a file of `imports`: in the driver, and in a worker process of verl's."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from agent_rl.algorithms import Algorithm, components
from agent_rl.algorithms.config import AlgorithmConfig
from agent_rl.backends.verl.driver.exchange import compute_weights
from agent_rl.backends.verl.driver.received import receive
from agent_rl.backends.verl.worker.loss import WANTED, WHOLE, loss_function
from agent_rl.gym.registry import load_once
from on_verl.test_backends_agree import EPISODES, in_verl, nested

FILE = str(Path(__file__).parents[2] / "examples" / "own_objective.py")
SETTINGS = {"advantage": "over-median", "objective": {"name": "soft-clip", "width": 0.3}}


def sent() -> TensorDict:
    """What the driver sends of a batch, with the user's advantages."""
    load_once(FILE)
    data, keys, extra, padding = in_verl(EPISODES)
    data["old_log_probs"] = data["rollout_log_probs"]
    algorithm = Algorithm(AlgorithmConfig.model_validate(SETTINGS))
    data.update(compute_weights(algorithm, receive(keys, extra, padding), data).sent)
    return data


def worker(pickled: bytes) -> tuple[bool, float, torch.Tensor]:
    """In a process that has loaded nothing of the user's: whether so, the loss, and its gradient."""
    function, columns = cloudpickle.loads(pickled)
    is_fresh = "soft-clip" not in components.objective
    of_rows = {name: torch.tensor(columns[name][0]) for name in (WANTED, WHOLE)}
    of_tokens = {name: nested(rows, dtype) for name, (rows, dtype) in columns.items() if name not in of_rows}
    data = TensorDict(of_tokens | of_rows, len(of_rows[WHOLE]))
    return is_fresh, *loss_of(function, data)


def loss_of(function: Callable[..., Any], data: TensorDict) -> tuple[float, torch.Tensor]:
    """The loss where each token is a little likelier than before, and its gradient."""
    whole = data["input_ids"]
    logprobs = torch.full((int(whole.offsets()[-1]),), -3.8, requires_grad=True)
    output = {"log_probs": torch.nested.nested_tensor_from_jagged(logprobs, whole.offsets())}
    tu.assign_non_tensor(data, dp_size=1)
    loss, _ = function(output, data)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad


def test_own_objective_runs_in_a_worker_process() -> None:
    data = sent()
    function = loss_function(AlgorithmConfig.model_validate(SETTINGS), [FILE])
    columns = {name: ([row.tolist() for row in data[name].unbind()], data[name].dtype) for name in data.keys()}  # noqa: SIM118
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        is_fresh, loss, gradient = pool.submit(worker, cloudpickle.dumps((function, columns))).result()
    assert is_fresh
    expected_loss, expected = loss_of(function, data)
    assert loss == pytest.approx(expected_loss) and float(expected.norm()) > 0
    torch.testing.assert_close(gradient, expected)
    plain = AlgorithmConfig.model_validate(SETTINGS | {"objective": "ppo-clip"})
    assert loss_of(loss_function(plain, [FILE]), sent())[0] != pytest.approx(expected_loss)


def test_own_advantage_reaches_the_rows_that_are_sent() -> None:
    advantages = sent()["advantages"].unbind()
    # scores of group a: 1.25, 0.25, 0.75 and 1.25, median 0.75; of group b 0.25 and 1, whose lower one is the median
    found = {float(row[row.abs().argmax()]) for row in advantages}
    assert found == {-0.5, 0.0, 0.5, 0.75}
