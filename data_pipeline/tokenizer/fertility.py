"""How well a tokenizer fits a text: tokens a word, bytes a token, and whether every text comes back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.fim import Fim, document_text, fim_of_dataset
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.tokenizer.facts import facts_of, prepared, read_pretrained
from data_pipeline.words import words

_BATCH_BYTES = 1 << 20
HEAD = ("source", "tokenizer", "documents", "bytes", "tokens/word", "bytes/token", "byte tokens", "ids used", "come back")


@dataclass
class Fertility:
    """Counts over some texts. `single_bytes`: tokens that stand for one byte; `used`: bool[vocabulary], ids that occurred;
    `returned`: texts that decode(encode(text)) gives back."""

    used: np.ndarray
    documents: int = 0
    bytes: int = 0
    words: int = 0
    tokens: int = 0
    single_bytes: int = 0
    returned: int = 0
    lost: list[str] = field(default_factory=list)  # the first few texts that don't come back, shortened

    @property
    def tokens_a_word(self) -> float:
        return self.tokens / max(self.words, 1)

    @property
    def bytes_a_token(self) -> float:
        return self.bytes / max(self.tokens, 1)

    def row(self, source: str, tokenizer: str) -> tuple[str, ...]:
        """Cells under HEAD."""
        return (
            source,
            tokenizer,
            f"{self.documents:,}",
            f"{self.bytes:,}",
            f"{self.tokens_a_word:.3f}",
            f"{self.bytes_a_token:.3f}",
            f"{100 * self.single_bytes / max(self.tokens, 1):.1f} %",
            f"{100 * self.used.mean():.1f} %",
            f"{self.returned:,} of {self.documents:,}",
        )


def measure(encoder: Encoder, token_bytes: np.ndarray, texts: Iterable[str]) -> Fertility:
    """Encode and decode every text. `token_bytes`: of each id, as TokenizerFacts has them."""
    found = Fertility(used=np.zeros(token_bytes.size, dtype=bool))
    for batch in _batches(texts):
        for text, ids in zip(batch, encoder.encode_batch(batch)):
            found.documents += 1
            found.bytes += len(text.encode())
            found.words += len(words(text))
            found.tokens += ids.size
            found.single_bytes += int((token_bytes[ids] == 1).sum())
            found.used[ids] = True
            if encoder.decode(ids.tolist()) == text:
                found.returned += 1
            elif len(found.lost) < 3:
                found.lost.append(text[:80])
    return found


def compare(dataset: Dataset, tokenizers: Sequence[str], *, max_bytes: int) -> list[tuple[str, ...]]:
    """A row under HEAD for each source of a dataset and each tokenizer: its own, then those at the paths. About `max_bytes`
    of text of each source are measured, from documents spread evenly over it."""
    own = Encoder.open(dataset.tokenizer_path)
    encoders = [("own", own, dataset.token_bytes)]
    for path in tokenizers:
        raw, named = read_pretrained(path)
        text = prepared(raw, where=path)
        facts = facts_of(text, type="pretrained", eod_token=named.get("eos_token"), where=path)
        encoders.append((path, Encoder(text, can_cut=False), facts.token_bytes))
    fim = fim_of_dataset(dataset)
    rows = []
    for source in dataset.sources:
        texts = list(_spread(source, own, fim, max_bytes))
        rows += [measure(encoder, table, texts).row(source.name, name) for name, encoder, table in encoders]
    return rows


def table(rows: Sequence[tuple[str, ...]]) -> str:
    """Rows under HEAD, in columns."""
    cells = [HEAD, *rows]
    widths = [max(len(row[n]) for row in cells) for n in range(len(HEAD))]
    lines = [
        "  ".join(cell.ljust(width) if n < 2 else cell.rjust(width) for n, (cell, width) in enumerate(zip(row, widths))) for row in cells
    ]
    return "\n".join(line.rstrip() for line in lines)


def trained_on(dataset: Dataset) -> str:
    """What the tokenizer was trained on, in words; empty where it was not trained here."""
    facts = dataset.manifest.tokenizer
    if facts["type"] not in ("bpe", "unigram"):
        return ""
    sample = facts.get("trained_on")
    if sample is None:
        return "trained on every document of the training split"
    return f"trained on a sample of {sample['documents']:,} documents, {sample['bytes']:,} bytes, sha256 {sample['sha256'][:16]}"


def _spread(source: TokenSource, encoder: Encoder, fim: Fim | None, max_bytes: int) -> Iterator[str]:
    every = max(1, -(-source.text_bytes // max_bytes))
    for number in range(0, source.num_documents, every):
        shard, inside = source.find(number)
        yield document_text(shard.document(inside), encoder, fim)


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch, held = [], 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= _BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def report(folder: Path, tokenizers: Sequence[str], *, max_bytes: int) -> str:
    """The whole of it, as text."""
    dataset = Dataset.open(folder)
    own = dataset.manifest.tokenizer
    about = f"{folder}: {own['type']}, {dataset.vocab_size:,} ids, {dataset.tokenizer_hash[:16]}; {trained_on(dataset)}".rstrip("; ")
    return f"{about}\n{table(compare(dataset, tokenizers, max_bytes=max_bytes))}"
