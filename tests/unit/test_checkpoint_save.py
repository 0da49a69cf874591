"""If this fails, a crash, a full disk or the clean-up of old checkpoints loses a run."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from data_pipeline.errors import CheckpointError, ConfigError
from data_pipeline.schema import validate
from megatron_lite.checkpoint import save as saving
from megatron_lite.checkpoint.committed import committed
from megatron_lite.checkpoint.find import Choice, checkpoint_at, newest_checkpoint, quarantine, survey
from megatron_lite.checkpoint.load import load_into, verify_checkpoint
from megatron_lite.checkpoint.retention import apply_retention
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.config import CheckpointConfig
from megatron_lite.parallel.groups import ProcessGroups
from tests.checkpoint_fakes import Layout, fill, logical_state, owned, run_state
from tests.paths import ROOT

ONE = Layout(1, 1, "each")
POINTS = ("slice", "before_manifest", "before_rename", "before_parent_fsync")


def _save(root: Path, step: int, *, attempt: int = 1, seed: int | None = None, **state: object) -> Path:
    slices = owned(ONE, 0, 0)
    fill(slices, logical_state(step if seed is None else seed))
    return save_checkpoint(
        root, step=step, slices=slices, groups=ProcessGroups.single(), attempt=attempt, state=run_state(step, **state), on_point=_die_at
    )


def _die_at(point: str) -> None:
    if point == os.environ.get("DIE_AT"):
        os._exit(9)


def _newest(root: Path, **options: bool) -> Choice:
    choice = newest_checkpoint(root, ProcessGroups.single(), **options)
    assert choice is not None
    return choice


def _holds(path: Path, step: int) -> bool:
    got, want = owned(ONE, 0, 0), owned(ONE, 0, 0)
    fill(want, logical_state(step))
    load_into(path, got, ProcessGroups.single())
    return all(torch.equal(one.view, other.view) for one, other in zip(got, want))


@pytest.mark.parametrize("point", POINTS)
def test_death_at_any_point(tmp_path: Path, point: str) -> None:
    """B105: killed inside a save, the run goes on from the last committed step; what was not committed doesn't exist."""
    root = tmp_path / "checkpoints"
    _save(root, 4)
    code = f"from pathlib import Path; from tests.unit.test_checkpoint_save import _save; _save(Path({str(root)!r}), 6)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "DIE_AT": point}, timeout=120, check=False)
    assert done.returncode == 9
    choice = _newest(root)
    committed = point == "before_parent_fsync"
    assert choice.info.step == (6 if committed else 4) and not choice.passed_over
    assert [path.name for path in choice.unfinished] == ([] if committed else ["step_00000006.tmp-1"])
    assert _holds(choice.info.path, choice.info.step)
    path = _save(root, 6, attempt=2)  # the next attempt saves the same step
    assert _newest(root).info.path == path and _holds(path, 6)


def test_state_reads_back(tmp_path: Path) -> None:
    """B033: the newest checkpoint gives samples and tokens consumed, and the optimizer's scalars."""
    _save(tmp_path, 7)
    info = _newest(tmp_path).info
    assert (info.state.samples, info.state.tokens, info.state.optimizer) == (7 * 16, 7 * 256, {"step": 7.0})
    assert info.num_bytes == sum(path.stat().st_size for path in info.path.glob("*.safetensors"))


def test_saving_a_step_twice(tmp_path: Path) -> None:
    """A stop just after a save keeps it; a folder of that name from another attempt is moved aside, never deleted."""
    first = _save(tmp_path, 3)
    born = first.stat().st_ino
    assert _save(tmp_path, 3) == first and first.stat().st_ino == born
    assert _save(tmp_path, 3, attempt=2) == first and first.stat().st_ino != born
    assert (tmp_path / "step_00000003.bad").stat().st_ino == born
    assert quarantine(first).name == "step_00000003.bad-2"


def test_nothing_there_is_a_fresh_start(tmp_path: Path) -> None:
    """No folder, an empty one, and one with foreign entries have no checkpoint; they are not errors."""
    assert newest_checkpoint(tmp_path / "none", ProcessGroups.single()) is None
    for name in ("latest", "step_12", "best", "step_00000004.bad", "step_00000004.tmp-1"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_00000005").write_text("not a folder")
    assert newest_checkpoint(tmp_path, ProcessGroups.single()) is None


@pytest.mark.parametrize("damage", ["empty_files", "no_manifest", "no_file", "empty_folder", "renamed", "short"])
def test_a_damaged_newest_is_refused(tmp_path: Path, damage: str) -> None:
    """B107: a damaged newest checkpoint stops the run and names the good ones; never a silent step 0 or an older step."""
    _save(tmp_path, 2)
    _save(tmp_path, 4)
    newest = _save(tmp_path, 6)
    if damage == "empty_files":
        for path in newest.iterdir():
            path.write_bytes(b"")
    elif damage == "no_manifest":
        (newest / "manifest.json").unlink()
    elif damage == "no_file":
        next(newest.glob("*.safetensors")).unlink()
    elif damage == "empty_folder":
        shutil.rmtree(newest)
        newest.mkdir()
    elif damage == "renamed":
        newest = newest.rename(tmp_path / "step_00000099")
    else:
        path = next(newest.glob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        _newest(tmp_path)
    for word in (newest.name, "Good: step_00000004, step_00000002", "checkpoint.allow_fallback=true"):
        assert word in str(caught.value)
    choice = _newest(tmp_path, allow_fallback=True)
    assert choice.info.step == 4 and [path for path, _ in choice.passed_over] == [newest]
    quarantine(choice.passed_over[0][0])
    assert _newest(tmp_path).info.step == 4


def test_a_flipped_byte_is_passed_over(tmp_path: Path) -> None:
    """A checkpoint that looks whole but has a flipped byte is refused when loaded; a fallback finds it before choosing."""
    _save(tmp_path, 2)
    newest = _save(tmp_path, 4)
    path = next(newest.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"checkpoint.allow_fallback=true"):
        _holds(_newest(tmp_path).info.path, 4)
    choice = _newest(tmp_path, allow_fallback=True)
    assert choice.info.step == 2 and choice.passed_over[0][0] == newest and path.name in choice.passed_over[0][1]
    assert _holds(choice.info.path, 2)


def test_a_checkpoint_by_its_path(tmp_path: Path) -> None:
    """One that is named outright is that one, or an error that says what is wrong with it."""
    path = _save(tmp_path, 2)
    assert checkpoint_at(path, ProcessGroups.single()).state.samples == 32
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        checkpoint_at(path, ProcessGroups.single())


def test_only_damaged_ones(tmp_path: Path) -> None:
    """Where every checkpoint is damaged the run stops, with or without a fallback."""
    (_save(tmp_path, 2) / "manifest.json").write_text("{}")
    for allow in (False, True):
        with pytest.raises(CheckpointError, match="No good checkpoint is left"):
            _newest(tmp_path, allow_fallback=allow)


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B119: no space leaves the previous checkpoint the newest, no leftovers, and says so."""
    _save(tmp_path, 2)

    def full(_file: object, _data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(saving, "_write_all", full)
    with pytest.raises(CheckpointError, match=r"no space left(.|\n)*Earlier checkpoints are intact") as caught:
        _save(tmp_path, 4)
    assert caught.value.exit_code == 4
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"] and _holds(_newest(tmp_path).info.path, 2)


def test_file_size_limit(tmp_path: Path) -> None:
    """B119: a real limit on the size of files (ulimit -f) is met as a full disk is."""
    _save(tmp_path, 2)
    size = next((tmp_path / "step_00000002").glob("*.safetensors")).stat().st_size
    code = (
        "import resource; from pathlib import Path; from tests.unit.test_checkpoint_save import _save\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2}, {resource.RLIM_INFINITY}))\n_save(Path({str(tmp_path)!r}), 4)"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert "CheckpointError" in done.stderr and "no space left" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


@pytest.mark.parametrize(("keep_last", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5])])
def test_retention(tmp_path: Path, keep_last: int, left: list[int]) -> None:
    """B118: the newest few stay, the one just written always."""
    for step in range(1, 6):
        path = _save(tmp_path, step)
    apply_retention(tmp_path, keep_last=keep_last, keep_every_steps=None, protect=path)
    assert [info.step for info in survey(tmp_path).complete] == left


@pytest.mark.parametrize(("keep_last", "every"), [(1, None), (3, None), (1, 1), (1, 3), (2, 4), (3, 5)])
def test_the_most_on_disk_is_what_retention_leaves_and_a_new_one(tmp_path: Path, keep_last: int, every: int | None) -> None:
    """Saved at every step, as a run that is stopped again and again: the disk that a plan asks for is just enough."""
    wanted = validate(CheckpointConfig, {"keep_last": keep_last, "keep_every_steps": every})
    most = 0
    for step in range(1, 13):
        path = _save(tmp_path, step)
        most = max(most, len(committed(tmp_path)))
        apply_retention(tmp_path, keep_last=keep_last, keep_every_steps=every, protect=path)
        if step > keep_last:
            assert most == wanted.most_on_disk(step), step


def test_retention_leaves_what_is_not_its_own(tmp_path: Path) -> None:
    """B118: foreign, later, damaged and milestone folders are neither counted nor touched; leftovers of dead saves go."""
    foreign = _save(tmp_path, 5000, model={"hidden_size": 8})
    older = _save(tmp_path, 1, model={"hidden_size": 8})
    for step in (2, 4, 6, 8, 10):
        path = _save(tmp_path, step)
    later = _save(tmp_path, 12)
    (_save(tmp_path, 3) / "manifest.json").unlink()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_00000009.tmp-1").mkdir()
    (tmp_path / "step_00000007.deleting").mkdir()
    deleted = apply_retention(tmp_path, keep_last=2, keep_every_steps=4, protect=path)
    assert [each.name for each in deleted] == ["step_00000002", "step_00000006"]
    assert [info.step for info in survey(tmp_path).complete] == [1, 4, 8, 10, 12, 5000]
    assert foreign.exists() and older.exists() and later.exists() and (tmp_path / "notes").exists()
    assert not survey(tmp_path).unfinished and len(survey(tmp_path).damaged) == 1


def test_retention_refuses_to_keep_nothing(tmp_path: Path) -> None:
    """B118: keep_last 0 is refused; without a sound new checkpoint nothing is deleted."""
    first, second = _save(tmp_path, 1), _save(tmp_path, 2)
    with pytest.raises(ConfigError, match=r"checkpoint.keep_last: got 0"):
        apply_retention(tmp_path, keep_last=0, keep_every_steps=None, protect=second)
    (second / "manifest.json").unlink()
    assert apply_retention(tmp_path, keep_last=1, keep_every_steps=None, protect=second) == []
    assert first.exists()


def test_memory_stays_bounded() -> None:
    """Saving and loading hold a few blocks besides the tensors, never a second copy."""
    script = ROOT / "tests" / "benchmarks" / "bench_checkpoint.py"
    done = subprocess.run([sys.executable, str(script), "--megabytes", "400"], capture_output=True, text=True, timeout=120, check=True)
    measured = json.loads(done.stdout)
    assert measured["save_extra_mb"] < 40 and measured["load_extra_mb"] < 150, measured


def test_hash_file(tmp_path: Path) -> None:
    """`sha256sum -c` checks a manifest without this program."""
    folder = _save(tmp_path, 5)
    verify_checkpoint(folder)
    if shutil.which("sha256sum"):
        subprocess.run(["sha256sum", "-c", "--quiet", "manifest.json.sha256"], cwd=folder, check=True, timeout=60)
