"""If this fails, a variation of the model is another model under tensor parallelism, or not the one that its name says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lite.config import LossConfig
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import ForwardOptions
from megatron_lite.models.init import distribution
from megatron_lite.parallel.replicated import register_gradient_sums
from megatron_lite.parallel.shard_spec import spec_of
from tests import reference
from tests.distributed.test_tensor_parallel import KEY, STARTS, UNEVEN, batch_of, rows
from tests.logical import Blocks, assemble, blocks_of, gradient
from tests.ranks import Ranks, groups_of
from tests.variations import GEMMA2, GPT2, GPTJ, NEOX, VASWANI

BLOCKS: list[dict[str, Any]] = [
    GPT2,
    VASWANI,
    GEMMA2,
    NEOX | {"norm": {"type": "layer_norm", "bias": True, "zero_centred": True}},
    GPTJ | {"residual": {"parallel": "one_norm", "step_size": 0.5}, "mlp": {"activation": "relu2", "gated": False}},
    {"residual": {"step_size": "inverse_sqrt_layers", "learned_step_size": "layer"}, "mlp": {"bias": True}},
    {"norm": {"placement": "sandwich"}, "residual": {"step_size": 0.7, "learned_step_size": "branch"}},
    {"norm": {"placement": "post", "zero_centred": True}, "residual": {"step_size": "inverse_sqrt_layers"}, "mlp": {"activation": "relu2"}},
]


EXTRAS = LossConfig(label_smoothing=0.1, z_loss=0.01)
LOGITS = {"embedding_multiplier": 32**0.5, "logit_scale": 20.0, "final_logit_softcapping": 2.0, "mup": {"base_hidden_size": 8}}


def away_from_constants(model: torch.nn.Module, config: ModelConfig) -> None:
    """Gains, biases and steps as training would leave them: at 1 and 0 a wrong formula may be right. By name, alike on all ranks."""
    with torch.no_grad():
        for parameter in model.parameters():
            flat = parameter.view(-1)
            for piece in spec_of(parameter).pieces:
                if not distribution(piece.name, piece.global_shape, config).is_drawn:
                    seed = sum(piece.name.encode()) + 7 * len(piece.name)
                    noise = torch.randn(piece.global_shape, generator=torch.Generator().manual_seed(seed)) / 5
                    where = tuple(slice(start, start + size) for start, size in zip(piece.start, piece.shape))
                    flat[piece.offset : piece.offset + piece.numel] += noise[where].reshape(-1)


def forward_backward(extra: dict[str, Any], tp: int, split: bool, checkpointing: str) -> tuple[float, Blocks, Blocks]:
    """On a rank: loss, gradients, weights."""
    config, groups = ModelConfig(**UNEVEN | extra), groups_of(tp=tp, sequence_parallel=split)
    model = build_model(config, groups, seed=1, options=ForwardOptions(checkpointing, extras=EXTRAS))  # type: ignore[arg-type]
    away_from_constants(model, config)
    register_gradient_sums(model, groups)
    loss, _ = model(batch_of(config), KEY)
    loss.backward()
    return loss.item(), blocks_of(model, gradient), blocks_of(model)


def check(ranks: Ranks, extra: dict[str, Any], tp: int, split: bool, checkpointing: str = "none") -> None:
    results = ranks.run(forward_backward, extra, tp, split, checkpointing)
    config, (inputs, targets) = ModelConfig(**UNEVEN | extra), rows(ModelConfig(**UNEVEN | extra))
    weights = {name: tensor.double().requires_grad_() for name, tensor in assemble(blocks for *_, blocks in results).items()}
    each = [reference.Row(inputs[i], targets[i], STARTS[i], sample=3 + i) for i in range(2)]
    loss = sum(reference.row_loss(weights, config, row, step=reference.Step(KEY.seed, KEY.step)) for row in each)
    optimised = sum(reference.row_loss(weights, config, row, step=reference.Step(KEY.seed, KEY.step), extras=EXTRAS) for row in each)
    optimised.backward()
    assert len({result[0] for result in results}) == 1, "all tp ranks have the same loss"
    assert abs(results[0][0] - loss.item()) < 1e-4
    found = assemble(blocks for _, blocks, _ in results)
    assert found.keys() == weights.keys()
    gradients = {name: tensor.grad for name, tensor in weights.items() if tensor.grad is not None}
    whole = sum(float(each.square().sum()) for each in gradients.values()) ** 0.5
    for name, mine in found.items():  # one number may be the small sum of large ones
        assert (mine - gradients[name]).norm() <= 1e-5 * gradients[name].norm() + 1e-7 * whole / len(found) ** 0.5, name


@pytest.mark.parametrize(("extra", "split"), [*((extra, True) for extra in BLOCKS), *((extra, False) for extra in BLOCKS[:6:5])], ids=str)
def test_norms_residuals_and_mlps(ranks2: Ranks, extra: dict[str, Any], split: bool) -> None:
    """Loss and every logical gradient are the plain model's, in float64; what is replicated is bit-equal on all ranks."""
    check(ranks2, extra, 2, split, "full" if split else "selective")


@pytest.mark.parametrize("vocabulary", [61, 9])  # of 9 words the last of 4 ranks holds none
def test_b072_b076_logits_and_what_is_optimised_besides(ranks4: Ranks, vocabulary: int) -> None:
    """The loss is the plain one in nats, its gradient that with label smoothing and z-loss; padding has no part in either."""
    check(ranks4, LOGITS | {"vocab_size": vocabulary}, 4, True)
    check(ranks4, {"vocab_size": vocabulary, "tie_word_embeddings": True}, 4, False)
