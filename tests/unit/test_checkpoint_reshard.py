"""If this fails, a run resumes with wrong weights on another layout, or goes on with damaged bytes."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from data_pipeline.errors import CheckpointError
from megatron_lite.checkpoint import load as loading
from megatron_lite.checkpoint.load import execute, load_into, load_logical, verify_checkpoint
from megatron_lite.checkpoint.manifest import check_coverage, read_manifest
from megatron_lite.checkpoint.plan import make_plan
from megatron_lite.checkpoint.save import write_manifest
from megatron_lite.checkpoint.slices import logical_slices, padding
from megatron_lite.parallel.groups import ProcessGroups
from tests.checkpoint_fakes import SHAPES, Layout, fill, logical_state, owned, run_state, write_checkpoint

LAYOUTS = [Layout(tp, dp, ownership) for tp, dp, ownership in product((1, 2, 4), (1, 2, 3), ("whole", "flat", "each"))]
ONE = Layout(1, 1, "whole")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, Path]:
    """The same values, saved under every layout."""
    root = tmp_path_factory.mktemp("written")
    for layout in LAYOUTS:
        write_checkpoint(root / str(layout), layout, logical_state())
    return {layout: root / str(layout) for layout in LAYOUTS}


@pytest.mark.parametrize("target", LAYOUTS, ids=str)
def test_pairs_of_layouts(written: dict[Layout, Path], target: Layout) -> None:
    """B104, B110, B111, B112: saved under any layout, loaded under any other: every element of every state bit-equal. Each is
    loaded under a third of all, in turn, so that every tp, dp and ownership meets every other."""
    for source in LAYOUTS[(LAYOUTS.index(target) // 3 + LAYOUTS.index(target)) % 3 :: 3]:
        manifest = read_manifest(written[source])
        for dp_rank, tp_rank in target.ranks():
            got, want = owned(target, dp_rank, tp_rank), owned(target, dp_rank, tp_rank)
            fill(want, logical_state())
            execute(written[source], make_plan(manifest, [part for each in got for part in logical_slices(each, to_write=False)]))
            for each in got:
                for view in padding(each):
                    view.zero_()
            assert all(torch.equal(one.view, other.view) for one, other in zip(got, want)), (source, target, dp_rank, tp_rank)


@pytest.mark.parametrize("block_bytes", [4, 64, 1000, 1 << 14])
def test_ranges_that_span_checksummed_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Slices that begin and end anywhere in the checksummed blocks come out whole (blocks made small here)."""
    for module in ("load", "plan", "save"):
        monkeypatch.setattr(f"megatron_lite.checkpoint.{module}.BLOCK_BYTES", block_bytes)
    write_checkpoint(tmp_path / "step", Layout(2, 2, "flat"), logical_state())
    got = owned(ONE, 0, 0)
    load_into(tmp_path / "step", got, ProcessGroups.single())
    want = owned(ONE, 0, 0)
    fill(want, logical_state())
    assert all(torch.equal(one.view, other.view) for one, other in zip(got, want))
    verify_checkpoint(tmp_path / "step")


def test_only_what_is_needed_is_read(written: dict[Layout, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that resumes on its old layout opens its own file and the one that has the replicated parameters, no other."""
    opened: set[str] = set()
    run = loading._Reader.run
    monkeypatch.setattr(loading._Reader, "run", lambda self, blocks: (opened.add(self.path.name), run(self, blocks))[1])
    layout = Layout(4, 1, "each")
    path = written[layout]
    targets = [part for each in owned(layout, 0, 2) for part in logical_slices(each, to_write=False)]
    execute(path, make_plan(read_manifest(path), targets))
    assert opened == {"rank_00000.safetensors", "rank_00002.safetensors"}


def test_whole_tensors(written: dict[Layout, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Export, evaluation and generation read whole logical tensors, in whatever batches."""
    for layout, batch in ((Layout(4, 3, "flat"), 1), (Layout(2, 2, "each"), 3000), (ONE, 1 << 28)):
        monkeypatch.setattr(loading, "_BATCH_BYTES", batch)
        for state in ("master", "exp_avg_sq"):
            got = dict(load_logical(written[layout], state=state))
            assert list(got) == sorted(SHAPES)
            assert all(torch.equal(got[name], logical_state()[name, state]) for name in SHAPES)
    assert [name for name, _ in load_logical(written[ONE], ["odd", "one"])] == ["odd", "one"]
    with pytest.raises(CheckpointError, match=r"does not store master of nothing"):
        list(load_logical(written[ONE], ["odd", "nothing"]))


def test_files_are_safetensors(written: dict[Layout, Path]) -> None:
    """Other tools read the files, and see a tensor that one rank holds as that tensor. No pickle anywhere."""
    folder = written[Layout(1, 1, "each")]
    with safe_open(folder / "rank_00000.safetensors", "pt") as file:
        assert torch.equal(
            file.get_tensor("layers.0.mlp.down.weight/exp_avg@0,0+0"), logical_state()["layers.0.mlp.down.weight", "exp_avg"]
        )
        assert list(file.keys())
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json", ".sha256"}


def test_weights_only(written: dict[Layout, Path]) -> None:
    """`init_from` takes the weights and leaves the optimizer alone."""
    got = owned(ONE, 0, 0, fill=7.0)
    load_into(written[Layout(2, 3, "flat")], got, ProcessGroups.single(), weights_only=True)
    want = owned(ONE, 0, 0)
    fill(want, logical_state())
    for one, other in zip(got, want):
        assert torch.equal(one.view, other.view) if one.state == "master" else bool((one.view == 7).all())


def test_names_must_agree(written: dict[Layout, Path]) -> None:
    """B113: a missing, renamed, additional or differently shaped tensor is an error that names it, and nothing is written."""
    slices = owned(ONE, 0, 0, fill=7.0)
    cases = {
        "not in this model: one\\|": [each for each in slices if each.parameter_name != "one"],
        "missing in the checkpoint: (.*, )?two\\|master(.|\\n)*not in this model: one\\|exp_avg": [
            _renamed(each, "one", "two") for each in slices
        ],
        "missing in the checkpoint: more\\|": [
            *slices,
            *(_renamed(each, "one", "more") for each in slices if each.parameter_name == "one"),
        ],
        "of another shape: one\\|exp_avg: stored \\[1\\], wanted \\[2\\]": [_renamed(each, "one", "one", (2,)) for each in slices],
    }
    for message, changed in cases.items():
        with pytest.raises(CheckpointError, match=message) as caught:
            load_into(written[ONE], changed, ProcessGroups.single())
        assert caught.value.exit_code == 4
        assert all(bool((each.view == 7).all()) for each in changed)


def _renamed(owned_slice: object, old: str, new: str, shape: tuple[int, ...] | None = None) -> object:
    from dataclasses import replace

    assert hasattr(owned_slice, "spec")
    pieces = tuple(replace(p, name=new, global_shape=shape or p.global_shape) if p.name == old else p for p in owned_slice.spec.pieces)
    return replace(owned_slice, spec=replace(owned_slice.spec, pieces=pieces))  # type: ignore[type-var]


def test_optimizer_states_are_required(tmp_path: Path) -> None:
    """B114: a checkpoint that lacks an optimizer state is refused, unless weights alone are asked for."""
    values = logical_state()
    folder = tmp_path / "step"
    import tests.checkpoint_fakes as fakes

    original, fakes.STATES = fakes.STATES, ("master",)
    try:
        write_checkpoint(folder, ONE, values)
    finally:
        fakes.STATES = original
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: embedding.weight\|exp_avg"):
        load_into(folder, owned(ONE, 0, 0), ProcessGroups.single())
    load_into(folder, owned(ONE, 0, 0), ProcessGroups.single(), weights_only=True)


@pytest.mark.parametrize("fault", ["flip", "flip_header", "truncate", "missing", "empty", "flip_manifest", "flip_hash"])
def test_damage_is_named(tmp_path: Path, fault: str) -> None:
    """Invariant 10: a flipped byte, a cut or a missing file is found before it is used, and named with what to do."""
    layout = Layout(2, 2, "each")
    folder = tmp_path / "step_00000001"
    manifest = write_checkpoint(folder, layout, logical_state())
    entry = manifest.files[1]
    path = folder / entry.name
    words = [entry.name]
    if fault in ("flip", "flip_header"):
        _flip(path, entry.data_start + 1234 if fault == "flip" else 20)
        words += [f"bytes {entry.data_start:,} to" if fault == "flip" else "bytes 0 to", "checksum"]
    elif fault in ("truncate", "empty"):
        data = path.read_bytes()
        path.write_bytes(data[:-5] if fault == "truncate" else b"")
        words += ["instead of"]
    elif fault == "missing":
        path.unlink()
        words += ["can't be read"]
    else:
        path = folder / ("manifest.json" if fault == "flip_manifest" else "manifest.json.sha256")
        _flip(path, 30)
        words = ["manifest.json", "damaged"]
    for use in (lambda: load_into(folder, owned(ONE, 0, 0), ProcessGroups.single()), lambda: verify_checkpoint(folder)):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert all(word in str(caught.value) for word in [*words, "checkpoint.allow_fallback=true"]), caught.value
        assert caught.value.exit_code == 4


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("column", ["first", "last", "drop", "twice"])
def test_coverage_is_exact(tmp_path: Path, column: str) -> None:
    """A gap, an overlap, a lost slice or one that two ranks wrote never becomes a manifest."""
    from dataclasses import replace

    import numpy as np

    manifest = write_checkpoint(tmp_path / "step", Layout(2, 2, "each"), logical_state())
    files = list(manifest.files)
    entry = files[0]
    if column == "drop":
        names = ("block", "state", "first", "last", "offset")
        files[0] = replace(entry, **{name: np.delete(getattr(entry, name), 5) for name in names})
    elif column == "twice":
        files.append(entry)
    else:
        changed = getattr(entry, column).copy()
        changed[3] += 1
        files[0] = replace(entry, **{column: changed})
    with pytest.raises(AssertionError):
        check_coverage(files)
    check_coverage(list(manifest.files))


def test_manifest_reads_back(tmp_path: Path) -> None:
    """What the manifest says of the run is what was saved, and a foreign format is refused."""
    state = run_state(12, phases=[{"from_sample": 0, "weights": {"web": 1.0}}])
    write_checkpoint(tmp_path / "step", ONE, logical_state(), state=state)
    manifest = read_manifest(tmp_path / "step")
    assert manifest.state == state and manifest.tensors["odd"].shape == (37,)
    value = json.loads((tmp_path / "step" / "manifest.json").read_text())
    assert value["state"]["samples"] == 12 * 16  # B033: samples are stored, not steps alone
    for change in ({"format_version": 2}, {"format": "another"}):
        write_manifest(tmp_path / "step", json.dumps({**value, **change}).encode())
        with pytest.raises(CheckpointError, match="this program reads 'megatron-lite checkpoint' version 1"):
            read_manifest(tmp_path / "step")
