"""A model and what its rows have read: all that sampling and beam search know of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.inference.kv_cache import KVCache
from megatron_lite.models.batch import Batch, Source
from megatron_lite.models.decoder import Decoder
from megatron_lite.models.seq2seq import Seq2Seq
from megatron_lite.parallel.groups import Axis

PREFILL_TOKENS = 512  # of a row that go through the model at once: bounds the mask and the activations
_NO_PADDING_ID = 0  # what stands in the places of padding; nothing sees it


class DecodingRows(Protocol):
    """B rows of text, read so far. Every method is collective over tp."""

    def step(self, tokens: Tensor) -> Tensor:
        """Read one more token of each row, int64 [B]; fp32 logits [B, V] of what comes next, padding of the vocabulary cut off."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Row n becomes what row rows[n] was, int64 [B']: fewer rows, more, some of them several times."""
        ...

    def agreed(self, choice: Tensor) -> Tensor:
        """The first tp rank's choice on all of them: a last bit that differed would part their texts for good."""
        ...


class DecoderRows:
    """Texts (token ids, of any lengths, none empty) that a model has read; `logits` [B, V] follow them. With an encoder-decoder they
    begin its answers to `sources`, as many.

    There is room for `more` further tokens a row, a row's end of the context respected. Equal rows are read once.
    """

    def __init__(
        self, model: Decoder, texts: Sequence[Sequence[int]], *, more: int, sources: Sequence[Sequence[int]] | None = None
    ) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        rows_read = list(zip(map(tuple, texts), map(tuple, sources or [()] * len(texts)), strict=True))
        unlike_rows = list(dict.fromkeys(rows_read))
        unlike = [text for text, _ in unlike_rows]
        shortest, longest = min(map(len, unlike)), max(map(len, unlike))
        room = min(more, model.config.max_position_embeddings - shortest + 1)
        memory = None
        if isinstance(model, Seq2Seq):
            memory = model.encode(Source.of([source for _, source in unlike_rows], device=self._device))
        self._cache = KVCache(longest + room, memory=memory, padded=shortest < longest)  # short rows go on behind their padding
        self._next = torch.tensor([len(text) for text in unlike], device=self._device)  # each row's next position
        self.logits = self._prefill(unlike)
        if len(unlike) < len(texts):
            place = {row: number for number, row in enumerate(unlike_rows)}
            rows = torch.tensor([place[row] for row in rows_read], device=self._device)
            self.reorder(rows)
            self.logits = self.logits[rows]

    def step(self, tokens: Tensor) -> Tensor:
        logits = last_logits(self.model, tokens[:, None], self._next[:, None], self._cache)
        self._next = self._next + 1
        return logits

    def reorder(self, rows: Tensor) -> None:
        self._cache.reorder(rows)
        self._next = self._next[rows]

    def agreed(self, choice: Tensor) -> Tensor:
        return agreed(choice, self.model.groups.tp)

    def _prefill(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, V] after each text; shorter ones are padded on the left, at negative positions."""
        longest = max(map(len, texts))
        ids = torch.full((len(texts), longest), _NO_PADDING_ID)
        positions = torch.arange(longest).expand(len(texts), longest) - torch.tensor([[longest - len(text)] for text in texts])
        for row, text in enumerate(texts):
            ids[row, longest - len(text) :] = torch.tensor(text)
        ids, positions = ids.to(self._device), positions.to(self._device)
        for first in range(0, longest, PREFILL_TOKENS):
            part = slice(first, min(first + PREFILL_TOKENS, longest))
            if part.stop < longest:
                self.model.hidden(_batch(ids[:, part], positions[:, part]), None, store=self._cache, split=False)
            else:
                logits = last_logits(self.model, ids[:, part], positions[:, part], self._cache)
        return logits


def agreed(choice: Tensor, tp: Axis) -> Tensor:
    """The first tp rank's on all of them."""
    if tp.group is not None:
        dist.broadcast(choice, src=tp.ranks[0], group=tp.group)
    return choice


def last_logits(model: Decoder, ids: Tensor, positions: Tensor, cache: KVCache) -> Tensor:
    """fp32 [B, V] after the last of ids [B, S]; the head sees no other place."""
    hidden = model.hidden(_batch(ids, positions), None, store=cache, split=False)
    return model.lm_head(hidden[:, -1:], None, output="logits", split=False)[:, 0]


def _batch(ids: Tensor, positions: Tensor) -> Batch:
    return Batch(ids, ids, positions, None, ids)  # neither targets nor dropout are asked for
