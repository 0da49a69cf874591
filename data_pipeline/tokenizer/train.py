"""Byte-level BPE and unigram, trained.

The result is a function of the multiset of documents: not of their order, nor of the number of threads. Pre-tokens are
counted first; in BPE the pair with the highest count merges next, and among equal counts the pair with the smaller ids, which
are given in the alphabet's order and then in the order of merges. All 256 bytes are in the vocabulary, so nothing is
unknown. Special tokens (the end of document, with id 0 unless stated) are never made from text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from data_pipeline.config import TokenizerConfig
from data_pipeline.errors import DataError
from data_pipeline.tokenizer.byte_level import EOD_TOKEN, byte_alphabet
from data_pipeline.tokenizer.pieces import training_pieces
from data_pipeline.tokenizer.special import added_tokens, arranged, special_ids, with_specials
from data_pipeline.tokenizer.unigram import count_words, learn_pieces

MIN_PAIR_COUNT = 2
_NEVER = -1e4  # log probability of what text must never be cut into; any cut into bytes is likelier
# GPT-4's and Llama 3's splitting: contractions, words with one leading mark, up to three digits, punctuation with line ends
LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_bpe(texts: Iterator[str], config: TokenizerConfig) -> str:
    """The trained `tokenizer.json`. Fewer tokens than `vocab_size` come out where the text has no more pairs to merge.

    Raises DataError where there is no text at all.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    specials = special_ids(config)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _pre_tokenizer(config)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - len(specials) + 1,
        min_frequency=MIN_PAIR_COUNT,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    counted = _Counted(texts)
    tokenizer.train_from_iterator(counted, trainer=trainer)
    counted.require()
    text: str = tokenizer.to_str(pretty=True) + "\n"
    return text if specials == {EOD_TOKEN: 0} else with_specials(text, specials)


def train_unigram(texts: Iterator[str], config: TokenizerConfig) -> str:
    """The trained `tokenizer.json`, as `train_bpe`; text is cut into its likeliest pieces."""
    from tokenizers import Tokenizer, decoders, models

    specials = special_ids(config)
    counted = _Counted(texts)
    pre_tokenizer, alphabet = _pre_tokenizer(config), byte_alphabet()
    words = count_words(counted, pre_tokenizer, {character: byte for byte, character in enumerate(alphabet)})
    counted.require()
    scores = {"".join(alphabet[byte] for byte in piece): score for piece, score in learn_pieces(words, config.vocab_size - len(specials))}
    ordered = arranged(specials, list(scores))
    tokenizer = Tokenizer(models.Unigram([(token, scores.get(token, _NEVER)) for token in ordered], unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tree = json.loads(tokenizer.to_str())
    tree["added_tokens"] = added_tokens(specials)
    return json.dumps(tree, ensure_ascii=False, indent=2) + "\n"


def _pre_tokenizer(config: TokenizerConfig) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if config.pretokenizer == "gpt2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


class _Counted:
    """Pieces for the trainer, and how many texts they came from."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self.num_texts = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.num_texts += 1
            yield from training_pieces(text)

    def require(self) -> None:
        if not self.num_texts:
            raise DataError("no text is left to train a tokenizer on: every document was dropped or held out. The build's ledger says why.")
