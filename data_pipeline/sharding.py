"""Documents to shards: which documents go into which shard, and the workers that encode and write them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from data_pipeline.cache_key import cache_key
from data_pipeline.fim import Fim
from data_pipeline.manifest import SPLITS, ShardEntry
from data_pipeline.pool import Report
from data_pipeline.shards import Encoded, Shard, Vocabulary, write_shard
from data_pipeline.storage import atomic_write, sha256_file
from data_pipeline.store import DocumentStore, Part
from data_pipeline.tokenizer.encode import Encoder

MAX_SHARD_BYTES = 256 << 20  # of text; a killed build loses at most the shards under way
MIN_SHARD_BYTES = 2 << 20
SHARDS_A_SOURCE = 16  # that many, while they stay within the limits: enough to keep workers busy
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class ShardJob:
    """One shard to write: which documents of which parts, in order. The file is named by everything it depends on."""

    source: str
    split: str
    name: str
    picks: tuple[tuple[str, np.ndarray], ...]
    text_bytes: int
    vocabulary: Vocabulary
    tokenizer_path: str
    is_bytes: bool
    can_cut: bool
    path: Path
    fim: Fim | None = None
    pairs: bool = False

    @property
    def done_path(self) -> Path:
        """Written last: counts and hash of the shard."""
        return self.path.with_suffix(".json")


def plan_shards(
    store: DocumentStore,
    kept: np.ndarray,
    held_out: np.ndarray,
    *,
    sources: Sequence[str],
    vocabulary: Vocabulary,
    tokenizer_path: Path,
    tokenizer_type: str,
    folder: Path,
    fim: Fim | None = None,
    fim_sources: Sequence[str] | None = None,
) -> list[ShardJob]:
    """Jobs for every source and split, in order; the cuts depend on the documents alone."""
    lengths = store.lengths()
    jobs: list[ShardJob] = []
    for source in sources:
        of_source = np.zeros(store.num_documents, dtype=bool)
        for number, part in enumerate(store.parts):
            if store.source(number) == source:
                of_source[store.first(number) : store.first(number) + part.num_documents] = True
        for split in SPLITS:
            applied = fim if split == "train" and (fim_sources is None or source in fim_sources) else None
            rearranged = [] if applied is None else [asdict(applied)]
            numbers = np.flatnonzero(of_source & kept & (held_out if split == "validation" else ~held_out))
            for place, chosen in enumerate(_cut(numbers, lengths[numbers])):
                suffix = "" if split == "train" else f".{split}"
                picks = tuple(_picks(store, chosen))
                digests = [[Path(part).stem, hashlib.sha256(inside.tobytes()).hexdigest()] for part, inside in picks]
                facts = [vocabulary.tokenizer_hash, tokenizer_type, vocabulary.bos_id, vocabulary.eod_id]
                key = cache_key("encode", *facts, source, split, digests, *rearranged)
                jobs.append(
                    ShardJob(
                        source=source,
                        split=split,
                        name=f"{source}{suffix}-{place:05d}.bin",
                        picks=picks,
                        text_bytes=int(lengths[chosen].sum()),
                        vocabulary=vocabulary,
                        tokenizer_path=str(tokenizer_path),
                        is_bytes=tokenizer_type == "bytes",
                        can_cut=tokenizer_type != "pretrained",
                        path=folder / f"{key}.bin",
                        fim=applied,
                        pairs=any(Part(part).is_pairs for part, _ in picks[:1]),
                    )
                )
    return jobs


def _cut(numbers: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Runs of documents of about equal size, at least one document each."""
    if not numbers.size:
        return []
    total = int(lengths.sum())
    target = min(max(total // SHARDS_A_SOURCE + 1, MIN_SHARD_BYTES), MAX_SHARD_BYTES)
    bucket = (np.cumsum(lengths) - 1).clip(min=0) // target
    return np.split(numbers, np.flatnonzero(np.diff(bucket)) + 1)


def _picks(store: DocumentStore, numbers: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    for number, part in enumerate(store.parts):
        first = store.first(number)
        inside = numbers[np.searchsorted(numbers, first) : np.searchsorted(numbers, first + part.num_documents)] - first
        if inside.size:
            yield str(part.path), inside


def make_shard(job: ShardJob, report: Report) -> ShardEntry:
    """In a worker: write the shard, unless it is there and its bytes are what they were."""
    if job.done_path.exists() and job.path.exists():
        done = json.loads(job.done_path.read_text())
        if sha256_file(job.path) == done["hash"]:
            report(job.text_bytes)
            return ShardEntry(**{**done, "file": f"shards/{job.name}", "checksums": Shard(job.path).digest})
    encoder = _encoder(job.tokenizer_path, job.is_bytes, job.can_cut)
    num_tokens = num_documents = text_bytes = 0
    with write_shard(job.path, source=job.source, split=job.split, vocabulary=job.vocabulary, pairs=job.pairs) as shard:
        for part, batch in _batches(job.picks):
            texts = [side for number, text in zip(batch, part.texts(batch)) for side in part.sides(number, text)]
            ids = [part.id(number) for number in batch]
            encoded = encoder.encode_batch(texts) if job.fim is None else job.fim.encode_batch(encoder, texts, ids)
            firsts, targets = (encoded[::2], encoded[1::2]) if job.pairs else (encoded, [None] * len(encoded))
            for number, tokens, target in zip(batch, firsts, targets):
                file, record = part.origin(number)
                length = int(part.offsets[number + 1] - part.offsets[number])
                shard.add(Encoded(id=part.id(number), tokens=tokens, text_bytes=length, file=file, record=record, target=target))
                num_tokens += tokens.size + 1 + (target.size + 1 if target is not None else 0)
                num_documents, text_bytes = num_documents + 1, text_bytes + length
                report(length)
    entry = ShardEntry(
        file=f"shards/{job.name}",
        documents=num_documents,
        tokens=num_tokens,
        text_bytes=text_bytes,
        hash=sha256_file(job.path),
        checksums=Shard(job.path).digest,
    )
    with atomic_write(job.done_path) as file_:
        file_.write(json.dumps(asdict(entry)).encode())
    return entry


@lru_cache(maxsize=1)
def _encoder(path: str, is_bytes: bool, can_cut: bool) -> Encoder:
    return Encoder(Path(path).read_text(encoding="utf-8"), is_bytes=is_bytes, can_cut=can_cut)


def _batches(picks: Sequence[tuple[str, np.ndarray]]) -> Iterator[tuple[Part, list[int]]]:
    """Documents of one part at a time, about _BATCH_BYTES of text together."""
    for path, numbers in picks:
        part = Part(path)
        batch: list[int] = []
        held = 0
        for number in numbers.tolist():
            batch.append(number)
            held += int(part.offsets[number + 1] - part.offsets[number])
            if held >= _BATCH_BYTES:
                yield part, batch
                batch, held = [], 0
        if batch:
            yield part, batch
