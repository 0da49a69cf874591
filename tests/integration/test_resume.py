"""If these fail, a run that was stopped or killed is not the run that it would have been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from data_pipeline.loader import batch_id
from launcher.commands.trace import rows_of
from tests.integration.jobs import Workspace

PLAIN = ("training.engine=torch", "parallel.zero_stage=0")
TP2 = ("parallel.tp=2",)
DP2_Z3_BF16 = ("parallel.zero_stage=3", "training.precision=bf16")


def numbers(records: list[dict[str, object]]) -> list[dict[str, object]]:
    return [{key: value for key, value in record.items() if key not in ("batch_id",)} for record in records]


def test_killed_inside_every_part_of_a_save_then_bit_equal(workspace: Workspace) -> None:
    """SIGKILL at each named point of a save, and between saves; metrics end bit-equal to a run that nothing happened to (B105)."""
    code, output = workspace.run(*TP2, "run.name=whole", world=2)
    assert code == 0, output
    said = ""
    faults = ["slice:1:1", "before_manifest:2", "kill:5:1", "before_rename:1", "before_parent_fsync:1", "kill:8"]
    for attempt, fault in enumerate(faults, start=1):
        code, output = workspace.run(*TP2, "run.name=killed", world=2, fault=fault)
        assert code != 0, (fault, output)
        assert workspace.status("killed")["attempt"] == attempt
        said += output
    code, output = workspace.run(*TP2, "run.name=killed", world=2)
    assert code == 0, output
    assert workspace.metrics("killed") == workspace.metrics("whole")
    steps = [record["step"] for record in workspace.metrics("killed") if "loss" in record]
    assert steps == list(range(1, 9))  # each step stands once
    assert workspace.checkpoints("killed") == ["step_00000006", "step_00000008"]
    assert workspace.events("killed", "superseded")
    assert "is incomplete: its save was cut off" in said  # B105
    assert workspace.events("killed", "incomplete")


def test_stopped_and_resumed_twice_in_bf16_stage_3(workspace: Workspace) -> None:
    """dp 2, ZeRO 3, bf16: two kills between saves; bit-equal on the same layout (B033, B044, B081, B155)."""
    layout = (*DP2_Z3_BF16, "logging.interval_steps=3", "logging.statistics_interval_steps=3")
    assert workspace.run(*layout, "run.name=whole", world=2)[0] == 0
    for fault in ("kill:4:1", "before_rename:1"):
        assert workspace.run(*layout, "run.name=killed", world=2, fault=fault)[0] != 0
    code, output = workspace.run(*layout, "run.name=killed", world=2)
    assert code == 0, output
    assert workspace.metrics("killed") == workspace.metrics("whole")
    detailed = [record["step"] for record in workspace.metrics("whole") if "gradients/layers.0" in record]
    assert detailed == [3, 6], "statistics by layer, where asked for"


@pytest.mark.parametrize(
    ("first", "first_world", "second", "second_world"),
    [(TP2, 2, ("parallel.zero_stage=3",), 2), (("parallel.zero_stage=2",), 2, (*PLAIN, "training.micro_batch_size=1"), 1)],
)
def test_goes_on_under_another_layout(
    workspace: Workspace, first: tuple[str, ...], first_world: int, second: tuple[str, ...], second_world: int
) -> None:
    """Half a run under one layout, half under another: within 1e-4 of one plain process, same batches, same learning rates
    (B033, B037, B039, B077, B078, B081, B082, B154)."""
    assert workspace.run(*PLAIN, "run.name=plain")[0] == 0
    code, output = workspace.run(*first, "run.name=moved", world=first_world, fault="kill:7")
    assert code != 0, output
    code, output = workspace.run(*second, "run.name=moved", world=second_world)
    assert code == 0, output
    plain, moved = workspace.metrics("plain"), workspace.metrics("moved")
    assert len(plain) == len(moved)
    for one, other in zip(plain, moved):
        assert one.keys() == other.keys()
        for key, value in one.items():
            if key in ("loss", "eval/loss", "grad_norm"):
                assert other[key] == pytest.approx(value, rel=1e-4 if key == "grad_norm" else 0, abs=1e-4), (one, other)
            elif not key.startswith("eval/"):
                assert other[key] == value, (key, one, other)


def test_resume_at_the_end_of_an_epoch_trains_the_next_one(workspace: Workspace, dataset: Path) -> None:
    """Stopping where the data has been seen once neither ends the run nor skips rows (B035, B036)."""
    from data_pipeline.loader import Dataset, RowSource

    rows = RowSource.open([(Dataset.open(dataset), 1.0, None)], sequence_length=32, packing="best_fit", seed=7)
    batch = (
        next(size for size in (4, 5, 6, 7, 3, 2) if len(rows) % size == 0)
        if any(len(rows) % size == 0 for size in (2, 3, 4, 5, 6, 7))
        else 1
    )
    epoch = len(rows) // batch
    size = (
        f"training.global_batch_size={batch}",
        "training.micro_batch_size=1",
        f"checkpoint.interval_steps={epoch}",
        f"training.steps={epoch + 2}",
    )
    assert workspace.run(*PLAIN, *size, "run.name=whole", "evaluation.interval_steps=null")[0] == 0
    assert workspace.run(*PLAIN, *size, "run.name=cut", "evaluation.interval_steps=null", fault=f"kill:{epoch + 1}")[0] != 0
    code, output = workspace.run(*PLAIN, *size, "run.name=cut", "evaluation.interval_steps=null")
    assert code == 0 and f"from step {epoch} " in output
    assert workspace.metrics("cut") == workspace.metrics("whole")
    assert workspace.metrics("cut")[-1]["step"] == epoch + 2


def test_batch_size_and_weights_may_change_and_are_on_record(workspace: Workspace) -> None:
    """After a change of batch size the next sample is the next unseen one (B033), the change stands in events.jsonl, and a trace of each
    step finds the rows that it took."""
    assert workspace.run(*PLAIN, "training.steps=3", "checkpoint.interval_steps=3")[0] == 0
    code, output = workspace.run(*PLAIN, "training.steps=5", "training.global_batch_size=2", "optimizer.lr=1e-3")
    assert code == 0, output
    assert {event["key"] for event in workspace.events("a", "changed")} == {"training.steps", "training.global_batch_size", "optimizer.lr"}
    straight = workspace.run(*PLAIN, "run.name=b", "training.steps=8", "training.global_batch_size=2", "training.micro_batch_size=2")
    assert straight[0] == 0
    ids = {record["step"]: record.get("batch_id") for record in workspace.metrics("b") if "loss" in record}
    changed = {record["step"]: record.get("batch_id") for record in workspace.metrics("a") if "loss" in record}
    assert [changed[4], changed[5]] == [ids[7], ids[8]]  # 3 steps of 4 samples are 6 steps of 2
    rows, steps = rows_of(workspace.path("a"), sequence_length=None, method=None, seed=None, split="train")
    for step, size in ((1, 4), (3, 4), (4, 2), (5, 2)):
        assert changed[step] == batch_id([rows[steps.sample(step, row)].digest() for row in range(size)])


def test_evaluation_does_not_touch_training(workspace: Workspace, make_workspace: Callable[[Path], Workspace]) -> None:
    """With dropout: the same losses with evaluation every 2 steps and without any (B056, B057), at the same steps (B152)."""
    assert workspace.run(*PLAIN, "run.name=often", "evaluation.interval_steps=2")[0] == 0
    assert workspace.run(*PLAIN, "run.name=never", "evaluation.max_sequences=0")[0] == 0
    losses = {name: [record for record in workspace.metrics(name) if "loss" in record] for name in ("often", "never")}
    assert losses["often"] == losses["never"]
    assert [record["step"] for record in workspace.metrics("often") if "eval/loss" in record] == [0, 2, 4, 6, 8]
