"""If this fails, ranks disagree about a checkpoint: one hangs, or each goes on from another step."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest
import torch

from data_pipeline.errors import CheckpointError
from megatron_lite.checkpoint import save as saving
from megatron_lite.checkpoint.find import newest_checkpoint, survey
from megatron_lite.checkpoint.load import load_into
from megatron_lite.checkpoint.save import save_checkpoint
from tests.checkpoint_fakes import Layout, fill, logical_state, owned, run_state
from tests.ranks import RankError, Ranks, groups_of

LAYOUTS = [Layout(2, 1, "each"), Layout(1, 2, "flat"), Layout(1, 2, "each"), Layout(1, 2, "whole")]


def _save(
    root: Path, layout: Layout, step: int, attempt: int = 1, broken_rank: int | None = None, dies: tuple[int, str] | None = None
) -> str:
    """The path, or what was raised."""
    groups = groups_of(tp=layout.tp, dp=layout.dp)
    slices = owned(layout, groups.dp.rank, groups.tp.rank)
    fill(slices, logical_state(step))
    write_all = saving._write_all
    if groups.rank == broken_rank:
        saving._write_all = _full
    try:
        return str(
            save_checkpoint(
                root,
                step=step,
                slices=slices,
                groups=groups,
                attempt=attempt,
                state=run_state(step),
                on_point=lambda point: os.kill(os.getpid(), signal.SIGKILL) if (groups.rank, point) == dies else None,
            )
        )
    except CheckpointError as error:
        return f"error: {error}"
    finally:
        saving._write_all = write_all


def _full(_file: object, _data: memoryview) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _load(path: Path, layout: Layout, step: int) -> str:
    groups = groups_of(tp=layout.tp, dp=layout.dp)
    got, want = (owned(layout, groups.dp.rank, groups.tp.rank) for _ in range(2))
    fill(want, logical_state(step))
    try:
        load_into(path, got, groups)
    except CheckpointError as error:
        return f"error: {error}"
    return str(all(torch.equal(one.view, other.view) for one, other in zip(got, want)))


def _choose(roots: list[Path]) -> tuple[str, int] | None:
    """Each rank looks into its own folder."""
    groups = groups_of(dp=2)
    choice = newest_checkpoint(roots[groups.rank], groups)
    return None if choice is None else (choice.info.path.name, choice.info.state.samples)


@pytest.mark.parametrize("source", LAYOUTS, ids=str)
def test_saved_and_loaded_by_ranks(ranks2: Ranks, tmp_path: Path, source: Layout) -> None:
    """B110, B111, B120: ranks save together and load under every other layout, bit-equal."""
    paths = ranks2.run(_save, tmp_path, source, 3)
    assert paths == [str(tmp_path / "step_00000003")] * 2
    for target in LAYOUTS:
        assert ranks2.run(_load, Path(paths[0]), target, 3) == ["True", "True"]


def test_saving_twice(ranks2: Ranks, tmp_path: Path) -> None:
    """B120: a save on schedule, then one at the end or on a signal for the same step, returns on every rank."""
    first, second = (ranks2.run(_save, tmp_path, LAYOUTS[1], 3) for _ in range(2))
    assert first == second == [str(tmp_path / "step_00000003")] * 2


@pytest.mark.parametrize("broken_rank", [0, 1])
def test_one_rank_out_of_space(ranks2: Ranks, tmp_path: Path, broken_rank: int) -> None:
    """B119: every rank learns of it; the previous checkpoint stays the newest; nothing is left behind; a retry works."""
    ranks2.run(_save, tmp_path, LAYOUTS[0], 2)
    for told in ranks2.run(_save, tmp_path, LAYOUTS[0], 4, broken_rank=broken_rank):
        assert f"rank {broken_rank}: no space left" in told and "Earlier checkpoints are intact" in told
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]
    ranks2.run(_save, tmp_path, LAYOUTS[0], 4)
    assert [info.step for info in survey(tmp_path).complete] == [2, 4]


@pytest.mark.parametrize("dies", [(1, "slice"), (0, "before_manifest"), (0, "before_rename"), (1, "before_parent_fsync")])
def test_one_rank_is_killed(tmp_path: Path, dies: tuple[int, str]) -> None:
    """B105: SIGKILL of one rank inside a save: the next start finds a whole checkpoint, and saves that step again."""
    ranks = Ranks(2)
    try:
        ranks.run(_save, tmp_path, LAYOUTS[0], 4)
        with pytest.raises(RankError, match=f"rank {dies[0]}: died"):
            ranks.run(_save, tmp_path, LAYOUTS[0], 6, dies=dies, timeout_s=60)
        step = survey(tmp_path).complete[-1].step
        assert step in ((6,) if dies == (0, "before_parent_fsync") else (4,) if dies[1] != "before_parent_fsync" else (4, 6))
        for target in LAYOUTS[:2]:
            assert ranks.run(_load, tmp_path / f"step_{step:08d}", target, step) == ["True", "True"]
        ranks.run(_save, tmp_path, LAYOUTS[1], 6, attempt=2)
        assert ranks.run(_load, tmp_path / "step_00000006", LAYOUTS[0], 6) == ["True", "True"]
    finally:
        ranks.close()


def test_the_choice_is_one(ranks2: Ranks, tmp_path: Path) -> None:
    """B109: rank 0 chooses for all, whatever the others see; a rank that can't read the choice fails all, and nobody hangs."""
    ranks2.run(_save, tmp_path / "seen", LAYOUTS[0], 6)
    (tmp_path / "empty").mkdir()
    assert ranks2.run(_choose, [tmp_path / "seen", tmp_path / "empty"]) == [("step_00000006", 96)] * 2
    assert ranks2.run(_choose, [tmp_path / "empty", tmp_path / "seen"]) == [None, None]
    for told in ranks2.run(_load_own, [tmp_path / "seen" / "step_00000006", tmp_path / "empty" / "step_00000006"]):
        assert told.startswith("error") and "rank 1:" in told and "rank 0:" not in told


def _load_own(paths: list[Path]) -> str:
    return _load(paths[groups_of(tp=2).rank], LAYOUTS[0], 6)


def test_damage_in_one_rank_is_told_to_all(ranks2: Ranks, tmp_path: Path) -> None:
    """A damaged byte that only one rank reads stops both, with the file's name."""
    path = Path(ranks2.run(_save, tmp_path, LAYOUTS[0], 6)[0]) / "rank_00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-7] ^= 4
    path.write_bytes(data)
    for told in ranks2.run(_load, path.parent, LAYOUTS[0], 6):
        assert "rank 1:" in told and path.name in told and "do not match their checksum" in told
