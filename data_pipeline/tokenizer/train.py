"""Byte-level BPE, trained.

The result is a function of the multiset of documents: not of their order, nor of the number of threads. Pre-tokens are
counted first, the pair with the highest count merges next, and among equal counts the pair with the smaller ids, which
are given in the alphabet's order and then in the order of merges. All 256 bytes are in the vocabulary, so nothing is
unknown. The end of document is a special token with id 0 and is never made from text.
"""

from __future__ import annotations

from collections.abc import Iterator

from data_pipeline.config import TokenizerConfig
from data_pipeline.errors import DataError
from data_pipeline.tokenizer.byte_level import EOD_TOKEN
from data_pipeline.tokenizer.pieces import training_pieces

MIN_PAIR_COUNT = 2
# GPT-4's and Llama 3's splitting: contractions, words with one leading mark, up to three digits, punctuation with line ends
LLAMA3_PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train_bpe(texts: Iterator[str], config: TokenizerConfig) -> str:
    """The trained `tokenizer.json`. Fewer tokens than `vocab_size` come out where the text has no more pairs to merge.

    Raises DataError where there is no text at all.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    if config.pretokenizer == "gpt2":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        special_tokens=[EOD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    counted = _Counted(texts)
    tokenizer.train_from_iterator(counted, trainer=trainer)
    if not counted.num_texts:
        raise DataError("no text is left to train a tokenizer on: every document was dropped or held out. The build's ledger says why.")
    return tokenizer.to_str(pretty=True) + "\n"


class _Counted:
    """Pieces for the trainer, and how many texts they came from."""

    def __init__(self, texts: Iterator[str]) -> None:
        self._texts = texts
        self.num_texts = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            self.num_texts += 1
            yield from training_pieces(text)
