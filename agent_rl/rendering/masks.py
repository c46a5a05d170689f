"""Special tokens in the environment's words: hidden while a conversation is rendered, then encoded as plain text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from agent_rl.core.messages import JSON

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST = 0x100000  # the last private plane of Unicode: one character for each special token


class Masks:
    """Hides a tokenizer's special tokens in texts, and encodes what was rendered of these."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._tokenizer = tokenizer
        self._masks = {token: chr(_FIRST + index) for index, token in enumerate(special.values())}
        self.special_ids = frozenset(special)

    def hide(self, text: str) -> str:
        """Return the text with a character of no meaning for each special token."""
        for token, mask in self._masks.items():
            text = text.replace(token, mask)
        return text

    def hide_within(self, value: JSON) -> JSON:
        """Return a copy of a JSON value in which special tokens are hidden."""
        if isinstance(value, str):
            return self.hide(value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide_within(inner) for key, inner in value.items()}
        return [self.hide_within(inner) for inner in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Encode a text; what is hidden in it becomes the ids of the token's characters, never its own."""
        tokens = {mask: token for token, mask in self._masks.items() if mask in text}
        ids: list[int] = []
        for piece in re.split(f"([{''.join(tokens)}])", text) if tokens else [text]:
            for part in (tokens[piece][0], tokens[piece][1:]) if piece in tokens else (piece,):
                ids += self._tokenizer.encode(part, add_special_tokens=False)
        return ids


class MaskedTokenizer:
    """A tokenizer for the package `renderers` that encodes as `Masks` do; all else is its tokenizer's.

    It is not callable: asked for the places of tokens in the text, it could not say where those of a mask are.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, masks: Masks) -> None:
        self._tokenizer, self._masks = tokenizer, masks

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Encode a text, without what a tokenizer puts in front of it."""
        return self._masks.encode(text)

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):  # `__call__`, and what copying looks for before there are attributes
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
