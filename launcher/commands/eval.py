"""`mlite eval`: the held-out score of a checkpoint, as one JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from data_pipeline.errors import DataError
from data_pipeline.pair_loader import PairRowSource
from launcher.datasets import AnyRows, open_datasets, open_rows
from launcher.evaluation.heldout import evaluate
from launcher.finished import FinishedRun, open_run
from launcher.metrics import to_line
from launcher.micro_batch import resolve_micro_batch


def evaluate_run(path: Path, overrides: Sequence[str]) -> None:
    """Print the score of the newest checkpoint on the held-out rows of its own data, or of data.path=DIR."""
    run = open_run(path, overrides, command="eval")
    rows = heldout_rows(run)
    config, groups = run.config, run.groups
    with torch.no_grad():
        found = evaluate(
            run.model,
            rows,
            groups=groups,
            micro_batch_size=resolve_micro_batch(
                config.training.micro_batch_size,
                global_batch_size=config.training.global_batch_size,
                dp=groups.dp.size,
                sequence_length=config.row_tokens,
                device_type=run.device.type,
            ),
            max_sequences=config.evaluation.max_sequences or None,
            document_mask=config.data.document_mask,
            device=run.device,
        )
    assert found is not None
    if groups.rank == 0:
        record = {name.removeprefix("eval/"): value for name, value in found.record().items()}
        if isinstance(rows, PairRowSource) and (missing := sum(sum(reasons.values()) for reasons in rows.left_out)):
            record["pairs_too_long"] = missing
        data = ", ".join(source.path for source in config.data.mixture)
        print(to_line({"run": config.run.name, "step": run.state.step, **record, "data": data, "checkpoint": str(run.checkpoint)}), end="")


def heldout_rows(run: FinishedRun) -> AnyRows:
    """Raises DataError for data of another tokenizer: its ids would mean nothing to the model."""
    datasets = open_datasets(run.config.data)
    for dataset in datasets:
        if dataset.tokenizer_hash != run.state.tokenizer_hash:
            raise DataError(
                f"{dataset.location} was made with tokenizer {dataset.tokenizer_hash[:12]}, the model was trained with {run.state.tokenizer_hash[:12]}. "
                "Build it again with `tokenizer: {type: pretrained, name_or_path: TRAINING_DATA/tokenizer.json}`"
            )
    return open_rows(run.config, datasets, split="validation")
