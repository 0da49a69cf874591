"""The decoder-only Transformer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_lite.attention_sizes import why_written_out
from megatron_lite.config import NO_EXTRAS, LossConfig, TrainingConfig
from megatron_lite.layers.context import ForwardContext, KeyValueStore, Masks
from megatron_lite.layers.cross_entropy import IGNORED, Logits
from megatron_lite.layers.document_kernels import AskedKernel, choose_kernel
from megatron_lite.layers.dropout import EMBEDDING, DropoutPlace, dropout
from megatron_lite.layers.embedding import HeadOutput, LMHead, VocabEmbedding
from megatron_lite.layers.kernels import AttentionMask
from megatron_lite.layers.norms import LayerNorm, RMSNorm, norm_of
from megatron_lite.layers.position_bias import distances_in_row, position_bias
from megatron_lite.layers.position_embedding import LearnedPositions, PositionEmbedding, position_embedding
from megatron_lite.layers.positions import rotation
from megatron_lite.layers.watcher import Watcher
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, Source
from megatron_lite.models.block import Block
from megatron_lite.parallel.collectives import own_block
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.random import DropoutKey, sample_keys

Checkpointing = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ForwardOptions:
    """How a forward is computed, which changes nothing of what comes out, and what is optimised beside the cross-entropy."""

    checkpointing: Checkpointing = "none"  # what is computed again in the backward pass instead of kept
    document_kernel: AskedKernel = "auto"  # what keeps documents apart on GPUs
    extras: LossConfig = NO_EXTRAS

    @classmethod
    def of(cls, training: TrainingConfig) -> ForwardOptions:
        return cls(training.activation_checkpointing, training.document_kernel, training.loss)

    @property
    def recompute_attention(self) -> bool:
        """Of attention alone; with "full" it is the whole layer that is computed again."""
        return self.checkpointing == "selective"


PLAIN = ForwardOptions()


class Decoder(nn.Module):
    """Embedding, blocks, norm and head. Whether dropout is on is said by a forward's key, never by train() or eval()."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, options: ForwardOptions = PLAIN) -> None:
        super().__init__()
        self.config, self.groups, self.options = config, groups, options
        self.watcher: Watcher | None = None  # is shown activations where there is one
        vocabulary, size = config.vocabulary, config.hidden_size
        self.embedding = VocabEmbedding(vocabulary, size, groups, name="embedding.weight", factor=config.embedding_factor)
        self.position_embedding = position_embedding(config, name="position_embedding.weight")
        self.position_bias = position_bias(config, groups, name="position_bias.weight")
        self.windows = {config.attention.window_of(layer) for layer in range(config.num_hidden_layers)}
        self.layers = nn.ModuleList(
            Block(config, groups, layer=layer, recompute_attention=options.recompute_attention, cross=config.family == "seq2seq")
            for layer in range(config.num_hidden_layers)
        )
        self.final_norm = norm_of(config, name="final_norm") if config.has_final_norm else None
        tied = self.embedding.weight if config.tie_word_embeddings else None
        logits = Logits(config.logit_factor, config.final_logit_softcapping)
        self.lm_head = LMHead(vocabulary, size, groups, name="lm_head.weight", tied=tied, logits=logits, extras=options.extras)

    def forward(
        self,
        batch: Batch,
        dropout: DropoutKey | None = None,
        *,
        output: HeadOutput = "loss",
        store: KeyValueStore | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(loss summed over targets that aren't -100, fp32; their number, int64), alike on every tp rank. What comes back through the
        loss is the gradient with the extras; its value is without them.

        Other outputs stand in the place of the loss: "token_losses" fp32 [B, S], "logits" fp32 [B, S, V].
        """
        split = self.groups.sequence_parallel and store is None and batch.length % self.groups.tp.size == 0
        hidden = self.hidden(batch, dropout, store=store, split=split)
        count = (batch.targets != IGNORED).sum()
        return self.lm_head(hidden, batch.targets, output=output, split=split, watcher=self.watcher), count

    def hidden(self, batch: Batch, key: DropoutKey | None, *, store: KeyValueStore | None, split: bool) -> Tensor:
        """The last hidden states, after the final norm where there is one, [B, S/tp, D] where split, else [B, S, D]."""
        context = self._context(batch, key, store=store, split=split)
        x = self._embedded(batch, context, self.embedding, self.position_embedding)
        return self._through(self.layers, x, context, self.final_norm)

    def _embedded(
        self, text: Batch | Source, context: ForwardContext, embedding: VocabEmbedding, position_embedding: PositionEmbedding | None
    ) -> Tensor:
        x = embedding(text.inputs, split=context.split)
        if position_embedding is not None:
            if isinstance(position_embedding, LearnedPositions):
                cached = context.store is not None  # then a few tokens, anywhere; else counted in each document from 0
                position_embedding.require(int(text.positions.max()) + 1 if cached else text.longest or text.length)
            positions = own_block(text.positions, self.groups.tp, dim=1) if context.split else text.positions
            x = x + position_embedding(positions).to(x.dtype)
        return dropout(x, self.config.hidden_dropout, context.dropout, where=EMBEDDING)

    def _through(self, layers: nn.ModuleList, x: Tensor, context: ForwardContext, norm: RMSNorm | LayerNorm | None) -> Tensor:
        """x through the layers and, where there is one, the norm behind them."""
        copies = 1 if context.split else self.groups.tp.size
        for layer in cast(Iterable[Block], layers):
            if self.watcher is not None:
                self.watcher.see(f"activations/{layer.name}/in", x, copies=copies)
            if self.options.checkpointing == "full" and torch.is_grad_enabled():
                x = checkpoint(layer, x, context.within(layer.name), use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, context.within(layer.name))
            if self.watcher is not None:
                self.watcher.see(f"activations/{layer.name}/out", x, copies=copies)
        return x if norm is None else norm(x)

    @property
    def blocks(self) -> list[nn.Module]:
        """Every layer of the model, for what is done layer by layer."""
        return list(self.layers)

    def logits(self, batch: Batch, store: KeyValueStore | None = None) -> Tensor:
        """fp32 [B, S, V] on every tp rank, padding cut off; no dropout."""
        return self(batch, output="logits", store=store)[0]

    def token_losses(self, batch: Batch) -> Tensor:
        """fp32 [B, S], 0 where there is no target; no dropout, no gradient."""
        return self(batch, output="token_losses")[0]

    def _context(self, batch: Batch, key: DropoutKey | None, *, store: KeyValueStore | None, split: bool) -> ForwardContext:
        assert store is None or batch.segments is None, "decoding takes one document a row"
        stored = None if store is None else store.extend_positions(batch.positions)
        return self._around(batch.positions, batch.samples, key, masks=self._masks(batch, stored, store), split=split, store=store)

    def _around(
        self,
        positions: Tensor,
        samples: Tensor,
        key: DropoutKey | None,
        *,
        masks: Masks,
        split: bool,
        store: KeyValueStore | None = None,
    ) -> ForwardContext:
        """The context of tokens at these positions [B, S]."""
        keys = sample_keys(key, samples) if key is not None else None
        first = self.groups.tp.rank * (positions.shape[1] // self.groups.tp.size) if split else 0
        return ForwardContext(
            rotation=rotation(positions, self.config.head_size, self.config.rope) if self.config.position.type == "rope" else None,
            masks=masks,
            split=split,
            dropout=DropoutPlace(keys, first) if keys is not None else None,
            attention_dropout=DropoutPlace(keys) if keys is not None else None,
            store=store,
        )

    def _masks(self, batch: Batch, stored: Tensor | None, store: KeyValueStore | None) -> Masks:
        """By the window of the layers that it is for, with `stored` [B, T] the positions of all keys in decoding."""
        if stored is not None:
            plain = store is not None and not store.padded  # then a row sees all that is stored
            masks = {
                window: AttentionMask() if plain and window is None else AttentionMask.of_positions(batch.positions, stored, window=window)
                for window in self.windows
            }
        else:
            masks = {window: self._document_mask(batch, window) for window in self.windows}
        if self.position_bias is None:
            return masks
        if stored is not None:
            distances = batch.positions[:, :, None] - stored[:, None, :]
        else:
            distances = distances_in_row(batch.length, batch.positions.device)
        bias = self.position_bias(distances)
        return {window: mask.with_bias(bias) for window, mask in masks.items()}

    def _document_mask(self, batch: Batch, window: int | None) -> AttentionMask:
        if batch.segments is None:
            return AttentionMask(window=window)
        on_cpu = batch.segments.device.type == "cpu"
        choice = choose_kernel(
            self.options.document_kernel,
            device=batch.segments.device,
            dtype=self.embedding.weight.dtype,
            head_size=self.config.head_size,
            changed_scores=why_written_out(self.config, on_cpu=on_cpu, dropout=False),
        )
        boundaries, longest = batch.boundaries, batch.longest
        return AttentionMask.of_segments(batch.segments, kernel=choice.name, boundaries=boundaries, longest=longest, window=window)
