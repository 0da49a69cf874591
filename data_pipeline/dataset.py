"""A finished dataset folder, opened: its tokenizer's facts, its sources, their documents. Light: numpy only."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.manifest import Manifest, SourceEntry, read_manifest
from data_pipeline.packing import Method
from data_pipeline.pair_plans import PairPlan, PairPlanKey, make_pair_plan, open_pair_plan
from data_pipeline.plans import Plan, PlanKey, SourceKey, make_plan, open_plan
from data_pipeline.shards import Shard, Vocabulary, check_shards
from data_pipeline.storage import is_url, sha256_file

if TYPE_CHECKING:
    from data_pipeline.block_cache import CacheConfig
    from data_pipeline.remote import RemoteDataset


class TokenSource:
    """One source of one split: documents numbered through its shards in order."""

    def __init__(
        self, folder: Path, entry: SourceEntry, *, vocabulary: Vocabulary, manifest_hash: str, remote: RemoteDataset | None = None
    ) -> None:
        self.folder, self.entry, self.remote = folder, entry, remote
        self.name, self.split, self.hash, self.pairs = entry.name, entry.split, entry.hash, entry.pairs
        self.num_documents, self.num_tokens, self.text_bytes = entry.documents, entry.tokens, entry.text_bytes
        self._vocabulary, self._manifest_hash = vocabulary, manifest_hash
        ends = np.cumsum([shard.documents for shard in entry.shards]).tolist()
        self._first_documents: list[int] = [0, *ends]

    @cached_property
    def shards(self) -> list[Shard]:
        """All shards, opened and compared with the manifest. Raises DataError naming one that doesn't belong."""
        shards = []
        names = [entry.file for entry in self.entry.shards]
        found = map(Shard, [self.folder / name for name in names]) if self.remote is None else self.remote.open_shards(names)
        for entry, shard in zip(self.entry.shards, found):
            if (shard.num_documents, shard.num_tokens) != (entry.documents, entry.tokens):
                raise DataError(
                    f"{shard.path}: holds {shard.num_documents} documents and {shard.num_tokens} tokens, the manifest says {entry.documents} and {entry.tokens}. "
                    "Restore the file from a copy, or build the dataset again."
                )
            shards.append(shard)
        check_shards(shards, self._vocabulary)
        for shard, entry in zip(shards, self.entry.shards):
            if entry.checksums not in (None, shard.digest):
                raise DataError(
                    f"{shard.path}: is a sound shard, but not the one that the manifest names. "
                    "Restore the file from a copy, or build the dataset again."
                )
        return shards

    def find(self, document: int) -> tuple[Shard, int]:
        """The shard of a document, and its number there."""
        assert 0 <= document < self.num_documents, (document, self.num_documents)
        shard = bisect_right(self._first_documents, document) - 1
        return self.shards[shard], document - self._first_documents[shard]

    @cached_property
    def _tables(self) -> list[tuple[Shard, Callable[[int], int], Callable[[int], int] | None]]:
        """Each shard, with where a document begins in it and, of pairs, how long its source side is."""
        return [(shard, shard.offsets.item, None if shard.splits is None else shard.splits.item) for shard in self.shards]

    def gather(self, pieces: Sequence[tuple[int, int, int]]) -> np.ndarray:
        """Tokens of (document, first token, number of tokens), one piece after another; one piece at least."""
        tables, first_documents = self._tables, self._first_documents
        found = []
        for document, start, length in pieces:
            number = bisect_right(first_documents, document) - 1
            shard, offset, _ = tables[number]
            first = offset(document - first_documents[number]) + start
            found.append(shard.unchecked_tokens(first, first + length))
        return self._checked(np.concatenate(found), [document for document, _, _ in pieces])

    def gather_pairs(self, pairs: Sequence[int]) -> tuple[np.ndarray, list[int], list[int]]:
        """Tokens of the source sides of pairs, one after another, then those of the target sides; and how many each side of each has."""
        tables, first_documents = self._tables, self._first_documents
        source, target, source_lengths, target_lengths = [], [], [], []
        for pair in pairs:
            shard_number = bisect_right(first_documents, pair) - 1
            shard, offset, split = tables[shard_number]
            assert split is not None, "a shard of pairs"
            number = pair - first_documents[shard_number]
            first, end, middle = offset(number), offset(number + 1), split(number)
            both = shard.unchecked_tokens(first, end)
            source.append(both[:middle])
            target.append(both[middle:])
            source_lengths.append(middle)
            target_lengths.append(end - first - middle)
        return self._checked(np.concatenate(source + target), pairs), source_lengths, target_lengths

    def _checked(self, tokens: np.ndarray, documents: Sequence[int]) -> np.ndarray:
        """The tokens, all in the vocabulary. Raises DataError naming the place of one of these documents that isn't."""
        if int(tokens.max()) >= self._vocabulary.size:
            for shard, number in map(self.find, documents):
                shard.document(number)
        return tokens

    def lengths(self) -> np.ndarray:
        """Tokens of each document, its end included; int64."""
        return np.concatenate([np.diff(shard.offsets) for shard in self.shards]) if self.shards else np.zeros(0, dtype=np.int64)

    def plan(self, sequence_length: int, method: Method) -> Plan:
        """The packing plan; made and kept beside the shards where it is missing or of other data."""
        key = PlanKey(*self._hashed, sequence_length, method)
        folder = self._plan_folder(key)
        return open_plan(folder, key) or make_plan(folder, key, self.lengths())

    def pair_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the source and of the target side of each pair, their ends included; int64."""
        splits = [shard.splits for shard in self.shards]
        source = np.concatenate([split for split in splits if split is not None]) if splits else np.zeros(0, dtype=np.int64)
        return source, self.lengths() - source

    def pair_plan(self, source_length: int, target_length: int) -> PairPlan:
        """The packing plan of pairs, likewise."""
        key = PairPlanKey(*self._hashed, source_length, target_length)
        folder = self._plan_folder(key)
        return open_pair_plan(folder, key) or make_pair_plan(folder, key, *self.pair_lengths())

    @property
    def _hashed(self) -> tuple[str, str, str, str]:
        """As SourceKey begins."""
        return self.name, self.split, self.hash, self._manifest_hash

    def _plan_folder(self, key: SourceKey) -> Path:
        """Where plans are kept; of a dataset in object storage, this one is fetched if it is there."""
        if self.remote is not None:
            self.remote.fetch_plan(key.file_name)
        return self.folder / "packing"


class Dataset:
    """A dataset folder. Opening reads the manifest and checks its hash; shards are opened when rows are. Of one in object storage, `path`
    is where its small files are copied to; `location` is where it is, for messages."""

    def __init__(self, path: Path, manifest: Manifest, manifest_hash: str, *, remote: RemoteDataset | None = None) -> None:
        self.path, self.manifest, self.manifest_hash, self.remote = path, manifest, manifest_hash, remote
        self.location = str(path) if remote is None else remote.remote.url
        self.vocabulary = manifest.vocabulary
        opened = [
            TokenSource(path, entry, vocabulary=manifest.vocabulary, manifest_hash=manifest_hash, remote=remote)
            for entry in manifest.sources
        ]
        self.sources = [source for source in opened if source.split == "train"]
        self.validation = [source for source in opened if source.split == "validation"]

    @classmethod
    def open(cls, path: str | Path, *, cache: CacheConfig | None = None) -> Dataset:
        """A local folder, or a URL of one: then `cache` says where its blocks are kept. Raises DataError if the folder is no finished
        dataset or its manifest was changed."""
        if is_url(str(path)):
            from data_pipeline.remote import RemoteDataset

            remote = RemoteDataset(str(path), cache)
            return cls(remote.folder, *read_manifest(remote.folder), remote=remote)
        folder = Path(path)
        return cls(folder, *read_manifest(folder))

    def split(self, name: str) -> list[TokenSource]:
        return self.sources if name == "train" else self.validation

    @property
    def vocab_size(self) -> int:
        return self.vocabulary.size

    @property
    def eod_id(self) -> int:
        return self.vocabulary.eod_id

    @property
    def bos_id(self) -> int | None:
        return self.vocabulary.bos_id

    @property
    def tokenizer_hash(self) -> str:
        return self.vocabulary.tokenizer_hash

    @cached_property
    def tokenizer_path(self) -> Path:
        """Raises DataError where the file isn't the tokenizer that the shards were made with."""
        path = self.path / "tokenizer.json"
        if not path.is_file() or sha256_file(path) != self.tokenizer_hash:
            raise DataError(f"{path}: is not the tokenizer that the shards were made with. Restore it from a copy.")
        return path

    @property
    def identity(self) -> str:
        """sha256 over the hashes of all its sources: what was trained on."""
        return hashlib.sha256("".join(source.hash for source in [*self.sources, *self.validation]).encode()).hexdigest()

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """UTF-8 bytes that each token id stands for, uint16[vocab]; 0 for special tokens. For bits per byte."""
        path = self.path / "token_bytes.npy"
        try:
            table = np.load(path, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} can't be read ({error}). Restore it from a copy, or build the dataset again.") from None
        digest = hashlib.sha256(table.tobytes()).hexdigest()
        if table.shape != (self.vocab_size,) or digest != self.manifest.tokenizer.get("token_bytes_hash"):
            raise DataError(f"{path} is not the table that the manifest names. Restore it from a copy, or build the dataset again.")
        return table
