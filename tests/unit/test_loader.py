"""If this fails, a resumed or re-laid-out run trains on other rows than the uninterrupted one, or on wrong targets."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.loader import NO_TARGET, Phase, Prefetcher, Row, RowSource, batch_id
from data_pipeline.packing import PLAN_VERSIONS
from tests.data_fixtures import tiny_dataset
from tests.paths import ROOT


def numbered(num_documents: int, *, first: int = 0) -> list[list[int]]:
    """Documents whose every token is unique, so that any loss, repeat or reorder shows (FX-D)."""
    documents, next_id = [], first
    for number in range(num_documents):
        length = 1 + (number * 2_654_435_761 >> 7) % 39
        documents.append(list(range(next_id, next_id + length)))
        next_id += length
    return documents


def open_rows(
    *datasets: Any, weights: list[float] | None = None, sequence_length: int = 16, packing: Any = "best_fit", seed: int = 1, **more: Any
) -> RowSource:
    weights = weights or [1.0] * len(datasets)
    return RowSource.open(
        [(d, w, None) for d, w in zip(datasets, weights)], sequence_length=sequence_length, packing=packing, seed=seed, **more
    )


def targets_of(rows: RowSource, samples: range) -> Counter[int]:
    return Counter(int(t) for sample in samples for t in rows[sample].targets if t != NO_TARGET)


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_every_stored_token_is_a_target_exactly_once_an_epoch(tmp_path: Path, packing: str) -> None:
    """Also B036: every full later epoch visits every row once; B025: the end of each document is among the targets."""
    documents = numbered(60)
    dataset = tiny_dataset(tmp_path, documents, vocab=2000, num_validation=0)
    rows = open_rows(dataset, packing=packing)
    wanted = Counter({1999: 60, **{t: 1 for document in documents for t in document}})
    for epoch in range(3):
        assert targets_of(rows, range(epoch * len(rows), (epoch + 1) * len(rows))) == wanted
    assert sum(source.num_tokens for dataset in rows.datasets for source in dataset.sources) == sum(wanted.values())
    padded = [rows[s].num_targets for s in range(len(rows)) if rows[s].num_targets < 16]
    assert packing == "best_fit" or len(padded) <= 1  # concat declares its last partial row
    orders = [[rows[e * len(rows) + s].digest() for s in range(len(rows))] for e in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_inputs_are_the_targets_shifted_with_the_true_token_before_a_piece(tmp_path: Path, packing: str) -> None:
    documents = numbered(50)
    dataset = tiny_dataset(tmp_path, documents, vocab=2000, num_validation=0)
    before = {}
    for document in documents:
        before.update(zip([*document], [1999, *document[:-1]]))
    for row in open_rows(dataset, packing=packing):
        starts = set(row.segment_starts.tolist())
        for place, target in enumerate(row.targets.tolist()):
            if target == NO_TARGET:
                assert place >= row.num_targets and row.inputs[place] == 1999
            elif target != 1999:
                assert row.inputs[place] == before[target]
                assert (place in starts) or row.targets[place - 1] == row.inputs[place]
            elif place not in starts:
                assert row.inputs[place] == row.targets[place - 1]


def test_b030_b031_segments_begin_where_pieces_do(tmp_path: Path) -> None:
    """The boundary comes from stored lengths; the row made by hand is the row that is read."""
    dataset = tiny_dataset(tmp_path, [[7, 8], [3, 4], [5]], vocab=10, num_validation=0)
    row = open_rows(dataset, packing="best_fit")[0]
    pieces = [row.targets[a:b].tolist() for a, b in zip(row.segment_starts, [*row.segment_starts[1:], 16])]
    assert sorted(pieces[:3]) == [[3, 4, 9], [5, 9], [7, 8, 9]] and pieces[3] == [NO_TARGET] * 8
    assert row.segment_starts.tolist() == [0, 3, 6, 8] and row.segment_starts.dtype == np.int32
    assert row.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, *range(8)]
    assert row.segments.tolist() == [0, 0, 0, 1, 1, 1, 2, 2] + [3] * 8
    assert row.inputs.tolist() == [x for piece in pieces[:3] for x in [9, *piece[:-1]]] + [9] * 8
    assert row.num_targets == 8
    with pytest.raises(ValueError, match="read-only"):
        row.targets[0] = 0


def test_b023_an_id_outside_the_vocabulary_is_named_before_it_is_in_a_row(tmp_path: Path) -> None:
    """The ids of a row's pieces are looked at together; which one it is, and where, is said all the same."""
    dataset = tiny_dataset(tmp_path, [[7, 8], [3]], vocab=10, num_validation=0)
    rows = open_rows(dataset, sequence_length=8)
    (source,) = dataset.sources
    source._vocabulary = replace(source._vocabulary, size=8)
    source.shards[0].meta["vocab_size"] = 8
    with pytest.raises(DataError, match=r"token 1 is id 8, but the vocabulary has ids 0 to 7"):
        rows[0]


def test_target_bytes_count_the_text_and_not_its_end(tmp_path: Path) -> None:
    texts = ["héllo wörld", "abc"]
    rows = open_rows(tiny_dataset(tmp_path, texts, num_validation=0), sequence_length=64)
    assert sum(row.target_bytes for row in rows) == sum(len(text.encode()) for text in texts)


def test_b033_b034_b035_b044_a_sample_number_is_all_of_the_state(tmp_path: Path) -> None:
    """Read straight through, from the middle, at an epoch's edge, twice: the same rows at the same numbers."""
    rows = open_rows(tiny_dataset(tmp_path, numbered(40), vocab=2000, num_validation=0))
    straight = [rows[s].digest() for s in range(3 * len(rows))]
    for start in (1, 12, len(rows) - 1, len(rows), 2 * len(rows) + 3):
        again = open_rows(tiny_dataset(tmp_path, numbered(40), vocab=2000, num_validation=0))
        assert [again[s].digest() for s in range(start, min(start + 9, len(straight)))] == straight[start : start + 9]
    assert straight[: len(rows)] != straight[len(rows) : 2 * len(rows)]


@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (2, 2), (4, 1)])
def test_b037_b039_b040_b041_b043_ranks_and_threads_share_one_order(tmp_path: Path, ranks: int, accumulation: int) -> None:
    """Two sources over any split of the global batch: every sample once, batch ids the same whatever the split."""
    one = tiny_dataset(tmp_path / "a", numbered(30), vocab=2000, num_validation=0)
    two = tiny_dataset(tmp_path / "b", numbered(30, first=1000), vocab=2000, num_validation=0)
    rows = open_rows(one, two, weights=[0.5, 0.5])
    batch = ranks * accumulation
    wanted = [batch_id([rows[s].digest() for s in range(step * batch, (step + 1) * batch)]) for step in range(6)]
    streams = []
    for rank in range(ranks):
        samples = [[step * batch + rank * accumulation + micro for micro in range(accumulation)] for step in range(6)]
        with Prefetcher(rows, samples, depth=3, num_threads=2) as ahead:
            streams.append([[row.digest() for row in some] for some in ahead])
    got = [batch_id([digest for stream in streams for digest in stream[step]]) for step in range(6)]
    assert got == wanted


def test_the_order_does_not_depend_on_the_length_of_the_run_or_the_other_seed(tmp_path: Path) -> None:
    dataset = tiny_dataset(tmp_path)
    one, two = open_rows(dataset, seed=1), open_rows(dataset, seed=2)
    first = [one[s].digest() for s in range(len(one))]
    assert first != [two[s].digest() for s in range(len(two))]
    assert sorted(first) == sorted(two[s].digest() for s in range(len(two)))


def test_validation_is_in_order_and_ends(tmp_path: Path) -> None:
    """B046: held-out documents never appear in training."""
    documents = numbered(40)
    dataset = tiny_dataset(tmp_path, documents, vocab=2000, num_validation=6)
    held_out = open_rows(dataset, split="validation")
    train = open_rows(dataset)
    assert not set(targets_of(held_out, range(len(held_out)))) & set(targets_of(train, range(len(train)))) - {1999}
    assert targets_of(held_out, range(len(held_out))) == Counter({1999: 6, **{t: 1 for document in documents[-6:] for t in document}})
    with pytest.raises(IndexError):
        held_out[len(held_out)]
    with pytest.raises(DataError, match="no held-out documents"):
        open_rows(tiny_dataset(tmp_path / "none", documents, vocab=2000, num_validation=0), split="validation")


def test_several_sources_of_one_dataset_are_each_gone_through_once_an_epoch(tmp_path: Path) -> None:
    dataset = tiny_dataset(tmp_path, {"web": numbered(20), "books": numbered(9, first=1000)}, vocab=2000, num_validation=0)
    rows = open_rows(dataset)
    assert targets_of(rows, range(len(rows))) == Counter({1999: 29, **{t: 1 for d in numbered(20) + numbered(9, first=1000) for t in d}})
    only = RowSource.open([(dataset, 1.0, ["books"])], sequence_length=16, packing="concat", seed=0)
    assert targets_of(only, range(len(only))) == Counter({1999: 9, **{t: 1 for d in numbered(9, first=1000) for t in d}})
    with pytest.raises(DataError, match="no source 'book'; it has web, books"):
        RowSource.open([(dataset, 1.0, ["book"])], sequence_length=16, packing="concat", seed=0)


def test_mixtures_follow_weights_and_phases_and_say_their_epochs(tmp_path: Path) -> None:
    one = tiny_dataset(tmp_path / "a", numbered(30), vocab=2000, num_validation=0)
    two = tiny_dataset(tmp_path / "b", numbered(30, first=1000), vocab=2000, num_validation=0)
    rows = open_rows(one, two, weights=[0.7, 0.3])
    entries = Counter(rows.place(sample).entry for sample in range(100))
    assert entries == {0: 70, 1: 30}
    counts = [len(open_rows(one)), len(open_rows(two))]
    assert rows.epochs_at(100) == [70 / counts[0], 30 / counts[1]]
    phased = open_rows(one, two, phases=[Phase(0, (0.7, 0.3)), Phase(50, (0.0, 1.0))])
    assert [phased[s].digest() for s in range(50)] == [rows[s].digest() for s in range(50)]
    assert {phased.place(s).entry for s in range(50, 80)} == {1}
    assert phased.identity["phases"] == [{"from_sample": 0, "weights": [0.7, 0.3]}, {"from_sample": 50, "weights": [0.0, 1.0]}]
    assert rows.identity["sources"][0][0]["hash"] == one.sources[0].hash
    with pytest.raises(ConfigError, match="each source once"):
        open_rows(one, one)
    with pytest.raises(ConfigError, match="weights of 0 or more"):
        open_rows(one, two, weights=[1.0, -1.0])


def test_datasets_of_two_tokenizers_are_not_mixed(tmp_path: Path) -> None:
    one, two = tiny_dataset(tmp_path / "a", numbered(5), vocab=300), tiny_dataset(tmp_path / "b", numbered(5), vocab=400)
    with pytest.raises(DataError, match="ids mean different text"):
        open_rows(one, two)


def test_prefetch_keeps_order_passes_errors_and_closes(tmp_path: Path) -> None:
    rows = open_rows(tiny_dataset(tmp_path))
    batches = [[3, 1], [0], [2, 5, 4]]
    with Prefetcher(rows, iter(batches), depth=5, num_threads=3) as ahead:
        got = [[row.digest() for row in batch] for batch in ahead]
    assert got == [[rows[s].digest() for s in batch] for batch in batches]

    class Broken:
        def __getitem__(self, sample: int) -> Row:
            if sample == 1:
                raise DataError("shard x: damaged")
            return rows[sample]

    ahead = Prefetcher(Broken(), ([s] for s in range(100)), depth=2)
    assert next(ahead)[0].digest() == rows[0].digest()
    with pytest.raises(DataError, match="damaged"):
        next(ahead)
    ahead.close()


def test_the_digest_is_as_documented(tmp_path: Path) -> None:
    import hashlib
    import struct

    row = open_rows(tiny_dataset(tmp_path, [[7, 8], [3]], vocab=10, num_validation=0), sequence_length=8)[0]
    assert row.targets.tolist() == [7, 8, 9, 3, 9, NO_TARGET, NO_TARGET, NO_TARGET]
    raw = struct.pack("<8I", 7, 8, 9, 3, 9, *[0xFFFFFFFF] * 3) + struct.pack("<3I", 0, 3, 5)
    assert row.digest() == hashlib.sha256(raw).digest()
    assert batch_id([row.digest()] * 2) == hashlib.sha256(row.digest() * 2).hexdigest()[:16]


def test_data_order_never_changes_between_versions(tmp_path: Path) -> None:
    """Golden batch ids (invariant 11), made when the format was set; change them only with the format versions. Plans say theirs."""
    dataset = tiny_dataset(tmp_path, numbered(50), vocab=2000, num_validation=0)
    got = {}
    for packing in ("concat", "best_fit"):
        rows = open_rows(dataset, packing=packing, seed=1234)
        got[packing] = batch_id([rows[s].digest() for s in range(100)])
        assert rows.identity["packing_version"] == PLAN_VERSIONS[rows.packing] == {"concat": 1, "best_fit": 2}[packing]
    assert got == GOLDEN


GOLDEN = {"concat": "633ab61e0bc90281", "best_fit": "910293e9785ec80e"}


def test_the_loader_needs_numpy_and_nothing_heavier(tmp_path: Path) -> None:
    """Every rank imports it at the start of a run, so it must come in milliseconds."""
    tiny_dataset(tmp_path)
    open_rows(tiny_dataset(tmp_path))
    code = (
        "import sys; from data_pipeline.loader import Dataset, RowSource; "
        f"rows = RowSource.open([(Dataset.open({str(tmp_path)!r}), 1.0, None)], sequence_length=16, packing='best_fit', seed=1); rows[0]; "
        "print([m for m in ('torch', 'tokenizers', 'datasets', 'pyarrow', 'numba', 'pydantic', 'fsspec', 'rich', 'zstandard') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
