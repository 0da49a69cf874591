"""If these fail, data in object storage is not what it is on a disk: read short, half published, or trained on though it is damaged."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from data_pipeline import remote as remote_module
from data_pipeline.block_cache import BlockCache, CacheConfig
from data_pipeline.build import build
from data_pipeline.dataset import Dataset
from data_pipeline.errors import ConfigError, DataError, MegatronLiteError
from data_pipeline.inputs import InputFile, stamp_of
from data_pipeline.loader import Prefetcher, RowSource, batch_id
from data_pipeline.progress import Progress
from data_pipeline.publish import publish
from data_pipeline.storage import BLOCK_BYTES
from tests.corpus_fixtures import config, digests, jsonl, write_corpus
from tests.data_fixtures import tiny_dataset
from tests.s3 import s3_server

QUIET = Progress(quiet=True)


@pytest.fixture(scope="module")
def s3() -> Iterator[Any]:
    with s3_server("bucket"):
        import s3fs

        yield s3fs.S3FileSystem()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Three shards of about 3 MiB each."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 400, size=100_000) for _ in range(49)]
    return tiny_dataset(tmp_path_factory.mktemp("data") / "tiny", documents, vocab=500, num_validation=1, documents_per_shard=16)


@pytest.fixture(scope="module")
def published(s3: Any, dataset: Dataset) -> str:
    rows_of(dataset)  # makes the plan, which is published too
    publish(dataset.path, "s3://bucket/tiny", replace=False, progress=QUIET)
    return "s3://bucket/tiny"


def rows_of(dataset: Dataset) -> RowSource:
    return RowSource.open([(dataset, 1.0, None)], sequence_length=2048, packing="best_fit", seed=3)


def batches_of(rows: RowSource, *, count: int = 6, size: int = 16) -> list[str]:
    numbers = [list(range(first, first + size)) for first in range(0, count * size, size)]
    with Prefetcher(rows, numbers, num_threads=rows.num_threads) as found:
        return [batch_id([row.digest() for row in batch]) for batch in found]


def opened(url: str, folder: Path, *, max_gb: float = 1.0) -> Dataset:
    return Dataset.open(url, cache=CacheConfig(dir=str(folder), max_gb=max_gb))


def kept_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in (folder / "blocks").rglob("*") if path.is_file())


# --------------------------------------------------------------------------------------------------- reading a corpus


def test_a_corpus_is_read_over_s3_and_http_as_from_a_disk(s3: Any, tmp_path: Path) -> None:
    """Folders, globs, compression and parquet; changed bytes of the same length are seen."""
    corpus = write_corpus(tmp_path / "corpus", size=20)
    s3.put(str(corpus), "bucket/raw", recursive=True)
    plain = {"tokenizer": {"type": "bytes"}, "packing": [], "dedup": {"minhash": None}}
    local = build(config(corpus, tmp_path / "local", **plain), quiet=True)
    sources = [
        {"name": "web", "files": "s3://bucket/raw/web/*"},
        {"name": "books", "files": "s3://bucket/raw/books"},
        {"name": "table", "files": "s3://bucket/raw/table.parquet", "text_field": "content"},
    ]
    over_s3 = build(config(corpus, tmp_path / "s3", sources=sources, **plain), quiet=True)
    assert [(each.name, each.num_documents, each.num_tokens) for each in over_s3.sources] == [
        (each.name, each.num_documents, each.num_tokens) for each in local.sources
    ]
    assert over_s3.tokenizer_hash == local.tokenizer_hash
    s3.pipe("bucket/raw/table.parquet", s3.cat("bucket/raw/web/a.jsonl"))
    with pytest.raises(ConfigError, match="--replace"):
        build(config(corpus, tmp_path / "s3", sources=sources, **plain), quiet=True)
    with ThreadingHTTPServer(("127.0.0.1", 0), Quietly.at(corpus)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/web/"
        own = [{"name": "web", "files": [url + name for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst")]}]
        settings = config(corpus, tmp_path / "http", sources=own, **plain)
        first = build(settings, quiet=True)
        assert first.sources[0].num_documents > 50
        raw = (corpus / "web/a.jsonl").read_bytes()
        (corpus / "web/a.jsonl").write_bytes(raw.replace(b"the", b"THE"))
        with pytest.raises(ConfigError, match="--replace"):  # this server gives no tag: the text itself is hashed
            build(settings, quiet=True)
        server.shutdown()


def test_an_object_that_was_replaced_after_it_was_listed_is_seen(s3: Any) -> None:
    """By the process that listed it too, whose store remembers the listing."""
    import s3fs

    s3.pipe("bucket/late/a.txt", b"before")
    s3.ls("bucket/late")
    path = "s3://bucket/late/a.txt"
    file = InputFile(path, "a.txt", 6, "", stamp_of(path))
    file.check()
    s3.ls("bucket/late")
    s3fs.S3FileSystem(skip_instance_cache=True).pipe("bucket/late/a.txt", b"behind")
    with pytest.raises(DataError, match="changed while the build was reading it"):
        file.check()


class Quietly(SimpleHTTPRequestHandler):
    @classmethod
    def at(cls, folder: Path) -> partial[SimpleHTTPRequestHandler]:
        return partial(cls, directory=str(folder))

    def log_message(self, *_: object) -> None:
        pass


# -------------------------------------------------------------------------------------------------- publishing


def test_a_dataset_is_published_whole_or_not_at_all(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed on the way there is no manifest; again, it goes on. Another dataset gives way to --replace, and leaves nothing behind."""
    (tmp_path / "raw.jsonl").write_bytes(jsonl([f"document {n} of some" * 9 for n in range(30)]))
    settings = config(tmp_path, tmp_path / "x", sources=[{"name": "web", "files": str(tmp_path / "raw.jsonl")}], packing=[])
    settings = settings.model_copy(update={"output": "s3://bucket/out/web", "work": str(tmp_path / "work")})
    real, sent = s3.put_file, []

    def put(local: str, target: str) -> None:
        if len(sent) == 3:
            raise OSError("the network is gone")
        sent.append(target)
        real(local, target)

    monkeypatch.setattr(s3, "put_file", put)
    with pytest.raises(MegatronLiteError, match="can't be written"):
        build(settings, quiet=True)
    assert len(s3.find("bucket/out/web")) >= 3
    with pytest.raises(DataError, match="manifest"):
        opened("s3://bucket/out/web", tmp_path / "cache")
    monkeypatch.undo()
    build(settings, quiet=True)
    names = digests(settings.folder)
    assert {path.removeprefix("bucket/out/web/") for path in s3.find("bucket/out/web")} == set(names)
    assert opened("s3://bucket/out/web", tmp_path / "cache").manifest == Dataset.open(settings.folder).manifest
    (tmp_path / "raw.jsonl").write_bytes(jsonl(["another text"] * 2 + [f"{n} and more" for n in range(40)]))
    with pytest.raises(ConfigError, match="--replace"):
        build(settings, quiet=True)
    s3.pipe("bucket/out/web/shards/old-00000.bin", b"of an older one")
    build(settings, quiet=True, replace=True)
    assert {path.removeprefix("bucket/out/web/") for path in s3.find("bucket/out/web")} == set(digests(settings.folder))


def test_what_is_not_of_the_dataset_stays_here(tmp_path: Path) -> None:
    folder = tiny_dataset(tmp_path / "tiny").path
    wanted = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    for name in ("packing/.tiny-S64-best_fit.plan.tmp-7-ab", "dedup/k.index", ".nfs0001"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    publish(folder, f"file://{tmp_path}/there", replace=False, progress=QUIET)
    there = tmp_path / "there"
    assert {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()} == wanted


# -------------------------------------------------------------------------------------------------- streaming


def test_streamed_batches_are_those_of_the_disk(published: str, dataset: Dataset, tmp_path: Path) -> None:
    """With a cache that holds all, and with one that holds 8 of 10 blocks or so; twice, of which the second fetches nothing."""
    expected = batches_of(rows_of(dataset))
    far = opened(published, tmp_path / "large")
    assert batches_of(rows_of(far)) == expected and far.remote.counts["fetched"] > 8
    again = opened(published, tmp_path / "large")
    assert batches_of(rows_of(again)) == expected and again.remote.counts["fetched"] == 0
    small = opened(published, tmp_path / "small", max_gb=6 * BLOCK_BYTES / 1e9)
    assert batches_of(rows_of(small)) == expected
    assert small.remote.counts["evicted"] > 0 and kept_bytes(tmp_path / "small") <= 6 * BLOCK_BYTES


def test_ranks_that_share_a_cache_fetch_each_block_once(published: str, dataset: Dataset, tmp_path: Path) -> None:
    ranks = [opened(published, tmp_path / "cache") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda each: batches_of(rows_of(each)), ranks))
    assert found == [batches_of(rows_of(dataset))] * 4
    fetched = sum(each.remote.counts["fetched"] for each in ranks)
    assert fetched == len([path for path in (tmp_path / "cache" / "blocks").rglob("*") if path.is_file()])


def test_a_cached_block_that_the_disk_damaged_is_fetched_again(published: str, dataset: Dataset, tmp_path: Path) -> None:
    batches_of(rows_of(opened(published, tmp_path / "cache")))
    for path in (tmp_path / "cache" / "blocks").rglob("0"):
        path.write_bytes(path.read_bytes()[:5000] + b"!" + path.read_bytes()[5001:])
    again = opened(published, tmp_path / "cache")
    assert batches_of(rows_of(again)) == batches_of(rows_of(dataset)) and 0 < again.remote.counts["fetched"] <= 3


def test_damage_and_loss_in_the_store_are_named(s3: Any, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit, a missing shard, a server that fails for a while, and one that doesn't come back."""
    monkeypatch.setattr(remote_module, "WAITS_S", (0.0, 0.0))
    publish(dataset.path, "s3://bucket/bad", replace=False, progress=QUIET)
    name = dataset.sources[0].entry.shards[1].file
    raw = bytearray(s3.cat(f"bucket/bad/{name}"))
    raw[4096 + BLOCK_BYTES + 77] ^= 1
    s3.pipe(f"bucket/bad/{name}", bytes(raw))
    rows = rows_of(opened("s3://bucket/bad", tmp_path / "cache"))
    with pytest.raises(DataError, match=rf"s3://bucket/bad/{name}: block 1 \(bytes 1052672 to 2101248\) does not match"):
        batches_of(rows, count=40)
    s3.rm(f"bucket/bad/{name}")
    with pytest.raises(DataError, match=rf"s3://bucket/bad/{name} does not exist"):
        rows_of(opened("s3://bucket/bad", tmp_path / "other"))
    real, calls = s3.cat_file, []

    def flaky(path: str, **more: object) -> bytes:
        calls.append(path)
        if len(calls) < 3 or "gone" in path:
            raise ConnectionError("reset by peer")
        return real(path, **more)

    monkeypatch.setattr(s3, "cat_file", flaky)
    assert opened("s3://bucket/tiny", tmp_path / "third").manifest == dataset.manifest and len(calls) > 3
    with pytest.raises(MegatronLiteError, match="can't be read: ConnectionError") as caught:
        opened("s3://bucket/gone", tmp_path / "third")
    assert caught.value.exit_code == 1  # a network that is down is no bad data: the run may be started again


def test_a_plan_that_was_not_published_is_made_here(published: str, dataset: Dataset, tmp_path: Path) -> None:
    ours, theirs = (
        RowSource.open([(each, 1.0, None)], sequence_length=512, packing="concat", seed=3)
        for each in (opened(published, tmp_path / "cache"), dataset)
    )
    assert batches_of(ours) == batches_of(theirs)
    assert json.loads((tmp_path / "cache" / "datasets").glob("*/manifest.json").__next__().read_text())["sources"]


@pytest.mark.parametrize("damaged", ["there", "here"])
def test_a_damaged_plan_is_made_anew(tmp_path: Path, damaged: str) -> None:
    """One that came so, and one that the cache has kept; it is never kept under its name."""
    dataset = tiny_dataset(tmp_path / "tiny")
    plan = dataset.sources[0].plan(64, "best_fit")
    publish(dataset.path, f"file://{tmp_path}/there", replace=False, progress=QUIET)
    far = opened(f"file://{tmp_path}/there", tmp_path / "cache")
    name = "packing/tiny-S64-best_fit.plan"
    if damaged == "here":
        far.sources[0].plan(64, "best_fit")
    path = (tmp_path / "there" if damaged == "there" else far.path) / name
    raw = bytearray(path.read_bytes())
    raw[4100] ^= 1
    path.write_bytes(raw)
    again = opened(f"file://{tmp_path}/there", tmp_path / "cache").sources[0].plan(64, "best_fit")
    again.verify()
    assert again.pieces(0).tolist() == plan.pieces(0).tolist()
    assert (far.path / name).read_bytes() == (dataset.path / name).read_bytes()


def test_keys_that_have_expired_are_no_bad_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again, then exit code 1; what may be missing is done without, where a store says so of missing files."""
    monkeypatch.setattr(remote_module, "WAITS_S", (0.0, 0.0))
    dataset = tiny_dataset(tmp_path / "there")
    files = fsspec.filesystem("file")
    real, refused = files.cat_file, []

    def cat(path: str, **more: Any) -> Any:
        if any(part in path for part in parts):
            refused.append(path)
            raise PermissionError("The provided token has expired.")
        return real(path, **more)

    monkeypatch.setattr(files, "cat_file", cat)
    parts = ["tokenizer_config", "packing"]
    assert opened(f"file://{tmp_path}/there", tmp_path / "cache").sources[0].plan(64, "best_fit").num_rows
    parts, refused[:] = ["shards"], []
    with pytest.raises(MegatronLiteError, match="may not be read: The provided token") as caught:
        opened(f"file://{dataset.path}", tmp_path / "other").sources[0].lengths()
    assert caught.value.exit_code == 1 and len(refused) >= 3


def test_what_was_used_last_stays(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, max_bytes=80_000)
    for block in range(8):
        cache.put("a", block, bytes(8_000))
        assert cache.get("a", 0, 0, 4) == bytes(4)
    cache.put("a", 8, bytes(8_000))
    assert cache.has("a", 0) and cache.has("a", 8) and not cache.has("a", 1) and kept_bytes(tmp_path) <= 80_000
