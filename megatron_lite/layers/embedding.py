"""Token embedding and output head, the vocabulary cut over tp.

The vocabulary is padded to a multiple of tp, all padding at the end: a last rank may hold some or nothing else.
Padding rows are never read, so their weight stays 0 and their gradient is exactly 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.config import NO_EXTRAS, LossConfig
from megatron_lite.layers.cross_entropy import PLAIN, Logits, vocab_parallel_cross_entropy
from megatron_lite.layers.linear import enter_tp, leave_tp, parameter_of
from megatron_lite.layers.matmul import linear
from megatron_lite.layers.watcher import Watcher
from megatron_lite.parallel.collectives import gather_last
from megatron_lite.parallel.groups import Axis, ProcessGroups
from megatron_lite.parallel.shard_spec import Piece, ShardSpec
from megatron_lite.sizes import vocabulary_rows

HeadOutput = Literal["loss", "token_losses", "logits"]


@dataclass(frozen=True)
class VocabularyCut:
    """This rank's run of the vocabulary: rows [start, start + num_valid), then padding up to num_rows."""

    start: int
    num_valid: int
    num_rows: int

    @classmethod
    def of(cls, vocabulary: int, tp: Axis) -> VocabularyCut:
        num_rows = vocabulary_rows(vocabulary, tp.size)
        start = min(tp.rank * num_rows, vocabulary)
        return cls(start, min(num_rows, vocabulary - start), num_rows)


def vocabulary_spec(name: str, vocabulary: int, hidden_size: int, tp: Axis) -> ShardSpec:
    """A logical [V, D] matrix cut into tp runs of rows, the last ones perhaps short or empty."""
    cut = VocabularyCut.of(vocabulary, tp)
    piece = Piece(name, (vocabulary, hidden_size), (cut.start, 0), (cut.num_valid, hidden_size))
    return ShardSpec((piece,) if cut.num_valid else (), (cut.num_rows, hidden_size), cut=tp.size > 1)


class VocabEmbedding(nn.Module):
    """Token ids [B, S] -> [B, S/tp or S, D], times `factor`: each rank looks up its own; reduce-scatter or all-reduce over tp."""

    def __init__(self, vocabulary: int, hidden_size: int, groups: ProcessGroups, *, name: str, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor
        self.tp, self.cut = groups.tp, VocabularyCut.of(vocabulary, groups.tp)
        self.weight = parameter_of(vocabulary_spec(name, vocabulary, hidden_size, groups.tp))

    def forward(self, ids: Tensor, *, split: bool) -> Tensor:
        found = self._looked_up(ids, split=split)
        return found if self.factor == 1.0 else found * self.factor

    def _looked_up(self, ids: Tensor, *, split: bool) -> Tensor:
        if self.tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self.cut.start
        elsewhere = (local < 0) | (local >= self.cut.num_valid)
        mine = F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[..., None], 0.0)
        return leave_tp(mine, self.tp, split=split)


class LMHead(nn.Module):
    """Hidden states [B, S/tp or S, D] -> loss or logits, which are made as `logits` says. The weight is its own, or the embedding's
    Parameter when tied. `extras` are what is optimised beside the loss.

    The loss is computed here, inside forward, so that an engine that gathers weights around forward covers it.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden_size: int,
        groups: ProcessGroups,
        *,
        name: str,
        tied: nn.Parameter | None = None,
        logits: Logits = PLAIN,
        extras: LossConfig = NO_EXTRAS,
    ) -> None:
        super().__init__()
        self.logits, self.extras = logits, extras
        self.tp, self.vocabulary, self.cut = groups.tp, vocabulary, VocabularyCut.of(vocabulary, groups.tp)
        self.weight = tied if tied is not None else parameter_of(vocabulary_spec(name, vocabulary, hidden_size, groups.tp))

    def forward(self, hidden: Tensor, targets: Tensor | None, *, output: HeadOutput, split: bool, watcher: Watcher | None = None) -> Tensor:
        """ "loss": sum over targets [B, S] that aren't -100, fp32 scalar. "token_losses": each, fp32 [B, S], 0 where there
        is none. "logits": fp32 [B, S, V], all-gathered over tp. Alike on every tp rank."""
        hidden = enter_tp(hidden, self.tp, split=split)
        if output == "logits":
            products = linear(hidden, self.weight)
            logits = products.float() if self.logits.is_plain else self.logits.of(products)
            return gather_last(logits, self.tp)[..., : self.vocabulary]
        assert targets is not None
        losses = vocab_parallel_cross_entropy(
            hidden.flatten(0, 1),
            self.weight,
            targets.flatten(),
            self.tp,
            vocab_start=self.cut.start,
            num_valid_rows=self.cut.num_valid,
            vocabulary=self.vocabulary,
            logits=self.logits,
            extras=self.extras,
            watcher=watcher,
            per_token=output == "token_losses",
        )
        return losses.view_as(targets) if output == "token_losses" else losses
