"""If this fails, a damaged shard or plan can reach training unnoticed, or a sound one is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.blockfile import HEADER_BYTES, BlockFile, write_blockfile
from data_pipeline.errors import DataError
from data_pipeline.storage import BLOCK_BYTES

RECORD = np.dtype([("a", "<u4"), ("b", "<i8")])


def write(path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 1 << 16, size=1_500_000).astype("<u2")  # 3 MB: several blocks
    records = np.zeros(1000, dtype=RECORD)
    records["b"] = rng.integers(-(1 << 40), 1 << 40, size=1000)
    with write_blockfile(path, kind="sample") as out:
        out.begin("numbers", "<u2")
        for part in np.array_split(numbers, 7):
            out.append(part)
        out.add("records", records)
        out.add("empty", np.zeros(0, dtype=np.int64))
        out.meta["answer"] = 42
    return {"numbers": numbers, "records": records, "empty": np.zeros(0, dtype=np.int64)}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    arrays = write(tmp_path / "x.bin")
    file = BlockFile(tmp_path / "x.bin", kind="sample")
    assert file.meta == {"answer": 42}
    for name, values in arrays.items():
        np.testing.assert_array_equal(file.read(name), values)
        assert file.length(name) == values.size
    np.testing.assert_array_equal(file.read("numbers", 524_280, 524_300), arrays["numbers"][524_280:524_300])  # across a block's edge
    with pytest.raises(ValueError, match="read-only"):
        file.read("numbers")[0] = 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["x.bin"]


def test_copies_are_what_is_read_and_checked_as_well(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    numbers = write(path)["numbers"]
    places = [(0, 3), (524_280, 524_300), (7, 7), (1_400_000, 1_500_000), (524_290, 524_295)]
    for _ in range(2):  # at first and when the blocks have been checked
        copied = BlockFile(path, kind="sample").copies("numbers", places)
        assert list(copied) == [numbers[start:stop].tobytes() for start, stop in places]
    damaged = bytearray(path.read_bytes())
    damaged[HEADER_BYTES + BLOCK_BYTES + 5] ^= 1
    path.write_bytes(damaged)
    file = BlockFile(path, kind="sample")
    assert list(file.copies("numbers", places[:1])) == [numbers[:3].tobytes()]
    with pytest.raises(DataError, match=rf"x\.bin: block 1 \(bytes {HEADER_BYTES + BLOCK_BYTES} to {HEADER_BYTES + 2 * BLOCK_BYTES}\)"):
        list(file.copies("numbers", places))


def test_a_flipped_byte_anywhere_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write(path)
    whole = path.read_bytes()
    size = len(whole)
    places = [
        0,
        9,
        14,
        20,
        400,
        4000,
        HEADER_BYTES,
        HEADER_BYTES + BLOCK_BYTES,
        HEADER_BYTES + 3_000_010,
        size - 1,
        size - 9,
        size - 20,
        size - 40,
    ]
    places += np.random.default_rng(1).integers(0, size, size=40).tolist()
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"x\.bin") as caught:
            BlockFile(path, kind="sample").verify()
        if HEADER_BYTES <= place < HEADER_BYTES + 3 * BLOCK_BYTES - 200_000:
            block = (place - HEADER_BYTES) // BLOCK_BYTES
            assert f"block {block} (bytes {HEADER_BYTES + block * BLOCK_BYTES} to" in str(caught.value)


def test_damage_is_found_before_the_block_is_used_and_no_sooner(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    arrays = write(path)
    damaged = bytearray(path.read_bytes())
    damaged[HEADER_BYTES + BLOCK_BYTES + 5] ^= 1
    path.write_bytes(damaged)
    file = BlockFile(path, kind="sample")
    np.testing.assert_array_equal(file.read("numbers", 0, 1000), arrays["numbers"][:1000])
    with pytest.raises(DataError, match="block 1"):
        file.read("numbers", BLOCK_BYTES // 2 - 10, BLOCK_BYTES // 2 + 10)


def test_a_file_cut_off_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    write(path)
    whole = path.read_bytes()
    for size in (0, 7, 100, HEADER_BYTES, HEADER_BYTES + 50, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"x\.bin"):
            BlockFile(path, kind="sample").verify()
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="written to"):
        BlockFile(path, kind="sample")
    with pytest.raises(DataError, match="can't be opened"):
        BlockFile(tmp_path / "absent.bin", kind="sample")


def test_another_kind_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x.bin")
    with pytest.raises(DataError, match="holds a sample, wanted a shard"):
        BlockFile(tmp_path / "x.bin", kind="shard")


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), write_blockfile(tmp_path / "x.bin", kind="sample") as out:
        out.add("a", np.arange(3))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_released_memory_comes_again_from_the_file(tmp_path: Path) -> None:
    """Arrays that were read stay good."""
    path = tmp_path / "x"
    values = np.arange(1 << 20, dtype=np.int64)
    with write_blockfile(path, kind="numbers") as out:
        out.add("values", values)
    file = BlockFile(path, kind="numbers")
    before = file.read("values")
    file.release()
    np.testing.assert_array_equal(before, values)
    np.testing.assert_array_equal(file.read("values", 1000, 2000), values[1000:2000])
