"""An encoder-decoder of somebody else's in a plain torch loop, `transformers`' Marian, run by its own environment's Python.

    python -m tests.benchmarks.peer_marian JSON

JSON has `batches` (an .npz: for each step its pairs' source and target ids laid end to end, and their lengths), `sources` (the same for
what is to be translated), `hypotheses` (where the translations' ids go), the shape, the optimizer's numbers, `threads` and `seed`. One
pair a row, a step's pairs sorted by length and padded to the longest of 32; bf16 by autocast; label smoothing and its mean over targets
as torch's cross_entropy has them. What a careful user writes.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.benchmarks.peer_llama import lr_at

TOGETHER = 32  # pairs, of about the same length, so that little is padding
PAD = 0  # of the inputs, where attention_mask is 0; targets there are -100


def main(asked: dict[str, Any]) -> None:
    from transformers import MarianConfig, MarianMTModel

    torch.set_num_threads(asked["threads"])
    torch.manual_seed(asked["seed"])
    end = asked["eod_id"]
    model = MarianMTModel(
        MarianConfig(
            vocab_size=asked["vocab_size"],
            d_model=asked["hidden_size"],
            encoder_layers=asked["num_hidden_layers"],
            decoder_layers=asked["num_hidden_layers"],
            encoder_attention_heads=asked["num_attention_heads"],
            decoder_attention_heads=asked["num_attention_heads"],
            encoder_ffn_dim=asked["intermediate_size"],
            decoder_ffn_dim=asked["intermediate_size"],
            dropout=asked["dropout"],
            activation_function="relu",
            scale_embedding=True,
            init_std=asked["hidden_size"] ** -0.5,
            max_position_embeddings=256,
            share_encoder_decoder_embeddings=True,
            pad_token_id=PAD,
            eos_token_id=end,
            decoder_start_token_id=end,
            forced_eos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=asked["lr"], betas=tuple(asked["betas"]), eps=asked["eps"], weight_decay=asked["weight_decay"], fused=True
    )
    model.train()
    began, losses = time.perf_counter(), []
    for step, pairs in enumerate(_pairs(asked["batches"]), start=1):
        for group in optimizer.param_groups:
            group["lr"] = lr_at(step, asked)
        losses.append(_train_step(model, optimizer, pairs, asked))
    train_s = time.perf_counter() - began
    model.eval()
    answers = _translate(model, [source for source, _ in next(_pairs(asked["sources"]))], asked)
    np.savez(asked["hypotheses"], ids=np.concatenate(answers), lengths=np.array([len(answer) for answer in answers]))
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    print(json.dumps({"threads": asked["threads"], "train_s": train_s, "last_loss": losses[-1], "parameters": trained}))


def _pairs(path: str) -> Any:
    """The pairs of each step: (source ids, target ids), their ends included."""
    with np.load(path) as file:
        stored = dict(file)  # a file gives a whole new array each time that it is asked
    at, row = 0, 0
    for count in stored["pairs_per_step"]:
        pairs = []
        for source, target in stored["lengths"][row : row + count]:
            pairs.append((stored["ids"][at : at + source], stored["ids"][at + source : at + source + target]))
            at += source + target
        row += count
        yield pairs


def _padded(texts: list[np.ndarray], filler: int) -> torch.Tensor:
    longest = max(map(len, texts))
    return torch.from_numpy(np.stack([np.pad(text.astype(np.int64), (0, longest - len(text)), constant_values=filler) for text in texts]))


def _train_step(model: Any, optimizer: torch.optim.Optimizer, pairs: list[tuple[np.ndarray, np.ndarray]], asked: dict[str, Any]) -> float:
    """One update by all pairs of the step; the loss without smoothing, a target."""
    ordered, total = sorted(pairs, key=lambda pair: pair[0].size + pair[1].size), sum(target.size for _, target in pairs)
    plain = 0.0
    for first in range(0, len(ordered), TOGETHER):
        plain += _add_gradients(model, ordered[first : first + TOGETHER], total, asked)
    torch.nn.utils.clip_grad_norm_(model.parameters(), asked["max_grad_norm"], foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return plain / total


def _add_gradients(model: Any, pairs: list[tuple[np.ndarray, np.ndarray]], total: int, asked: dict[str, Any]) -> float:
    sources, targets = _padded([source for source, _ in pairs], PAD), _padded([target for _, target in pairs], -100)
    mask = _padded([np.ones(len(source)) for source, _ in pairs], 0)
    inputs = torch.cat([torch.full((len(pairs), 1), asked["eod_id"]), targets[:, :-1].clamp(min=0)], dim=1)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(input_ids=sources, attention_mask=mask, decoder_input_ids=inputs, use_cache=False).logits
    flat = logits.float().flatten(0, 1), targets.flatten()
    (F.cross_entropy(*flat, label_smoothing=asked["label_smoothing"], reduction="sum") / total).backward()
    with torch.no_grad():
        return float(F.cross_entropy(*flat, reduction="sum"))


@torch.no_grad()
def _translate(model: Any, sources: list[np.ndarray], asked: dict[str, Any]) -> list[np.ndarray]:
    answers: list[np.ndarray] = []
    for first in range(0, len(sources), 50):
        some = sources[first : first + 50]
        found = model.generate(
            input_ids=_padded(some, PAD),
            attention_mask=_padded([np.ones(len(source)) for source in some], 0),
            num_beams=asked["num_beams"],
            max_new_tokens=asked["max_tokens"],
            do_sample=False,
        )
        for answer in found.numpy():
            said = answer[1:]  # behind the start
            ends = np.flatnonzero(said == asked["eod_id"])
            answers.append(said[: ends[0]] if ends.size else said)
    return answers


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
