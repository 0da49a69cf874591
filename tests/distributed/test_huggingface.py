"""If these fail, a run that starts from a Hugging Face folder begins with other weights than those, on some layout or engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint.huggingface.folder import INDEX
from megatron_lite.checkpoint.huggingface.load import load_huggingface
from megatron_lite.checkpoint.load import load_logical
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.training.engine import Engine
from tests import parity
from tests.checkpoint_fakes import run_state
from tests.huggingface_cases import checkpoint, export, trained
from tests.parity import Case
from tests.parity_models import MODELS
from tests.ranks import pool

CASES = [
    Case(tp=2, dp=2, stage=3, model="gqa", precision="bf16"),
    Case(tp=4, stage=1, model="mqa", sequence_parallel=True),  # four ranks share the KV head; the head is the embedding
    Case(tp=4, stage=0, model="tiny-vocabulary"),  # the last rank's vocabulary is padding
    Case(dp=2, stage=2, model="gqa", precision="bf16"),
    Case(tp=2, stage=None, model="mqa"),
    Case(tp=2, dp=2, stage=3, model="gpt2"),  # matrices the other way round, q, k and v in one
]


def _start_and_save(case: Case, folder: Path, root: Path) -> tuple[int, float]:
    """On a rank: load the folder into an engine, then save and export from that layout; (padding elements, their sum)."""
    engine: Engine = parity.build(case)
    load_huggingface(folder, engine.owned_slices(), engine.groups)
    engine.refresh()
    state = run_state(1, model=MODELS[case.model].model_dump(mode="json"))
    save_checkpoint(root, step=1, slices=engine.owned_slices(), groups=engine.groups, attempt=1, state=state)
    weight = engine.model.embedding.weight
    cut = engine.model.embedding.cut
    padding = weight[cut.num_valid :] if weight.dim() == 2 else weight[:0]  # stage 3 holds it elsewhere
    return padding.numel(), float(padding.abs().sum())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_starts_from_those_weights(case: Case, tmp_path: Path) -> None:
    """B053, B061, B113: a folder of several bf16 files fills every rank's masters with exactly its numbers, whatever the layout
    and the engine, and leaves again from that layout bit for bit."""
    path = checkpoint(tmp_path / "origin", trained(MODELS[case.model]))
    folder = export(path, tmp_path / "out", dtype="bf16", max_file_bytes=30_000)
    assert (folder / INDEX).exists()
    ranks = pool(case.world_size).run(_start_and_save, case, folder, tmp_path / "saved")
    if case.model == "tiny-vocabulary":
        assert ranks[-1][0] > 0
    assert all(total == 0.0 for _, total in ranks)
    wanted = {name: value.to(torch.bfloat16).float() for name, value in load_logical(path)}
    got = dict(load_logical(tmp_path / "saved" / "step_00000001"))
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(got[name], value), name
    again = export(tmp_path / "saved" / "step_00000001", tmp_path / "again", dtype="bf16", max_file_bytes=30_000)
    for file in folder.iterdir():
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
