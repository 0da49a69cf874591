"""Text from prompts: one forward over the prompts, then one a token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.inference.kv_cache import KVCache
from megatron_lite.inference.sampling import SamplingOptions, choose, draw
from megatron_lite.models.batch import Batch
from megatron_lite.models.decoder import Decoder

PREFILL_TOKENS = 512  # of a row that go through the model at once: bounds the mask and the activations
_NO_PADDING_ID = 0  # what stands in the places of padding; nothing sees it

Finish = Literal["stop", "length", "context"]


@dataclass(frozen=True)
class Generation:
    """What follows one prompt."""

    tokens: list[int] = field(default_factory=list)  # without the stop token
    finish: Finish = "length"  # a stop token came; max_new_tokens are there; the context is full


@torch.no_grad()
def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingOptions | Sequence[SamplingOptions] | None = None,
    begin_id: int | None = None,
    stop_ids: Sequence[int] = (),
    on_token: Callable[[int, int], None] | None = None,
) -> list[Generation]:
    """Continue each prompt (token ids; of any lengths), as if it were alone. Collective over tp: all ranks give the same.

    `begin_id` is put before every prompt: what training put before a document. `sampling` is one for all rows or one a row
    (give rows different seeds for different samples). A row ends at a stop token, after max_new_tokens, or when prompt and
    answer fill max_position_embeddings. `on_token(row, id)` hears every token as it comes. Raises ConfigError for prompts
    that are empty, too long or have ids outside the vocabulary.
    """
    texts = [[*([] if begin_id is None else [begin_id]), *prompt] for prompt in prompts]
    options = [sampling or SamplingOptions()] * len(texts) if sampling is None or isinstance(sampling, SamplingOptions) else list(sampling)
    _check(model, texts, options, max_new_tokens)
    answers: list[list[int]] = [[] for _ in texts]
    finish: list[Finish] = ["length" for _ in texts]
    context = model.config.max_position_embeddings
    rows = list(range(len(texts))) if max_new_tokens else []  # still running, by their place in the batch
    if not rows:
        return [Generation() for _ in texts]
    device = next(model.parameters()).device
    shortest, longest = min(map(len, texts)), max(map(len, texts))
    cache = KVCache(longest + min(max_new_tokens, context - shortest + 1))  # short rows go on behind their padding
    logits = _prefill(model, texts, cache, device)
    while True:
        draws = torch.tensor([draw(options[row].seed, len(answers[row])) for row in rows], dtype=torch.float64)
        chosen = _agreed(choose(logits, [options[row] for row in rows], draws), model)
        going: list[int] = []
        for place, (row, token) in enumerate(zip(rows, chosen.tolist())):
            if token in stop_ids:
                finish[row] = "stop"
                continue
            answers[row].append(token)
            if on_token is not None:
                on_token(row, token)
            if len(answers[row]) == max_new_tokens:
                continue
            if len(texts[row]) + len(answers[row]) > context:
                finish[row] = "context"
                continue
            going.append(place)
        if not going:
            return [Generation(tokens, why) for tokens, why in zip(answers, finish)]
        if len(going) < len(rows):
            kept = torch.tensor(going, device=device)
            cache.keep(kept)
            chosen, rows = chosen[kept], [rows[place] for place in going]
        positions = torch.tensor([[len(texts[row]) + len(answers[row]) - 1] for row in rows], device=device)
        logits = _last_logits(model, chosen[:, None], positions, cache)


def _check(model: Decoder, texts: Sequence[Sequence[int]], options: Sequence[SamplingOptions], max_new_tokens: int) -> None:
    context, vocabulary = model.config.max_position_embeddings, model.config.vocabulary
    faults = []
    if max_new_tokens < 0:
        faults.append(Fault("max_new_tokens", max_new_tokens, "a count from 0"))
    if len(options) != len(texts):
        faults.append(Fault("sampling", f"{len(options)} options", f"one, or one for each of the {len(texts)} prompts"))
    for row, text in enumerate(texts):
        if not text:
            faults.append(Fault(f"prompt {row}", "no tokens", "at least one", "give a begin id, such as the end-of-document id"))
        elif len(text) > context:
            faults.append(Fault(f"prompt {row}", f"{len(text)} tokens", f"at most max_position_embeddings ({context})", "shorten it"))
        outside = [token for token in text if not 0 <= token < vocabulary]
        if outside:
            faults.append(Fault(f"prompt {row}", outside[0], f"ids from 0 to {vocabulary - 1}", "encode it with the run's own tokenizer"))
    if faults:
        raise ConfigError(faults)


def _prefill(model: Decoder, texts: Sequence[Sequence[int]], cache: KVCache, device: torch.device) -> Tensor:
    """Logits [B, V] after each prompt; shorter ones are padded on the left, at negative positions."""
    longest = max(map(len, texts))
    ids = torch.full((len(texts), longest), _NO_PADDING_ID)
    positions = torch.arange(longest).expand(len(texts), longest) - torch.tensor([[longest - len(text)] for text in texts])
    for row, text in enumerate(texts):
        ids[row, longest - len(text) :] = torch.tensor(text)
    ids, positions = ids.to(device), positions.to(device)
    for first in range(0, longest, PREFILL_TOKENS):
        part = slice(first, min(first + PREFILL_TOKENS, longest))
        if part.stop < longest:
            model.hidden(_batch(ids[:, part], positions[:, part]), None, store=cache, split=False)
        else:
            logits = _last_logits(model, ids[:, part], positions[:, part], cache)
    return logits


def _last_logits(model: Decoder, ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
    """fp32 [B, V] after the last of ids [B, S]; the head sees no other place."""
    hidden = model.hidden(_batch(ids, positions), None, store=cache, split=False)
    return model.lm_head(hidden[:, -1:], None, output="logits", split=False)[:, 0]


def _batch(ids: Tensor, positions: Tensor) -> Batch:
    return Batch(ids, torch.full_like(ids, -100), positions, None, torch.zeros(len(ids), dtype=torch.int64, device=ids.device))


def _agreed(tokens: Tensor, model: Decoder) -> Tensor:
    """The first tp rank's tokens on all of them: a last bit that differed would part their texts for good."""
    tp = model.groups.tp
    if tp.group is not None:
        dist.broadcast(tokens, src=tp.ranks[0], group=tp.group)
    return tokens
