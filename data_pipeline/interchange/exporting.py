"""A dataset folder to other people's token files: the same ids in the same order, documents one after another."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.errors import ConfigError, DataError, Fault
from data_pipeline.interchange.importing import FORMATS
from data_pipeline.interchange.megatron import index_bytes, megatron_dtype
from data_pipeline.interchange.streams import llmc_header
from data_pipeline.manifest import SPLITS
from data_pipeline.storage import atomic_folder

Ends = Literal["auto", "keep", "drop"]
LLMC_FILE_TOKENS = 100_000_000
_CHUNK = 1 << 22


def export_tokens(
    dataset: Dataset, output: str | Path, *, format: str, ends: str = "auto", llmc_file_tokens: int = LLMC_FILE_TOKENS
) -> list[dict[str, Any]]:
    """Write token files into a new folder, with `tokenizer.json` and `export.json` beside them; returns what each file holds.

    megatron   SOURCE.bin and .idx, SOURCE.validation.bin and .idx        npy   SOURCE.npy, SOURCE.validation.npy
    nanogpt    train.bin and val.bin, sources one after another           llmc  SOURCE_train_000000.bin, SOURCE_val_000000.bin, ...
    `ends`: auto keeps the end of every document but those that an import added; keep, drop: all of them.
    Raises ConfigError for a format that can't hold the ids or an output that exists, DataError for pairs.
    """
    output = Path(output)
    if format not in FORMATS:
        raise ConfigError([Fault("--format", format, f"one of {', '.join(FORMATS)}")])
    if ends not in ("auto", "keep", "drop"):
        raise ConfigError([Fault("--ends", ends, "auto, keep or drop")])
    if format in ("nanogpt", "llmc") and dataset.vocab_size > 1 << 16:
        raise ConfigError(
            [Fault("--format", format, "a format that holds ids above 65535", f"{dataset.vocab_size} ids need megatron or npy")]
        )
    if pairs := [source.name for source in dataset.sources if source.pairs]:
        raise DataError(f"{dataset.path}: {', '.join(pairs)} has aligned pairs, and none of these formats can tell one side from the other")
    if output.exists():
        raise ConfigError([Fault("OUTPUT", str(output), "a folder that doesn't exist yet", "choose another, or move this one away")])
    with atomic_folder(output) as folder:
        files: list[dict[str, Any]] = []
        for split in SPLITS:
            sources = [source for source in dataset.split(split) if source.num_documents]
            groups = [sources] if format == "nanogpt" and sources else [[source] for source in sources]
            for group in groups:
                runs = [_Run(dataset, source, ends) for source in group]
                files += _write(folder, group[0].name, split, runs, format=format, dataset=dataset, llmc_file_tokens=llmc_file_tokens)
        shutil.copyfile(dataset.tokenizer_path, folder / "tokenizer.json")
        about = {
            "format": format,
            "dataset": dataset.identity,
            "vocab_size": dataset.vocab_size,
            "eod_id": dataset.eod_id,
            "bos_id": dataset.bos_id,
            "tokenizer_hash": dataset.tokenizer_hash,
            "files": files,
        }
        (folder / "export.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    return files


class _Run:
    """The ids of a source in order, without the ends that are to be left out."""

    def __init__(self, dataset: Dataset, source: TokenSource, ends: str) -> None:
        self.source = source
        dropped = np.zeros(source.num_documents, dtype=bool)
        if ends == "drop":
            dropped[:] = True
        elif ends == "auto":
            added = dataset.manifest.config.get("imported", {}).get(source.name, {}).get(source.split, {}).get("ends_added", [])
            dropped[:] = True if added == "all" else dropped
            dropped[[] if added == "all" else added] = True
        self.lengths = source.lengths() - dropped
        self._dropped = dropped

    def chunks(self) -> Iterator[np.ndarray]:
        first = 0
        for shard in self.source.shards:
            here = self._dropped[first : first + shard.num_documents]
            places = shard.offsets[1:][here] - 1
            first += shard.num_documents
            for start in range(0, shard.num_tokens, _CHUNK):
                stop = min(start + _CHUNK, shard.num_tokens)
                tokens = shard.tokens(start, stop)
                yield np.delete(tokens, places[np.searchsorted(places, start) : np.searchsorted(places, stop)] - start)


def _write(
    folder: Path, name: str, split: str, runs: Sequence[_Run], *, format: str, dataset: Dataset, llmc_file_tokens: int
) -> list[dict[str, Any]]:
    lengths = np.concatenate([run.lengths for run in runs])
    total = int(lengths.sum())
    chunks = (chunk for run in runs for chunk in run.chunks())
    if not total:
        raise DataError(f"{dataset.path}: {name} {split} has no ids left to write")
    if format == "llmc":
        short = "train" if split == "train" else "val"
        return list(_llmc_files(folder, f"{name}_{short}", chunks, total=total, file_tokens=llmc_file_tokens))
    suffix = "" if split == "train" else f".{split}"
    if format == "nanogpt":
        path, dtype, head = folder / ("train.bin" if split == "train" else "val.bin"), np.dtype("<u2"), b""
    elif format == "megatron":
        path, dtype, head = folder / f"{name}{suffix}.bin", megatron_dtype(dataset.vocab_size), b""
    else:
        path, dtype = folder / f"{name}{suffix}.npy", np.dtype(dataset.manifest.dtype)
        head = _npy_header(total, dtype)
    files = [_file(path, chunks, dtype=dtype, head=head, num_documents=lengths.size)]
    if format == "megatron":
        raw = index_bytes(lengths, dtype)
        path.with_suffix(".idx").write_bytes(raw)
        files.append({"name": path.with_suffix(".idx").name, "sha256": hashlib.sha256(raw).hexdigest()})
    return files


def _file(
    path: Path, chunks: Iterator[np.ndarray], *, dtype: np.dtype[Any], head: bytes = b"", num_documents: int | None
) -> dict[str, Any]:
    digest, num_tokens = hashlib.sha256(), 0
    with open(path, "wb") as file:
        _put(file, digest, head)
        for chunk in chunks:
            _put(file, digest, chunk.astype(dtype, copy=False).tobytes())
            num_tokens += chunk.size
    counts = {} if num_documents is None else {"documents": num_documents}
    return {"name": path.name, "dtype": dtype.name, "tokens": num_tokens, **counts, "sha256": digest.hexdigest()}


def _put(file: IO[bytes], digest: Any, data: bytes) -> None:
    file.write(data)
    digest.update(data)


def _llmc_files(folder: Path, name: str, chunks: Iterator[np.ndarray], *, total: int, file_tokens: int) -> Iterator[dict[str, Any]]:
    """Files of `file_tokens` ids, the last one shorter; documents run on from one into the next."""
    held: list[np.ndarray] = []
    for number, first in enumerate(range(0, total, file_tokens)):
        wanted = min(file_tokens, total - first)
        while sum(part.size for part in held) < wanted:
            held.append(next(chunks))
        ids = np.concatenate(held)
        held = [ids[wanted:]]
        path = folder / f"{name}_{number:06d}.bin"
        yield _file(path, iter([ids[:wanted]]), dtype=np.dtype("<u2"), head=llmc_header(wanted), num_documents=None)


def _npy_header(num_tokens: int, dtype: np.dtype[Any]) -> bytes:
    import io

    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype.str, "fortran_order": False, "shape": (num_tokens,)})
    return buffer.getvalue()
