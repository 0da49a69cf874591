"""Log-probabilities of given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from megatron_lite.inference.prompts import require_texts
from megatron_lite.layers.cross_entropy import IGNORED
from megatron_lite.models.batch import Batch, Source
from megatron_lite.models.decoder import Decoder
from megatron_lite.models.seq2seq import Seq2Seq

_NO_PADDING_ID = 0  # behind a row's end, where nothing before it looks


@torch.inference_mode()
def score(
    model: Decoder, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], *, begin_id: int | None = None
) -> list[list[float | None]]:
    """The log-probability in nats of each token of each text, given its prompt and the tokens before it. Collective over tp.

    Of an encoder-decoder, prompts are sources, their ends included. `begin_id` stands before every prompt, or target. Without it and
    without a prompt the first token has none. Raises ConfigError for what is longer than the context or has ids outside the vocabulary, and
    for an empty source.
    """
    require_texts(model, prompts, texts, begin_id=begin_id)
    start = [] if begin_id is None else [begin_id]
    of_source = isinstance(model, Seq2Seq)
    before = [start if of_source else [*start, *prompt] for prompt in prompts]
    rows = [[*prompt, *text] for prompt, text in zip(before, texts)]
    longest = max((len(row) for row in rows), default=0) - 1
    if longest < 1:
        return [[None] * len(text) for text in texts]
    inputs = torch.full((len(rows), longest), _NO_PADDING_ID)
    targets = torch.full_like(inputs, IGNORED)
    for number, row in enumerate(rows):
        if len(row) > 1:
            inputs[number, : len(row) - 1] = torch.tensor(row[:-1])
            targets[number, : len(row) - 1] = torch.tensor(row[1:])
    device = next(model.parameters()).device
    positions = torch.arange(longest).expand_as(inputs)
    samples = torch.zeros(len(rows), dtype=torch.int64)
    batch = Batch(inputs.to(device), targets.to(device), positions.to(device), None, samples.to(device))
    if of_source:
        batch = replace(batch, source=Source.of(prompts, device=device))
    losses = model.token_losses(batch)
    found: list[list[float | None]] = []
    for prompt, row, own in zip(before, rows, losses.tolist()):
        known = [None, *(-loss for loss in own[: len(row) - 1])] if row else []
        found.append(known[len(prompt) :])
    return found
