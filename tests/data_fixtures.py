"""Small dataset folders, written in milliseconds by the same writers as the real build."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from data_pipeline.dataset import Dataset
from data_pipeline.manifest import Manifest, ShardEntry, SourceEntry, source_hash, write_manifest
from data_pipeline.shards import Encoded, Shard, Vocabulary, token_dtype, write_shard
from data_pipeline.storage import sha256_file
from data_pipeline.tokenizer.byte_level import EOD_TOKEN, bytes_tokenizer_json

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "it",
    "was",
    "for",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
]
Documents = Sequence[str] | Sequence[Sequence[int]] | Sequence[np.ndarray]


def tiny_texts(num_documents: int = 40, *, seed: int = 0, max_words: int = 120) -> list[str]:
    """English-looking documents of very unequal length; learnable, since words repeat."""
    rng = np.random.default_rng(seed)
    return [f"{n}: " + " ".join(rng.choice(WORDS, size=int(rng.integers(1, max_words)))) for n in range(num_documents)]


def tiny_dataset(
    folder: Path,
    documents: Documents | Mapping[str, Documents] | None = None,
    *,
    vocab: int = 257,
    num_validation: int = 4,
    documents_per_shard: int = 16,
) -> Dataset:
    """A finished dataset under `folder`, opened. `documents`: texts (encoded as bytes, vocab 257) or lists of ids below
    vocab - 1, either a list (source "tiny") or a mapping from source names. The last `num_validation` of each source are
    held out. The end-of-document id is vocab - 1."""
    documents = tiny_texts() if documents is None else documents
    sources = dict(documents) if isinstance(documents, Mapping) else {"tiny": documents}
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(bytes_tokenizer_json(), encoding="utf-8")
    table = np.array([1] * min(256, vocab - 1) + [1] * max(0, vocab - 257) + [0], dtype=np.uint16)
    np.save(folder / "token_bytes.npy", table)
    vocabulary = Vocabulary(size=vocab, eod_id=vocab - 1, bos_id=None, tokenizer_hash=sha256_file(tokenizer))
    entries: list[SourceEntry] = []
    for name, texts in sources.items():
        encoded = [_encoded(name, number, document) for number, document in enumerate(texts)]
        cut = len(encoded) - num_validation
        for split, part in (("train", encoded[:cut]), ("validation", encoded[cut:])):
            if part:
                entries.append(_write_source(folder, name, split, part, vocabulary=vocabulary, documents_per_shard=documents_per_shard))
    facts = {"type": "bytes", "eod_token": EOD_TOKEN, "token_bytes_hash": hashlib.sha256(table.tobytes()).hexdigest()}
    manifest = Manifest(vocabulary=vocabulary, tokenizer=facts, dtype=token_dtype(vocab - 1).str, sources=tuple(entries))
    write_manifest(folder, manifest)
    return Dataset.open(folder)


def _encoded(source: str, number: int, document: str | Sequence[int] | np.ndarray) -> Encoded:
    if isinstance(document, str):
        tokens = np.frombuffer(document.encode(), dtype=np.uint8)
    else:
        tokens = np.asarray(document, dtype=np.int64)
    digest = hashlib.sha256(f"{source} {number}".encode()).hexdigest()[:32]
    return Encoded(id=digest, tokens=tokens, text_bytes=int(tokens.size), file=f"{source}.jsonl", record=number + 1)


def _write_source(
    folder: Path, name: str, split: str, documents: Sequence[Encoded], *, vocabulary: Vocabulary, documents_per_shard: int
) -> SourceEntry:
    shards = []
    for number, first in enumerate(range(0, len(documents), documents_per_shard)):
        file = f"shards/{name}{'' if split == 'train' else '.' + split}-{number:05d}.bin"
        part = documents[first : first + documents_per_shard]
        with write_shard(folder / file, source=name, split=split, vocabulary=vocabulary) as shard:
            for document in part:
                shard.add(document)
        tokens = sum(len(document.tokens) + 1 for document in part)
        text_bytes = sum(document.text_bytes for document in part)
        path = folder / file
        shards.append(ShardEntry(file, len(part), tokens, text_bytes, hash=sha256_file(path), checksums=Shard(path).digest))
    digest = source_hash(name, split, tuple(shards), tokenizer_hash=vocabulary.tokenizer_hash)
    return SourceEntry(name=name, split=split, shards=tuple(shards), hash=digest)
