"""The held-out score of a run as peer_llama.py takes it: `python -m tests.benchmarks.own_score RUN TEXT`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from launcher.finished import open_run
from megatron_lite.models.batch import Batch


def main(run: Path, text: Path) -> None:
    """Mean loss of the bytes of the text's last tenth, in windows that don't overlap; prints one JSON object."""
    finished = open_run(run, [], command="score")
    length = finished.config.training.sequence_length
    data = np.frombuffer(text.read_bytes(), dtype=np.uint8).astype(np.int64)
    heldout = data[len(data) - len(data) // 10 :]
    num_windows = (len(heldout) - 1) // length
    inputs, targets = heldout[: num_windows * length].reshape(-1, length), heldout[1 : num_windows * length + 1].reshape(-1, length)
    total = 0.0
    with torch.no_grad():
        for at in range(0, num_windows, 128):
            rows, wanted = inputs[at : at + 128], targets[at : at + 128]
            batch = Batch.from_rows(rows, wanted, [[0]] * len(rows), range(len(rows)), document_mask=False)
            total += float(finished.model(batch)[0])
    print(json.dumps({"loss": total / targets.size, "targets": targets.size}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
