"""Our side of the decoding benchmark: `python -m tests.benchmarks.own_generate JSON`, as peer_generate.py has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from megatron_lite.checkpoint.huggingface.folder import read_model
from megatron_lite.checkpoint.huggingface.load import load_huggingface
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.inference.generate import start_sampling
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.models.build import build_model, ready_to_decode
from megatron_lite.models.decoder import Decoder
from megatron_lite.parallel.groups import ProcessGroups
from tests.benchmarks.peer_generate import checksum, prompts
from tests.benchmarks.turns import serve


def opened(folder: Path) -> Decoder:
    model = build_model(read_model(folder)[1], ProcessGroups.single(), seed=0)
    load_huggingface(folder, model_slices(model), ProcessGroups.single())
    return ready_to_decode(model)


def main(asked: dict[str, Any]) -> None:
    torch.set_num_threads(asked["threads"])
    model, texts = opened(Path(asked["folder"])), prompts(asked)

    def step() -> float:
        answers = start_sampling(model, texts, max_new_tokens=asked["new_tokens"], sampling=SamplingOptions(temperature=0)).finish()
        return checksum([answer.tokens for answer in answers])

    serve(step, {"torch": torch.__version__})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
