"""A small byte-level BPE tokenizer, trained offline in well under a second, for the embedded model."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING

from agent_rl.errors import ConfigError
from agent_rl.rendering.chat_format import as_unicode
from agent_rl.rendering.hermes import CLOSE, OPEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PIECES = r"\d{1,3}|[A-Za-z]{1,64}| |[^\sA-Za-z\d]{1,64}|\s"
"""Where the text is cut before BPE: no token spans a number and a word, or a newline and anything else. To merge a
piece takes time by the square of its length."""

_BASICS = (
    *(str(number) for number in range(100)),
    *("system", "user", "assistant", "tool", "name", "arguments"),
    *('{"', '":"', '","', '":{"', '"}}', '":', "}}", ',"'),
)
_SMALLEST = 432
"""256 bytes, the special tokens, and room for every merge of `_BASICS`."""
_LONGEST, _HEAVIEST = 2**14, 50_000
"""Characters of a text that are learned from, and repeats of the basics, of 400 characters each, that win over all."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 576) -> PreTrainedTokenizerFast:
    """Train a tokenizer in which any text round-trips, and 0 to 99 and the role names are one token each.

    The same texts give the same tokenizer. Of long texts it learns from the beginning, of very many from every second
    one, fourth one and so on. `save_pretrained` writes what `AutoTokenizer` loads back, chat template
    included: the format of `ChatMLRenderer`.

    Args:
        texts: what it will have to write, in about the proportions in which it will.
        vocab_size: how many tokens to have at most; fewer if the texts don't give as many.

    Raises:
        ConfigError: if the vocabulary has no room for the bytes, the special tokens and the numbers.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    if vocab_size < _SMALLEST:
        raise ConfigError(f"vocab_size={vocab_size} can't hold all bytes, numbers and roles: take {_SMALLEST} or more")
    tokenizer = Tokenizer.from_str(_trained(tuple(as_unicode(text[:_LONGEST]) for text in texts), vocab_size))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
        chat_template=(resources.files("agent_rl.rendering") / "chatml.j2").read_text(encoding="utf-8"),
        agent_rl_renderer="chatml",
    )


@lru_cache(maxsize=4)
def _trained(corpus: tuple[str, ...], vocab_size: int) -> str:
    """Return the tokenizer in JSON; it takes a second, which the next run of this process on the same texts saves."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    while (weight := _winning_weight(corpus)) > _HEAVIEST and len(corpus) > 1:
        corpus = corpus[::2]
    tags = [AddedToken(tag, special=False, normalized=False) for tag in (OPEN, CLOSE)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*corpus, *[" ".join(_BASICS)] * weight], trainer)
    tokenizer.add_tokens(tags)  # not "special": decoding without special tokens must still show the calls
    return str(tokenizer.to_str())


def _winning_weight(corpus: Sequence[str]) -> int:
    """How often the basics must be repeated to be merged before anything in the corpus."""
    pairs: Counter[tuple[int, int]] = Counter()
    for piece, count in Counter(piece for text in corpus for piece in re.findall(PIECES, text)).items():
        for pair in pairwise(piece.encode()):
            pairs[pair] += count
    return 1 + max(pairs.values(), default=0)
