"""The wire formats of a vLLM server's two endpoints for token ids."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from agent_rl.engines.stateless import EngineOutput, Settings
from agent_rl.errors import PolicyError


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint's path and request."""

    path: str
    request: Callable[[str, list[int], Settings], Settings]
    """What to send, given the model's name, the ids of the whole sequence and the sampling parameters."""


class _TokenLogprob(BaseModel):
    logprob: float


class _Logprobs(BaseModel):
    token_logprobs: list[float | None] = []
    """Of /v1/completions."""
    content: list[_TokenLogprob] | None = None
    """Of /inference/v1/generate."""


class _Choice(BaseModel):
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    routed_experts: str | None = None


class _Answer(BaseModel):
    choices: list[_Choice]


def _ask_completions(model: str, token_ids: list[int], settings: Settings) -> Settings:
    sampling = _explicit(settings) | {"logprobs": 0}  # of the sampled token
    return {**sampling, "model": model, "prompt": token_ids, "return_token_ids": True}


def _ask_generate(model: str, token_ids: list[int], settings: Settings) -> Settings:
    sampling = _explicit(settings) | {"logprobs": 0, "detokenize": False}
    return {"model": model, "token_ids": token_ids, "sampling_params": sampling}


def _explicit(settings: Settings) -> Settings:
    # a server fills gaps from generation_config.json
    return {"repetition_penalty": 1.0, **settings}


def read_answer(body: object) -> EngineOutput:
    """Read an answer of either endpoint.

    Raises:
        ValidationError: if it can't be read.
        IndexError: if it has no choice.
        PolicyError: if it has no token ids.
    """
    choice = _Answer.model_validate(body).choices[0]
    if choice.token_ids is None:
        raise PolicyError(
            "the server gave text but no token ids, and text is never tokenized again: it needs vLLM 0.10.2 or newer, "
            "which knows return_token_ids"
        )
    found = choice.logprobs or _Logprobs()
    return EngineOutput(
        choice.token_ids,
        [x for x in found.token_logprobs if x is not None] + [x.logprob for x in found.content or ()],
        aborted=choice.finish_reason == "abort",
        routed_experts=None if choice.routed_experts is None else _array(choice.routed_experts),
    )


def _array(text: str) -> npt.NDArray[np.integer[Any]]:
    array: npt.NDArray[np.integer[Any]] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array


ENDPOINTS = (
    Endpoint("/v1/completions", _ask_completions),
    Endpoint("/inference/v1/generate", _ask_generate),
)
"""In the order in which they are tried. Every server has the first, but for those that only take tokens; the second is
there with `--enable-scale-out`."""
