"""A dataset, for people to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.fim import Fim, document_text, fim_of_dataset, text_tokens
from data_pipeline.notebook import TrainingRow, open_dataset
from data_pipeline.packing import Method
from data_pipeline.pair_loader import PairRowSource
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
        _plan_words(facts) + ("" if facts["manifest_hash"] == dataset.manifest_hash else ", of other data: it will be made again")
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


def _plan_words(facts: dict[str, Any]) -> str:
    shape = f"S={facts['sequence_length']}" if "sequence_length" in facts else f"S={facts['source_length']}, T={facts['target_length']}"
    return f"{facts['source']} {facts['split']}, {shape}, {facts['method']}: {facts['num_rows']:,} rows"


def show_document(folder: Path, id: str, *, tokens: bool) -> None:
    """One document whole. Raises DataError where no document has the id."""
    dataset = Dataset.open(folder)
    split, name, number = find_document(dataset, id)
    source = next(source for source in dataset.split(split) if source.name == name)
    _show(Encoder.open(dataset.tokenizer_path), fim_of_dataset(dataset), source, number, tokens=tokens, whole=True)


def show_rows(folder: Path, *, number: int, sequence_length: int, packing: Method, seed: int, tokens: bool) -> None:
    """The first `number` rows of a run with this seed: what stands in each, piece by piece, and where it came from."""
    rows = open_dataset(folder).rows(sequence_length, packing=packing, seed=seed)
    for sample in range(min(number, len(rows))):
        _show_row(rows[sample], sequence_length, tokens=tokens)


def _show_row(row: TrainingRow, sequence_length: int, *, tokens: bool) -> None:
    padding = sequence_length - row.arrays.num_targets
    print(
        f"\n=== sample {row.sample}, {row.source}: {row.arrays.num_targets:,} targets in {len(row.pieces)} pieces, {padding:,} of padding"
    )
    for first, piece in zip(row.arrays.segment_starts.tolist(), row.pieces):
        document, end = piece.document, piece.start + piece.tokens.size
        part = "" if piece.tokens.size == document.tokens.size else f", tokens {piece.start:,} to {end - 1:,} of {document.tokens.size:,}"
        print(f"--- {first} to {first + piece.tokens.size - 1}: {document.id}, {document.file}:{document.record}{part}")
        if tokens:
            print(" ".join(f"{id}:{document.encoder.decode([id])!r}" for id in piece.tokens.tolist()))
        else:
            print(piece.text)


def show_pair_rows(folder: Path, *, number: int, source_length: int, target_length: int, seed: int, tokens: bool) -> None:
    """The first `number` rows of pairs of a run with this seed: both sides of each pair, where they stand and where they came from."""
    dataset = Dataset.open(folder)
    rows = PairRowSource.open([(dataset, 1.0, None)], source_length=source_length, target_length=target_length, seed=seed)
    encoder = Encoder.open(dataset.tokenizer_path)
    for sample in range(min(number, len(rows))):
        row, place = rows[sample], rows.place(sample)
        padding = source_length - row.num_source_tokens, target_length - row.num_targets
        print(f"\n=== sample {sample}, {place.source.name}: {row.num_pairs} pairs, {padding[0]:,} and {padding[1]:,} of padding")
        for pair, at, to in zip(place.plan.pairs(place.row).tolist(), row.source_starts.tolist(), row.target_starts.tolist()):
            shard, inside = place.source.find(pair)
            file, record = shard.origin(inside)
            one, other = shard.sides(inside)
            spans = f"source {at} to {at + one.size - 1}, target {to} to {to + other.size - 1}"
            print(f"--- {spans}: {shard.document_id(inside)}, {file}:{record}")
            for side in (one, other):
                print(" ".join(f"{id}:{encoder.decode([id])!r}" for id in side.tolist()) if tokens else encoder.decode(side[:-1].tolist()))


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
    if source.pairs:
        print(document_text(stored, encoder, fim))
        return
    of_text = text_tokens(stored, fim).tolist()
    text = encoder.decode(of_text if whole else of_text[:_SHOWN_CHARACTERS])
    print(text if whole or len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ...")
