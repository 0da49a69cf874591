"""If this fails, files are missed, read wrongly, left half-written, or damaged without anyone noticing."""

import gzip
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import zstandard

from data_pipeline import storage, streams
from data_pipeline.errors import DataError

PAYLOAD = b"".join(b"line %d\n" % number for number in range(60_000))


def read_all(path: Path) -> bytes:
    with streams.open_bytes(path) as file:
        return file.read()


# ---------------------------------------------------------------------------------------------- listing


def test_folders_globs_and_files_are_listed_once_and_sorted(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.jsonl", ".hidden/x.txt", ".y.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    listed = storage.list_files([str(tmp_path), str(tmp_path / "**/*.txt"), str(tmp_path / "a.txt")])
    assert [Path(path).relative_to(tmp_path).as_posix() for path in listed] == ["a.txt", "b.txt", "deep/d.jsonl", "deep/er/c.txt"]
    assert [Path(path).name for path in storage.list_files(str(tmp_path / "*"))] == ["a.txt", "b.txt", "d.jsonl", "c.txt"]
    assert [Path(path).name for path in storage.list_files(str(tmp_path / "**/*.jsonl"))] == ["d.jsonl"]


def test_a_name_with_glob_characters_is_the_file_itself(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("x")
    assert storage.list_files(str(tmp_path / "a[1].txt")) == [str(tmp_path / "a[1].txt")]


def test_linked_folders_are_followed_and_loops_end(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.txt").write_text("x")
    (tmp_path / "top").mkdir()
    (tmp_path / "top/link").symlink_to(tmp_path / "real")
    (tmp_path / "real/loop").symlink_to(tmp_path / "real")
    assert storage.list_files(str(tmp_path / "top")) == [str(tmp_path / "top/link/a.txt")]


def test_names_do_not_depend_on_where_the_folder_is_or_on_other_files(tmp_path: Path) -> None:
    for root in ("one", "two"):
        (tmp_path / root / "sub").mkdir(parents=True)
        (tmp_path / root / "sub/a.txt").write_text("x")
    (tmp_path / "two/b.txt").write_text("x")
    assert [name for _, name in storage.named_files(str(tmp_path / "one"))] == ["sub/a.txt"]
    assert [name for _, name in storage.named_files(str(tmp_path / "two/**/*.txt"))] == ["b.txt", "sub/a.txt"]
    both = storage.named_files([str(tmp_path / "one"), str(tmp_path / "two")])
    assert [name for _, name in both] == ["one/sub/a.txt", "two/b.txt", "two/sub/a.txt"]


def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file matches '.*nothing/\*\.txt' \(the nearest folder that exists is "):
        storage.list_files(str(tmp_path / "nothing/*.txt"))
    with pytest.raises(DataError, match="no file matches"):
        storage.list_files(str(tmp_path))
    with pytest.raises(DataError, match="no files are named"):
        storage.list_files([])


def test_fsspec_addresses_are_listed_and_read(tmp_path: Path) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/texts/a.jsonl", b"plain")
    memory.pipe("/texts/sub/b.jsonl.gz", gzip.compress(b"packed"))
    listed = storage.list_files("memory://texts")
    assert listed == ["memory:///texts/a.jsonl", "memory:///texts/sub/b.jsonl.gz"]
    assert storage.list_files("memory://texts/*.jsonl") == listed[:1]
    assert [read_all(path) for path in listed] == [b"plain", b"packed"]  # type: ignore[arg-type]
    with pytest.raises(DataError, match="check the address"):
        storage.list_files("memory://nowhere/*.x")


# ---------------------------------------------------------------------------------------------- reading


def members(compress: object, data: bytes) -> bytes:
    assert callable(compress)
    return b"".join(compress(part) for part in (data[:1000], b"", data[1000:]))


SKIPPABLE = b"\x5a\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc"


@pytest.mark.parametrize(
    "stored",
    [
        PAYLOAD,
        members(gzip.compress, PAYLOAD),
        members(gzip.compress, PAYLOAD) + bytes(512),
        members(zstandard.compress, PAYLOAD),
        SKIPPABLE + members(zstandard.compress, PAYLOAD) + SKIPPABLE,
    ],
    ids=["plain", "gzip", "gzip padded", "zstd", "zstd with skippable frames"],
)
def test_compression_is_recognised_by_content_in_any_number_of_members(tmp_path: Path, stored: bytes) -> None:
    path = tmp_path / "name.that.says.nothing"
    path.write_bytes(stored)
    assert read_all(path) == PAYLOAD


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
@pytest.mark.parametrize("cut", [1, 9, 1000])
def test_a_truncated_file_gives_what_was_decoded_and_then_says_so(tmp_path: Path, compress: object, cut: int) -> None:
    assert callable(compress)
    noise = os.urandom(200_000)  # does not compress, so most of it is decoded before the cut
    path = tmp_path / "cut"
    path.write_bytes(compress(noise)[:-cut])
    got = b""
    with streams.open_bytes(path) as file, pytest.raises(streams.DamagedStream, match="is truncated") as caught:
        while chunk := file.read1(1 << 16):  # type: ignore[attr-defined]
            got += chunk
    assert caught.value.kind == "truncated"
    assert noise.startswith(got)
    assert len(got) > (150_000 if compress is gzip.compress else 100_000)


@pytest.mark.parametrize("stored", [gzip.compress(PAYLOAD)[:-6] + b"123456", gzip.compress(PAYLOAD) + b"garbage after the end"])
def test_corrupt_data_is_told_from_truncated(tmp_path: Path, stored: bytes) -> None:
    path = tmp_path / "bad.gz"
    path.write_bytes(stored)
    with streams.open_bytes(path) as file, pytest.raises(streams.DamagedStream) as caught:
        while file.read1(1 << 16):  # type: ignore[attr-defined]
            pass
    assert caught.value.kind == "corrupt"
    assert caught.value.exit_code == 3


def test_a_missing_or_unreadable_file_is_a_data_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        streams.open_bytes(tmp_path / "none")
    with pytest.raises(DataError, match="can't read"):
        streams.open_bytes(tmp_path)


# ---------------------------------------------------------------------------------------------- writing


def test_an_atomic_write_that_fails_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "new/file"
    with storage.atomic_write(path) as file:
        file.write(b"old")
    with pytest.raises(RuntimeError), storage.atomic_write(path) as file:
        file.write(b"half")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_an_atomic_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    with pytest.raises(RuntimeError), storage.atomic_folder(target) as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with storage.atomic_folder(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub/a").write_text("1")
        assert not target.exists()
    with pytest.raises(FileExistsError), storage.atomic_folder(target):
        pass
    with storage.atomic_folder(target, replace=True) as folder:
        (folder / "b").write_text("2")
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["folder", "folder/b"]


def test_a_killed_writer_leaves_nothing_that_is_taken_for_data(tmp_path: Path) -> None:
    """B016: what a crashed run left is never picked up; it can be removed."""
    script = f"""
    import os, signal
    from data_pipeline.storage import atomic_folder, atomic_write
    with atomic_write({str(tmp_path / "kept.txt")!r}) as file, atomic_folder({str(tmp_path / "stage")!r}) as folder:
        file.write(b"half")
        (folder / "part").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=60)
    assert killed.returncode == -9
    assert not (tmp_path / "kept.txt").exists()
    assert not (tmp_path / "stage").exists()
    assert storage.remove_leftovers(tmp_path / "kept.txt") == 1
    assert storage.remove_leftovers(tmp_path / "stage") == 1
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------------- checking


def test_sha256_is_of_the_stored_bytes(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert storage.sha256_file(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
