"""A dataset, for people to look at."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.fim import Fim, fim_of_dataset, text_tokens
from data_pipeline.plans import read_plan_facts
from data_pipeline.summary import summary_lines
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.trace import find_document

_SHOWN_CHARACTERS = 400
_SHOWN_TOKENS = 60


def show_dataset(folder: Path, *, number: int, tokens: bool) -> None:
    """Books, sources, tokenizer, plans, and `number` documents of each source, spread evenly over it."""
    dataset = Dataset.open(folder)
    plans = [
        f"{facts['source']} {facts['split']}, S={facts['sequence_length']}, {facts['method']}: {facts['num_rows']:,} rows"
        + ("" if facts["manifest_hash"] == dataset.manifest_hash else ", of other data: it will be made again")
        for facts in read_plan_facts(folder / "packing")
    ]
    asked = dataset.manifest.config.get("tokenizer", {})
    wanted = asked.get("vocab_size") if asked.get("type") == "bpe" else None
    print(f"{folder}: identity {dataset.identity[:16]}")
    for line in summary_lines(dataset, plans, asked_vocab=wanted):
        print(line)
    encoder, fim = Encoder.open(dataset.tokenizer_path), fim_of_dataset(dataset)
    for source in [*dataset.sources, *dataset.validation]:
        chosen = sorted({place * max(source.num_documents - 1, 0) // max(number - 1, 1) for place in range(number)})
        for document in chosen:
            _show(encoder, fim, source, document, tokens=tokens, whole=False)


def show_document(folder: Path, id: str, *, tokens: bool) -> None:
    """One document whole. Raises DataError where no document has the id."""
    dataset = Dataset.open(folder)
    split, name, number = find_document(dataset, id)
    source = next(source for source in dataset.split(split) if source.name == name)
    _show(Encoder.open(dataset.tokenizer_path), fim_of_dataset(dataset), source, number, tokens=tokens, whole=True)


def _show(encoder: Encoder, fim: Fim | None, source: TokenSource, number: int, *, tokens: bool, whole: bool) -> None:
    shard, inside = source.find(number)
    file, record = shard.origin(inside)
    stored = shard.document(inside)
    ids = stored.tolist()
    print(f"\n--- {source.name} {source.split} {number}: {shard.document_id(inside)}, {file}:{record}, {len(ids):,} tokens")
    if tokens:
        shown = ids if whole else ids[:_SHOWN_TOKENS]
        print(" ".join(f"{id}:{encoder.decode([id])!r}" for id in shown) + (" ..." if len(shown) < len(ids) else ""))
        return
    of_text = text_tokens(stored, fim).tolist()
    text = encoder.decode(of_text if whole else of_text[:_SHOWN_CHARACTERS])
    print(text if whole or len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ...")
