"""A Llama of somebody else's in a plain torch loop: `transformers` or `litgpt`, run by their own environment's Python.

    python peer_llama.py {transformers,litgpt} {steps,start,train} JSON

JSON has the shape under Hugging Face's names, `sequence_length`, `batch_size`, `threads`, `precision` (fp32, bf16: bf16
weights with fp32 masters, autocast: fp32 weights under torch's bf16 autocast), the optimizer's numbers and `seed`. The loop
is what a careful user writes: SDPA, fused AdamW, one foreach norm for clipping, gradients set to None.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tests.benchmarks.turns import serve


def transformers_model(shape: dict[str, Any]) -> tuple[torch.nn.Module, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    described: dict[str, Any] = {"max_position_embeddings": shape["sequence_length"], "attn_implementation": "sdpa", "use_cache": False}
    config = LlamaConfig(**{key: shape[key] for key in MODEL_KEYS}, **described)
    model = LlamaForCausalLM(config)

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return model(input_ids=inputs, labels=targets, shift_labels=targets).loss

    return model, loss


MODEL_KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "tie_word_embeddings", "rms_norm_eps",
)  # fmt: skip


def litgpt_model(shape: dict[str, Any]) -> tuple[torch.nn.Module, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]:
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy

    assert not shape["tie_word_embeddings"], "litgpt's Llama is untied"
    config = Config(
        block_size=shape["sequence_length"],
        padded_vocab_size=shape["vocab_size"],
        vocab_size=shape["vocab_size"],
        n_layer=shape["num_hidden_layers"],
        n_head=shape["num_attention_heads"],
        n_query_groups=shape["num_key_value_heads"],
        n_embd=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        norm_eps=shape["rms_norm_eps"],
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    model = GPT(config)
    model.max_seq_length = shape["sequence_length"]
    model.apply(
        lambda module: torch.nn.init.normal_(module.weight, std=0.02) if isinstance(module, torch.nn.Linear | torch.nn.Embedding) else None
    )

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_cross_entropy(model(inputs), targets, chunk_size=0)

    return model, loss


class Loop:
    """A model, AdamW on fp32 masters, clipping."""

    def __init__(self, peer: str, shape: dict[str, Any]) -> None:
        torch.manual_seed(shape["seed"])
        self.shape = shape
        self.model, self.loss = {"transformers": transformers_model, "litgpt": litgpt_model}[peer](shape)
        self.parameters: list[torch.Tensor] = list(self.model.parameters())
        self.masters: list[torch.Tensor] = self.parameters
        if shape["precision"] == "bf16":
            self.masters = [torch.nn.Parameter(parameter.detach().clone()) for parameter in self.parameters]
            self.model.bfloat16()
            for module in self.model.modules():  # angles stay exact
                for name, buffer in module.named_buffers(recurse=False):
                    if name.endswith("inv_freq"):
                        module._buffers[name] = buffer.float()
        matrices = [parameter for parameter in self.masters if parameter.dim() >= 2]
        others = [parameter for parameter in self.masters if parameter.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": shape["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
            lr=shape["lr"],
            betas=tuple(shape["betas"]),
            eps=shape["eps"],
            fused=True,
        )
        if shape.get("compile"):
            self.model.compile()

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, lr: float) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.shape["precision"] == "autocast"):
            loss = self.loss(inputs, targets)
        loss.backward()
        if self.masters is not self.parameters:
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, self.shape["max_grad_norm"], foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters is not self.parameters:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, self.masters)
        return loss.detach()


def random_batch(shape: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(shape["seed"])
    rows = torch.randint(shape["vocab_size"], (shape["batch_size"], shape["sequence_length"] + 1), generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def steps(peer: str, shape: dict[str, Any]) -> None:
    """One step on the same random rows whenever told to."""
    loop, batch = Loop(peer, shape), random_batch(shape)
    about = {"torch": torch.__version__, "parameters": sum(parameter.numel() for parameter in loop.parameters)}
    serve(lambda: loop.step(*batch, shape["lr"]).item(), about)


def train(peer: str, shape: dict[str, Any]) -> None:
    """Train on random windows of `text`, score the held-out tail in windows that don't overlap; print one JSON object."""
    began = time.perf_counter()
    length, num_steps = shape["sequence_length"], shape["steps"]
    data = torch.frombuffer(bytearray(Path(shape["text"]).read_bytes()), dtype=torch.uint8).long()
    cut = len(data) - len(data) // 10
    train_data, heldout = data[:cut], data[cut:]
    loop, generator = Loop(peer, shape), torch.Generator().manual_seed(shape["seed"])
    for step in range(1, num_steps + 1):
        starts = torch.randint(len(train_data) - length, (shape["batch_size"],), generator=generator)
        rows = train_data[starts[:, None] + torch.arange(length + 1)]
        loop.step(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), lr_at(step, shape))
    trained = time.perf_counter()
    num_windows = (len(heldout) - 1) // length
    inputs, targets = heldout[: num_windows * length].view(-1, length), heldout[1 : num_windows * length + 1].view(-1, length)
    with torch.no_grad():
        sums = [
            F.cross_entropy(logits_of(loop.model(a)).flatten(0, 1).float(), b.flatten(), reduction="sum")
            for a, b in zip(inputs.split(128), targets.split(128))
        ]
    print(
        json.dumps(
            {
                "loss": float(sum(sums)) / (num_windows * length),
                "targets": num_windows * length,
                "train_s": trained - began,
                "process_s": time.perf_counter() - began,
            }
        )
    )


def logits_of(output: Any) -> torch.Tensor:
    return getattr(output, "logits", output)


def lr_at(step: int, shape: dict[str, Any]) -> float:
    """Linear warm-up, then a cosine down to min_lr_ratio of the peak."""
    warm_up, peak, floor = shape["warmup_steps"], shape["lr"], shape["min_lr_ratio"]
    if step < warm_up:
        return peak * step / warm_up
    progress = (step - warm_up) / max(shape["steps"] - warm_up, 1)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))


if __name__ == "__main__":
    described = json.loads(sys.argv[3])
    torch.set_num_threads(described["threads"])
    {"steps": steps, "train": train}[sys.argv[2]](sys.argv[1], described)
