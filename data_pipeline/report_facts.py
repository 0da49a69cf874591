"""All that the report of a dataset shows, as plain values: `report.json`, of which `report.html` is a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.dedup.stage import REASONS, Duplicates, removal_line
from data_pipeline.earlier import Earlier
from data_pipeline.fim import document_text, fim_of_dataset, text_tokens
from data_pipeline.plans import read_plan_facts
from data_pipeline.read_pairs import SIDES
from data_pipeline.source_loss import WARNED_SHARE, source_losses
from data_pipeline.step import Ledger
from data_pipeline.store import DocumentStore
from data_pipeline.summary import STAGE_WORDS, losses
from data_pipeline.tokenizer.encode import Encoder

NUM_CLUSTERS = 8
NUM_COPIES = 3  # of a cluster that are shown
NUM_EVIDENCE = 12
_CHARS = 240
_JACCARD_STEPS = 20


def dataset_facts(dataset: Dataset) -> dict[str, Any]:
    """What the dataset folder alone says: books, sources, packing, samples."""
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    return {
        "funnel": funnel(ledger),
        "lost": lost(ledger),
        "source_loss": source_loss(ledger),
        "sources": [source_facts(source) for source in [*dataset.sources, *dataset.validation]],
        "tokenizer": {**dataset.manifest.tokenizer, "vocab_size": dataset.vocab_size, "dtype": np.dtype(dataset.manifest.dtype).name},
        "packing": read_plan_facts(dataset.path / "packing") if (dataset.path / "packing").is_dir() else [],
        "books": dataset.manifest.ledger,
        "samples": samples(dataset),
        "config": dataset.manifest.config,
    }


def funnel(ledger: Ledger) -> list[dict[str, Any]]:
    """Documents and bytes as they came, and as each stage passed them on."""
    stages = list(ledger.stages)
    if not stages:
        return []
    first = ledger.total(stages[0]).read
    steps: list[dict[str, Any]] = [{"stage": "input", "words": "in the files", "documents": first.documents, "bytes": first.bytes}]
    for stage in stages:
        written = ledger.total(stage).written
        steps.append({"stage": stage, "words": STAGE_WORDS.get(stage, stage), "documents": written.documents, "bytes": written.bytes})
    return steps


def lost(ledger: Ledger) -> list[dict[str, Any]]:
    """Every reason for which documents went, those with most documents first, by source."""
    rows = []
    for loss in losses(ledger):
        by_source = {}
        for source, tally in sorted(ledger.stages[loss.stage].items()):
            count = (tally.errors if loss.is_error else tally.dropped).get(loss.reason)
            if count is not None:
                by_source[source] = count.documents
        rows.append(
            {
                "stage": loss.stage,
                "reason": loss.reason,
                "unreadable": loss.is_error,
                "documents": loss.count.documents,
                "bytes": loss.count.bytes,
                "by_source": by_source,
                "examples": list(loss.examples),
            }
        )
    return sorted(rows, key=lambda row: (-row["documents"], -row["bytes"], row["stage"], row["reason"]))


def source_loss(ledger: Ledger) -> dict[str, Any]:
    """The share that each source lost, and whether that is an alarm."""
    chain = [stage for stage in ledger.stages if stage != "encode"]
    shares = [
        {"source": source, "share": round(share, 6), "alarm": share > WARNED_SHARE, "why": why}
        for source, share, why in (source_losses(ledger, chain) if chain else [])
    ]
    return {"alarm_above": WARNED_SHARE, "sources": shares}


def source_facts(source: TokenSource) -> dict[str, Any]:
    lengths = source.lengths()
    names = ("shortest", "10 %", "median", "90 %", "99 %", "longest")
    quantiles = np.quantile(lengths, [0, 0.1, 0.5, 0.9, 0.99, 1]).astype(int).tolist() if lengths.size else [0] * len(names)
    return {
        "name": source.name,
        "split": source.split,
        "documents": source.num_documents,
        "tokens": source.num_tokens,
        "text_bytes": source.text_bytes,
        "shards": len(source.entry.shards),
        "hash": source.hash,
        "pairs": source.pairs,
        "tokens_a_document": dict(zip(names, quantiles)),
        "lengths": length_bins(lengths),
        **({"sides": dict(zip(SIDES, map(length_bins, source.pair_lengths())))} if source.pairs else {}),
    }


def length_bins(lengths: np.ndarray) -> list[dict[str, int]]:
    """Documents and their tokens by length in tokens, the end of document included; each bin from a power of 2 to the next."""
    if not lengths.size:
        return []
    bins = np.floor(np.log2(lengths)).astype(np.int64)
    documents = np.bincount(bins)
    tokens = np.bincount(bins, weights=lengths)
    return [
        {"from": 1 << number, "to": (2 << number) - 1, "documents": int(documents[number]), "tokens": int(tokens[number])}
        for number in range(int(bins.min()), documents.size)
    ]


def samples(dataset: Dataset) -> list[dict[str, Any]]:
    """The first, middle and last document of each training source, decoded from the shards."""
    encoder, fim = Encoder.open(dataset.tokenizer_path), fim_of_dataset(dataset)
    shown = []
    for source in dataset.sources:
        for number in sorted({0, source.num_documents // 2, source.num_documents - 1}):
            shard, inside = source.find(number)
            file, record = shard.origin(inside)
            stored = shard.document(inside)
            text = document_text(stored, encoder, fim) if source.pairs else encoder.decode(text_tokens(stored, fim)[:200].tolist())
            shown.append({"source": source.name, "id": shard.document_id(inside), "file": file, "record": record, "text": text[:600]})
    return shown


# ------------------------------------------------------------------------------------- what only a build knows


def duplicate_facts(store: DocumentStore, duplicates: Duplicates, earlier: Sequence[Earlier]) -> dict[str, Any]:
    """Counts, the similarities of what went as near duplicates, and the largest clusters with examples. A cluster is a document that
    stayed with those that went for it."""
    near = duplicates.removals[duplicates.removals["reason"] == REASONS.index("near")]["jaccard"]
    kept, counts = np.unique(duplicates.removals["kept"], return_counts=True)
    largest = np.argsort(-counts, kind="stable")[:NUM_CLUSTERS]
    sizes, clusters = np.unique(np.floor(np.log2(counts + 1)).astype(np.int64), return_counts=True)
    return {
        "stats": duplicates.stats,
        "clusters": int(kept.size),
        "cluster_sizes": [{"from": 1 << s, "to": (2 << s) - 1, "clusters": n} for s, n in zip(sizes.tolist(), clusters.tolist())],
        "jaccard_of_near": _similarity_bins(near),
        "largest_clusters": [_cluster(store, duplicates, earlier, int(kept[place]), int(counts[place])) for place in largest],
    }


def _similarity_bins(values: np.ndarray) -> list[dict[str, float]]:
    counts = np.bincount(np.minimum((values * _JACCARD_STEPS).astype(np.int64), _JACCARD_STEPS - 1), minlength=_JACCARD_STEPS)
    first = int(np.flatnonzero(counts)[0]) if values.size else _JACCARD_STEPS
    return [
        {"from": number / _JACCARD_STEPS, "to": (number + 1) / _JACCARD_STEPS, "documents": int(counts[number])}
        for number in range(first, _JACCARD_STEPS)
    ]


def _cluster(store: DocumentStore, duplicates: Duplicates, earlier: Sequence[Earlier], kept: int, num_removed: int) -> dict[str, Any]:
    """The document that stayed, and some of those that went; of these the text from a little before the first difference on, and
    under "in_kept" what the one that stayed has there."""
    removals = duplicates.removals[duplicates.removals["kept"] == kept][:NUM_COPIES]
    lines = [removal_line(store, removal, earlier) for removal in removals.tolist()]
    text = store.texts_of([kept])[0] if kept >= 0 else None
    copies = []
    for line, removed in zip(lines, removals["removed"].tolist()):
        theirs = store.texts_of([removed])[0]
        begin = max(0, _same_start(text, theirs) - 60) if text is not None and theirs != text else 0
        copies.append(
            {
                **line["removed"],
                "same_text": text == theirs,
                "reason": line["reason"],
                "jaccard": line["jaccard"],
                "from_character": begin,
                "text": _shown(theirs[begin:]),
                "in_kept": _shown((text or "")[begin:]) if begin else None,
            }
        )
    return {"kept": {**lines[0]["kept"], "text": None if text is None else _shown(text)}, "removed": num_removed, "examples": copies}


def _same_start(a: str, b: str) -> int:
    return next((place for place, (one, other) in enumerate(zip_longest(a, b)) if one != other), len(a))


def _shown(text: str) -> str:
    return text if len(text) <= _CHARS else text[:_CHARS] + " ..."


def contamination_facts(lines: Iterable[dict[str, Any]], summary: Sequence[str]) -> dict[str, Any]:
    """By evaluation: items found and documents that hold them; and the first lines of evidence of each."""
    items: dict[str, set[str]] = {}
    documents: dict[str, set[str]] = {}
    shown: list[dict[str, Any]] = []
    taken: Counter[str] = Counter()
    total = 0
    for line in lines:
        total += 1
        name = line["evaluation"]
        items.setdefault(name, set()).add(line["item"])
        documents.setdefault(name, set()).add(line["document"]["id"])
        if taken[name] < NUM_EVIDENCE:
            taken[name] += 1
            shown.append({**line, "text": _shown(line["text"])})
    found = [{"evaluation": name, "items": len(items[name]), "documents": len(documents[name])} for name in sorted(items)]
    return {"summary": list(summary), "found": found, "lines": total, "evidence": sorted(shown, key=lambda line: line["evaluation"])}
