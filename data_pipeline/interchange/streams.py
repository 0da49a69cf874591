"""Token files without an index: one run of ids, in which the end-of-document id alone says where documents end.

nanogpt  ids and nothing else, uint16 unless told
llmc     a header of 256 int32 (20240520, 1, the number of ids, zeros), then uint16; documents run on into the next file
npy      numpy's own format with one dimension; without numpy's header (as dolma writes) the dtype must be told
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import ConfigError, DataError, Fault

LLMC_MAGIC = 20_240_520
LLMC_HEADER_BYTES = 1024
_CHUNK = 1 << 22
DTYPE_NAMES = ("uint8", "uint16", "uint32", "int32", "int64")


def open_stream(path: str, *, format: str, dtype: str | None, vocab_size: int) -> np.ndarray:
    """The ids of a file, mapped. Raises DataError where the bytes aren't of that format, ConfigError where a dtype is needed."""
    if dtype is not None and dtype not in DTYPE_NAMES:
        raise ConfigError([Fault("--dtype", dtype, f"one of {', '.join(DTYPE_NAMES)}")])
    with open(path, "rb") as file:
        head = file.read(LLMC_HEADER_BYTES)
    if head.startswith(b"MLITEBLK"):
        raise DataError(f"{path} is a shard of ours: give its dataset folder to a run, or to `mlite data export`")
    if format == "npy" and head.startswith(b"\x93NUMPY"):
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: not a whole .npy file ({error}). Copy it again from where it was made.") from None
        if array.ndim != 1 or array.dtype.kind not in "ui":
            raise DataError(f"{path}: holds {array.dtype.name} of shape {array.shape}, wanted integers in one dimension")
        return array.view(np.ndarray)
    if format == "llmc":
        return _llmc(path, head)
    if dtype is None and (format == "npy" or vocab_size > 1 << 16):
        why = (
            "has no header that says how wide its ids are" if format == "npy" else f"may be wider than 16 bits: there are {vocab_size} ids"
        )
        raise ConfigError([Fault("--dtype", None, f"the type of the ids in {path}", f"the file {why}: --dtype uint16 or uint32")])
    return _raw(path, np.dtype(dtype or "uint16").newbyteorder("<"), skipped=0)


def looks_like_llmc(path: str) -> bool:
    """The header of llm.c, with as many ids as the file has."""
    with open(path, "rb") as file:
        head = file.read(LLMC_HEADER_BYTES)
    if len(head) < LLMC_HEADER_BYTES:
        return False
    magic, version, count = np.frombuffer(head, "<i4")[:3].tolist()
    return (magic, version) == (LLMC_MAGIC, 1) and Path(path).stat().st_size == LLMC_HEADER_BYTES + 2 * count


def _llmc(path: str, head: bytes) -> np.ndarray:
    fields = np.frombuffer(head, "<i4")[:3].tolist() if len(head) == LLMC_HEADER_BYTES else [0, 0, 0]
    if fields[:2] != [LLMC_MAGIC, 1]:
        raise DataError(
            f"{path}: not a token file of llm.c: its header should begin with {LLMC_MAGIC} and 1, not {fields[0]} and {fields[1]}"
        )
    ids = _raw(path, np.dtype("<u2"), skipped=LLMC_HEADER_BYTES)
    if ids.size != fields[2]:
        raise DataError(f"{path}: holds {ids.size} ids, its header says {fields[2]}: it was cut off or written to. Copy it again.")
    return ids


def _raw(path: str, dtype: np.dtype[Any], *, skipped: int) -> np.ndarray:
    size = Path(path).stat().st_size - skipped
    if size % dtype.itemsize:
        raise DataError(f"{path}: {size} bytes are no whole number of {dtype.name} ids: it was cut off, or has another dtype (--dtype)")
    return np.memmap(path, dtype=dtype, mode="r", offset=skipped).view(np.ndarray) if size else np.zeros(0, dtype)


def llmc_header(num_tokens: int) -> bytes:
    header = np.zeros(LLMC_HEADER_BYTES // 4, dtype="<i4")
    header[:3] = LLMC_MAGIC, 1, num_tokens
    return header.tobytes()


def split_at_ends(ids: np.ndarray, eod_id: int) -> Iterator[np.ndarray]:
    """The documents of a run of ids, each with its end; the last one without, where the run doesn't end in one."""
    start = 0
    for first in range(0, ids.size, _CHUNK):
        for place in (np.flatnonzero(ids[first : first + _CHUNK] == eod_id) + first + 1).tolist():
            yield ids[start:place]
            start = place
    if start < ids.size:
        yield ids[start:]
