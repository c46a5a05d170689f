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
    """An endpoint's request and answer."""

    path: str
    request: Callable[[str, list[int], Settings], Settings]
    """What to send, given the model's name, the ids of the whole sequence and the sampling parameters."""
    answer: Callable[[Any], EngineOutput]
    """The answer; raises ValidationError or IndexError if it can't be read, PolicyError if it has no token ids."""


class _TextLogprobs(BaseModel):
    token_logprobs: list[float | None]


class _TokenLogprob(BaseModel):
    logprob: float


class _ChatLogprobs(BaseModel):
    content: list[_TokenLogprob] | None = None


class _Choice(BaseModel):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    routed_experts: str | None = None


class _TextChoice(_Choice):
    logprobs: _TextLogprobs | None = None


class _TokenChoice(_Choice):
    logprobs: _ChatLogprobs | None = None


class _Completion(BaseModel):
    choices: list[_TextChoice]


class _Generated(BaseModel):
    choices: list[_TokenChoice]


def _ask_completions(model: str, token_ids: list[int], settings: Settings) -> Settings:
    sampling = _explicit(settings) | {"logprobs": 0}  # of the sampled token
    return {**sampling, "model": model, "prompt": token_ids, "return_token_ids": True}


def _ask_generate(model: str, token_ids: list[int], settings: Settings) -> Settings:
    sampling = _explicit(settings) | {"logprobs": 0, "detokenize": False}
    return {"model": model, "token_ids": token_ids, "sampling_params": sampling}


def _explicit(settings: Settings) -> Settings:
    # a server fills gaps from generation_config.json
    return {"repetition_penalty": 1.0, **settings}


def _completed(body: Any) -> EngineOutput:
    choice = _Completion.model_validate(body).choices[0]
    return _answer(choice, choice.logprobs.token_logprobs if choice.logprobs else [])


def _generated(body: Any) -> EngineOutput:
    choice = _Generated.model_validate(body).choices[0]
    return _answer(choice, [x.logprob for x in (choice.logprobs and choice.logprobs.content) or ()])


def _answer(choice: _Choice, logprobs: list[float | None] | list[float]) -> EngineOutput:
    if choice.token_ids is None:
        raise PolicyError(
            "the server gave text but no token ids, and text is never tokenized again: it needs vLLM 0.10.2 or newer, "
            "which knows return_token_ids"
        )
    return EngineOutput(
        choice.token_ids,
        [x for x in logprobs if x is not None],
        aborted=choice.finish_reason == "abort",
        routed_experts=None if choice.routed_experts is None else _array(choice.routed_experts),
    )


def _array(text: str) -> npt.NDArray[np.integer[Any]]:
    array: npt.NDArray[np.integer[Any]] = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    return array


ENDPOINTS = (
    Endpoint("/v1/completions", _ask_completions, _completed),
    Endpoint("/inference/v1/generate", _ask_generate, _generated),
)
"""In the order in which they are tried. Every server has the first, but for those that only take tokens; the second is
there with `--enable-scale-out`."""
