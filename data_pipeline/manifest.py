"""`manifest.json`: what a dataset folder holds, with its own hash beside it in `manifest.sha256`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.shards import Vocabulary
from data_pipeline.storage import atomic_write

FORMAT_VERSION = 1
SPLITS = ("train", "validation")
MANIFEST_FILES = ("manifest.json", "manifest.sha256")  # written in this order, after all else


@dataclass(frozen=True)
class ShardEntry:
    """One shard: its file relative to the folder, counts, the sha256 of the file, and the hash of its checksums, by which opening it tells
    it from another; None in a manifest from before there was one."""

    file: str
    documents: int
    tokens: int
    text_bytes: int
    hash: str
    checksums: str | None = None


@dataclass(frozen=True)
class SourceEntry:
    """One source in one split, in shard order. `hash` is its identity: the tokens, their order and the tokenizer. `pairs`: its
    documents are aligned pairs."""

    name: str
    split: str
    shards: tuple[ShardEntry, ...]
    hash: str
    pairs: bool = False

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def text_bytes(self) -> int:
        return sum(shard.text_bytes for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """The whole of manifest.json; nothing in it depends on when, where or with how many workers it was built."""

    vocabulary: Vocabulary
    tokenizer: dict[str, Any]
    dtype: str
    sources: tuple[SourceEntry, ...]
    ledger: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def source(self, name: str, split: str) -> SourceEntry | None:
        return next((entry for entry in self.sources if (entry.name, entry.split) == (name, split)), None)


def source_hash(name: str, split: str, shards: tuple[ShardEntry, ...], *, tokenizer_hash: str) -> str:
    text = json.dumps([FORMAT_VERSION, name, split, tokenizer_hash, [shard.hash for shard in shards]])
    return hashlib.sha256(text.encode()).hexdigest()


def to_json(manifest: Manifest) -> str:
    sources = [
        {
            "name": entry.name,
            "split": entry.split,
            "documents": entry.documents,
            "tokens": entry.tokens,
            "text_bytes": entry.text_bytes,
            "hash": entry.hash,
            **({"pairs": True} if entry.pairs else {}),
            "shards": [{key: value for key, value in asdict(shard).items() if value is not None} for shard in entry.shards],
        }
        for entry in manifest.sources
    ]
    tree = {
        "format_version": FORMAT_VERSION,
        "tokenizer": {
            **manifest.tokenizer,
            "hash": manifest.vocabulary.tokenizer_hash,
            "vocab_size": manifest.vocabulary.size,
            "eod_id": manifest.vocabulary.eod_id,
            "bos_id": manifest.vocabulary.bos_id,
        },
        "dtype": manifest.dtype,
        "sources": sources,
        "ledger": manifest.ledger,
        "config": manifest.config,
    }
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def write_manifest(folder: Path, manifest: Manifest) -> str:
    """Write it and its hash; returns the hash. The hash goes last: a folder without a matching one is not finished."""
    text = to_json(manifest).encode()
    digest = hashlib.sha256(text).hexdigest()
    with atomic_write(folder / "manifest.json") as file:
        file.write(text)
    with atomic_write(folder / "manifest.sha256") as file:
        file.write(f"{digest}  manifest.json\n".encode())
    return digest


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest and its hash. Raises DataError if the folder is no finished dataset, or the manifest was changed."""
    path, hash_path = folder / "manifest.json", folder / "manifest.sha256"
    if not path.is_file() or not hash_path.is_file():
        why = (
            "does not exist"
            if not folder.exists()
            else f"has no {path.name if not path.is_file() else hash_path.name}: its build did not finish"
        )
        raise DataError(f"{folder} is not a dataset: it {why}. Make one with `mlite data build CONFIG`, or correct the path.")
    raw = path.read_bytes()
    digest = hashlib.sha256(raw).hexdigest()
    if hash_path.read_text().split()[:1] != [digest]:
        raise DataError(
            f"{path} does not match {hash_path.name}: it was changed or damaged after the build. Restore both, or build the dataset again."
        )
    tree = json.loads(raw)
    if tree["format_version"] != FORMAT_VERSION:
        raise DataError(
            f"{path}: format version {tree['format_version']}, this program reads version {FORMAT_VERSION}. Build the dataset again."
        )
    tokenizer = dict(tree["tokenizer"])
    vocabulary = Vocabulary(
        size=tokenizer.pop("vocab_size"),
        eod_id=tokenizer.pop("eod_id"),
        bos_id=tokenizer.pop("bos_id"),
        tokenizer_hash=tokenizer.pop("hash"),
    )
    sources = tuple(
        SourceEntry(
            name=entry["name"],
            split=entry["split"],
            shards=tuple(ShardEntry(**shard) for shard in entry["shards"]),
            hash=entry["hash"],
            pairs=entry.get("pairs", False),
        )
        for entry in tree["sources"]
    )
    return Manifest(
        vocabulary=vocabulary, tokenizer=tokenizer, dtype=tree["dtype"], sources=sources, ledger=tree["ledger"], config=tree["config"]
    ), digest
