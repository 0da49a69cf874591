"""The encoder-decoder Transformer (Vaswani et al. 2017): p(target | source), the decoder looking at the encoder's output in each layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megatron_lite.layers.context import EncodedSource, ForwardContext, KeyValueStore
from megatron_lite.layers.embedding import VocabEmbedding
from megatron_lite.layers.kernels import AttentionMask
from megatron_lite.layers.linear import enter_tp
from megatron_lite.layers.norms import norm_of
from megatron_lite.layers.position_bias import distances_in_row, position_bias
from megatron_lite.layers.position_embedding import position_embedding
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, Source
from megatron_lite.models.block import Block
from megatron_lite.models.decoder import PLAIN, Decoder, ForwardOptions
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.random import DropoutKey


class Encoder(nn.Module):
    """The encoder's own parameters; Seq2Seq runs them. Its embedding is the decoder's where they share one."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, options: ForwardOptions) -> None:
        super().__init__()
        size = config.hidden_size
        self.embedding: VocabEmbedding | None = None
        if not config.encoder.share_embedding:
            factor = config.embedding_factor
            self.embedding = VocabEmbedding(config.vocabulary, size, groups, name="encoder.embedding.weight", factor=factor)
        self.position_embedding = position_embedding(config, name="encoder.position_embedding.weight")
        self.position_bias = position_bias(config, groups, name="encoder.position_bias.weight", bidirectional=True)
        self.layers = nn.ModuleList(
            Block(config, groups, layer=layer, recompute_attention=options.recompute_attention, within="encoder.")
            for layer in range(config.encoder_layers)
        )
        self.final_norm = norm_of(config, name="encoder.final_norm") if config.has_final_norm else None


class Seq2Seq(Decoder):
    """A decoder whose layers attend to a source, and the encoder that reads it. Batches have a `source`; targets see that of their
    own segment. In decoding the store has the memory, made by `encode`."""

    def __init__(self, config: ModelConfig, groups: ProcessGroups, options: ForwardOptions = PLAIN) -> None:
        super().__init__(config, groups, options)
        self.encoder = Encoder(config, groups, options)

    @property
    def blocks(self) -> list[nn.Module]:
        return [*self.encoder.layers, *self.layers]

    def _context(self, batch: Batch, key: DropoutKey | None, *, store: KeyValueStore | None, split: bool) -> ForwardContext:
        return replace(super()._context(batch, key, store=store, split=split), memory=self._memory(batch, key, store))

    def _memory(self, batch: Batch, key: DropoutKey | None, store: KeyValueStore | None) -> EncodedSource | None:
        if store is not None:
            return store.memory
        assert batch.source is not None, "an encoder-decoder's batch has a source"
        targets = torch.zeros_like(batch.inputs, dtype=torch.int32) if batch.segments is None else batch.segments
        mask = AttentionMask.between_segments(targets, batch.source.segments)
        return EncodedSource(self._encoded(batch.source, batch.samples, key), mask)

    @torch.no_grad()
    def encode(self, source: Source) -> EncodedSource:
        """What decoding sees of sources [B, S], one a row in segment 0, the rest of the row being padding; no dropout. Each layer makes
        its keys and values of it at its first forward, and they are kept."""
        mask = AttentionMask.between_segments(torch.zeros_like(source.segments[:, :1]), source.segments)
        samples = torch.zeros_like(source.inputs[:, 0])
        numbers = torch.arange(len(samples), device=samples.device)
        return EncodedSource(self._encoded(source, samples, None), mask, projected={}, sources=numbers)

    def _document_mask(self, batch: Batch, window: int | None) -> AttentionMask:
        """On CPU one mask for all pairs, unless something else is asked for: they are short, and a kernel's call for each costs more."""
        if batch.segments is not None and batch.segments.device.type == "cpu" and self.options.document_kernel == "auto":
            return AttentionMask.of_segments(batch.segments, kernel="blocks", window=window)
        return super()._document_mask(batch, window)

    def _encoded(self, source: Source, samples: Tensor, key: DropoutKey | None) -> Tensor:
        """[B, S, D] on every tp rank, inside the tp region: gathered once for all layers."""
        tp, encoder = self.groups.tp, self.encoder
        split = self.groups.sequence_parallel and source.inputs.shape[1] % tp.size == 0
        mask = AttentionMask.between_segments(source.segments, source.segments)
        if encoder.position_bias is not None:
            mask = mask.with_bias(encoder.position_bias(distances_in_row(source.length, source.inputs.device)))
        context = self._around(source.positions, samples, key, masks={None: mask}, split=split)
        embedding = self.embedding if encoder.embedding is None else encoder.embedding
        x = self._embedded(source, context.within("encoder"), embedding, encoder.position_embedding)
        return enter_tp(self._through(encoder.layers, x, context, encoder.final_norm), tp, split=split)
