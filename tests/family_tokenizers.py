"""Small tokenizers with the special tokens of a model family that `renderers` knows."""

from __future__ import annotations

import copy
import re
from functools import cache

import renderers
from renderers.base import MODEL_RENDERER_MAP
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from agent_rl.rendering import train_tokenizer

TAG = re.compile(r"<[^\s<>]+>|\uff5cDSML\uff5c")
_PLAIN_TAG = re.compile(r"</?[a-z_]+>")
"""Those of thoughts, calls and arguments are tokens of most families, but not special ones."""
_SPECIAL = ("<sop>", "<eop>", "<eos>", "<bos>")


class _Growing(PreTrainedTokenizerFast):
    """Adds each token that it is asked for."""

    def _add(self, token: object) -> None:
        if isinstance(token, str) and token not in self.get_vocab():
            special = token in _SPECIAL or not _PLAIN_TAG.fullmatch(token)
            self.add_tokens([AddedToken(token, special=special, normalized=False)])

    def convert_tokens_to_ids(self, tokens: object) -> object:
        self._add(tokens)
        return super().convert_tokens_to_ids(tokens)

    def encode(self, text: str, **options: object) -> list[int]:  # type: ignore[override]
        if TAG.fullmatch(text):
            self._add(text)
        return super().encode(text, **options)  # type: ignore[arg-type]


@cache
def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with the tokens that a family's renderer asks for, by the name of one of its models."""
    made = copy.deepcopy(train_tokenizer([]))
    made.__class__ = _Growing
    try:
        renderers.create_renderer(made, type(renderers.config_from_name(family))())
    finally:
        made.__class__ = PreTrainedTokenizerFast
    del made.init_kwargs["agent_rl_renderer"]
    made.name_or_path = next(model for model, its in MODEL_RENDERER_MAP.items() if its == family)
    return made
