"""`transformers` generating text greedily when told to, run by its own environment's Python: `python peer_generate.py JSON`.

JSON has `folder` (of a Hugging Face model), `batch_size`, `prompt_tokens`, `new_tokens` and `threads`.
"""

from __future__ import annotations

import json
import sys
import zlib
from typing import Any

import torch

from tests.benchmarks.turns import serve


def prompts(asked: dict[str, Any]) -> list[list[int]]:
    """Random token ids, as many in each row."""
    shape = (asked["batch_size"], asked["prompt_tokens"])
    rows: list[list[int]] = torch.randint(asked["vocabulary"], shape, generator=torch.Generator().manual_seed(1)).tolist()
    return rows


def checksum(answers: list[list[int]]) -> float:
    """Equal for the same tokens."""
    return float(zlib.crc32(json.dumps(answers).encode()))


def main(asked: dict[str, Any]) -> None:
    import transformers

    torch.set_num_threads(asked["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(asked["folder"], attn_implementation="sdpa").eval()
    ids, count = torch.tensor(prompts(asked)), asked["new_tokens"]
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def step() -> float:
        made = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return checksum(made[:, ids.shape[1] :].tolist())

    serve(step, {"torch": torch.__version__, "transformers": transformers.__version__})


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
