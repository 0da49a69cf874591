"""If this fails, stored tokens are lost, doubled or cut without need on their way into rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.binpack import best_fit_decreasing
from data_pipeline.packing import PLAN_VERSIONS, Method, plan_rows
from data_pipeline.plans import Plan, PlanKey, make_plan, open_plan


def key_for(method: Method, sequence_length: int) -> PlanKey:
    return PlanKey(
        source="web", split="train", source_hash="s" * 64, manifest_hash="m" * 64, sequence_length=sequence_length, method=method
    )


def rows_of(plan: Plan) -> list[list[tuple[int, int, int]]]:
    return [plan.pieces(row).tolist() for row in range(plan.num_rows)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 70), min_size=1, max_size=60),
    st.integers(1, 40),
    st.sampled_from(["concat", "best_fit"]),
    st.integers(1, 25),
)
def test_every_token_lies_in_exactly_one_row(lengths: list[int], sequence_length: int, method: Method, window: int) -> None:
    out: list[list[tuple[int, int, int]]] = []
    for some in plan_rows(np.array(lengths), sequence_length=sequence_length, method=method, key="k", window_documents=window):
        pieces = iter(some.pieces.tolist())
        assert some.pieces_per_row.sum() == some.pieces.size
        for number, count in enumerate(some.pieces_per_row.tolist()):
            row = [next(pieces) for _ in range(count)]
            if number == 0 and some.continues:
                out[-1] += row
            else:
                out.append(row)
    seen = [np.zeros(length, dtype=int) for length in lengths]
    for row in out:
        assert 0 < sum(length for _, _, length in row) <= sequence_length
        for document, start, length in row:
            seen[document][start : start + length] += 1
    assert all((count == 1).all() for count in seen)
    if method == "concat":
        assert all(sum(length for _, _, length in row) == sequence_length for row in out[:-1])
        assert len(out) == -(-sum(lengths) // sequence_length)
    else:
        pieces_of = np.bincount([document for row in out for document, _, _ in row], minlength=len(lengths))
        np.testing.assert_array_equal(pieces_of, [-(-length // sequence_length) for length in lengths])  # cut only where it must be


def test_windows_do_not_change_concat() -> None:
    """The chain is one chain, however much of it is planned at a time."""
    lengths = np.random.default_rng(0).integers(1, 50, size=200)
    whole = np.concatenate([rows.pieces for rows in plan_rows(lengths, sequence_length=16, method="concat", key="k")])
    parts = np.concatenate([rows.pieces for rows in plan_rows(lengths, sequence_length=16, method="concat", key="k", window_documents=7)])
    np.testing.assert_array_equal(whole, parts)


def obvious_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """The fullest bin with room, the last changed among equals."""
    room: list[int] = []
    changed: list[int] = []
    out = []
    for step, length in enumerate(lengths):
        fits = [b for b in range(len(room)) if room[b] >= length]
        if fits:
            best = min(fits, key=lambda b: (room[b], -changed[b]))
        else:
            best = len(room)
            room.append(capacity)
            changed.append(0)
        room[best] -= length
        changed[best] = step
        out.append(best)
    return out


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 33), min_size=1, max_size=80), st.integers(33, 80))
def test_best_fit_equals_the_obvious_search(lengths: list[int], capacity: int) -> None:
    lengths = sorted(lengths, reverse=True)
    bins, num_bins = best_fit_decreasing(np.array(lengths), capacity)
    assert bins.tolist() == obvious_best_fit(lengths, capacity)
    assert num_bins == max(bins) + 1


def test_realistic_lengths_leave_almost_no_padding(tmp_path: Path) -> None:
    """The measured case of the paper: padding at most 0.1 %, and no document cut that fits into a row."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(2, rng.lognormal(4.5, 1.0, size=40_000)).astype(np.int64)
    plan = make_plan(tmp_path, key_for("best_fit", 1024), lengths)
    assert plan.num_padding_tokens / (plan.num_rows * 1024) < 0.001
    assert plan.num_cuts == int((-(-lengths // 1024) - 1).sum())
    concat = make_plan(tmp_path, key_for("concat", 1024), lengths)
    assert concat.num_rows == -(-int(lengths.sum()) // 1024)
    assert plan.num_rows <= concat.num_rows * 1.001 + 1


@pytest.mark.parametrize("method", ["concat", "best_fit"])
def test_a_plan_is_used_only_for_the_data_that_it_was_made_for(tmp_path: Path, method: Method) -> None:
    """B045: other data, another length or split under the same names makes another plan."""
    lengths = np.array([5, 3, 9, 40, 2])
    key = key_for(method, 16)
    made = make_plan(tmp_path, key, lengths)
    found = open_plan(tmp_path, key)
    assert found is not None and rows_of(found) == rows_of(made)
    assert key.file_name == f"web-S16-{method}.plan"
    for change in ({"source_hash": "t" * 64}, {"manifest_hash": "n" * 64}, {"sequence_length": 8}, {"split": "validation"}):
        assert open_plan(tmp_path, PlanKey(**{**key.__dict__, **change})) is None


def test_a_plan_of_an_earlier_version_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one of a method that has not changed is kept."""
    for method in ("concat", "best_fit"):
        make_plan(tmp_path, key_for(method, 16), np.array([5, 3, 9, 40, 2]))
    monkeypatch.setitem(PLAN_VERSIONS, "best_fit", PLAN_VERSIONS["best_fit"] + 1)
    assert open_plan(tmp_path, key_for("concat", 16)) is not None and open_plan(tmp_path, key_for("best_fit", 16)) is None


def test_plans_are_byte_identical_each_time(tmp_path: Path) -> None:
    lengths = np.random.default_rng(0).integers(1, 300, size=3000)
    for method in ("concat", "best_fit"):
        for folder in ("a", "b"):
            make_plan(tmp_path / folder, key_for(method, 128), lengths)
        name = key_for(method, 128).file_name
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
