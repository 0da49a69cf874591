"""How close an exported model is in `transformers`, what the export costs, and whether it comes back, as JSON:
`python tests/benchmarks/bench_export.py [--write]`. Weights are the initial ones with noise of their own size on all of them,
gains too. The distance of both to `transformers` in float64 shows how much of the difference is fp32's. Memory is the high-water mark (VmHWM) of a process of its own, less that before the export."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron_lite.checkpoint.huggingface.load import load_huggingface  # noqa: E402
from megatron_lite.checkpoint.slices import model_slices  # noqa: E402
from megatron_lite.model_config import ModelConfig  # noqa: E402
from megatron_lite.models.batch import Batch  # noqa: E402
from megatron_lite.models.build import build_model  # noqa: E402
from megatron_lite.models.decoder import Decoder  # noqa: E402
from megatron_lite.parallel.groups import ProcessGroups  # noqa: E402
from megatron_lite.sizes import num_parameters  # noqa: E402
from tests.huggingface_cases import MODELS, checkpoint, export, trained  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "export.json"
LENGTH = 128
SHAPES = {
    "5M, grouped heads": ModelConfig(vocab_size=4096, max_position_embeddings=512, num_key_value_heads=2),
    "16M, grouped heads": ModelConfig(
        vocab_size=8192,
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=1024,
        max_position_embeddings=512,
    ),
    "124M, tied": ModelConfig(
        vocab_size=50257,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=2048,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    ),
}


def measure(config: ModelConfig, folder: Path) -> dict[str, Any]:
    """One model: out, into `transformers`, back."""
    from transformers import AutoModelForCausalLM

    model = trained(config, noise=config.init.std)
    assert isinstance(model, Decoder)
    path = checkpoint(folder / "saved", model)
    command = [sys.executable, __file__, "--export", str(path), str(folder / "out")]
    cost = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    theirs = AutoModelForCausalLM.from_pretrained(folder / "out")
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocabulary, (2, LENGTH + 1), generator=generator)
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    batch = Batch(inputs, targets, torch.arange(LENGTH).expand(2, LENGTH), None, torch.arange(2))
    with torch.no_grad():
        logits, ours = theirs(inputs).logits, model.logits(batch)
        loss_sum, count = model(batch)
        their_loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).double(), targets.flatten())
        exact = theirs.double()(inputs).logits
    back = build_model(config, ProcessGroups.single(), seed=9)
    began = time.perf_counter()
    load_huggingface(folder / "out", model_slices(back), ProcessGroups.single())
    load_s = time.perf_counter() - began
    pairs = zip(model.parameters(), back.parameters(), strict=True)
    return {
        "parameters": num_parameters(config),
        "largest_logit": round(float(ours.abs().max()), 1),
        "max_logit_difference": float((logits - ours).abs().max()),
        "ours_to_float64": float((ours - exact).abs().max()),
        "theirs_to_float64": float((logits - exact).abs().max()),
        "loss_difference": abs(float(their_loss) - float(loss_sum) / int(count)),
        "identical_when_back": all(torch.equal(one, other) for one, other in pairs),
        **cost,
        "load_s": round(load_s, 2),
    }


def export_alone(path: Path, out: Path) -> dict[str, Any]:
    """Seconds, and how far memory rose, after a small export has loaded what any export needs."""
    small = checkpoint(out.parent / "small", build_model(MODELS["gqa"], ProcessGroups.single(), seed=1))
    export(small, out.parent / "small-out")
    before, began = most_bytes_held(), time.perf_counter()
    export(path, out, max_file_bytes=10**8)
    seconds = time.perf_counter() - began
    num_bytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return {
        "file_mb": round(num_bytes / 1e6, 1),
        "export_s": round(seconds, 2),
        "export_extra_mb": round((most_bytes_held() - before) / 1e6),
    }


def most_bytes_held() -> int:
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--export", nargs=2, metavar=("CHECKPOINT", "OUT"), type=Path, help="Used by the script itself.")
    parser.add_argument("--write", action="store_true", help=f"Write {RESULTS.name} too.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.export:
        print(json.dumps(export_alone(*options.export)))
        sys.exit()
    found = {}
    for name, config in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(config, Path(folder))
    import transformers

    text = json.dumps({"transformers": transformers.__version__, "models": found}, indent=1)
    print(text)
    if options.write:
        RESULTS.write_text(text + "\n", encoding="utf-8")
