"""If this fails, cutting the model over tp changes the model."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_lite.layers.cross_entropy import vocab_parallel_cross_entropy
from megatron_lite.layers.dropout import EMBEDDING, DropoutPlace, dropout
from megatron_lite.layers.embedding import VocabularyCut
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import ForwardOptions
from megatron_lite.parallel import collectives
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.random import sample_keys
from megatron_lite.parallel.replicated import register_gradient_sums
from tests import reference
from tests.logical import Blocks, assemble, blocks_of, gradient, load_logical
from tests.ranks import Ranks, groups_of
from tests.tiny_model import TINY

UNEVEN: dict[str, Any] = {**TINY, "vocab_size": 61, "hidden_dropout": 0.2, "attention_dropout": 0.2}  # tp 2 and 4 don't divide 61
STARTS = [[0, 5, 13], [0]]
KEY = DropoutKey(9, 5)


def rows(config: ModelConfig, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    inputs, targets = (generator.integers(0, config.vocabulary, (2, 16)) for _ in range(2))
    targets[0, 13:] = -100
    return inputs, targets


def batch_of(config: ModelConfig, seed: int = 0) -> Batch:
    return Batch.from_rows(*rows(config, seed), STARTS, [3, 4], document_mask=True)


def plain(config: ModelConfig, weights: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by the reference."""
    inputs, targets = rows(config)
    used = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    each = [reference.Row(inputs[i], targets[i], STARTS[i], sample=3 + i) for i in range(2)]
    loss = sum(reference.row_loss(used, config, row, step=reference.Step(KEY.seed, KEY.step)) for row in each)
    return loss.item(), dict(zip(used, torch.autograd.grad(loss, list(used.values()))))


def forward_backward(extra: dict[str, Any], tp: int, split: bool, checkpointing: str = "none") -> tuple[float, Blocks, Blocks, bool]:
    """On a rank: loss, gradients, weights, and whether padding has zero weights and gradients."""
    config, groups = ModelConfig(**UNEVEN | extra), groups_of(tp=tp, sequence_parallel=split)
    model = build_model(config, groups, seed=1, options=ForwardOptions(checkpointing))  # type: ignore[arg-type]
    register_gradient_sums(model, groups)
    loss, _ = model(batch_of(config), KEY)
    loss.backward()
    valid = VocabularyCut.of(config.vocabulary, groups.tp).num_valid
    tables = [model.embedding.weight, model.lm_head.weight]
    clean = not any(table[valid:].any() or table.grad[valid:].any() for table in tables)
    return loss.item(), blocks_of(model, gradient), blocks_of(model), clean


CASES = [
    (2, False, {}),
    (2, True, {"tie_word_embeddings": True}),
    (2, False, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    (2, True, {"num_key_value_heads": 1}),
    (4, False, {}),  # two ranks share a KV head
    (4, True, {}),
    (4, False, {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    (4, True, {"num_key_value_heads": 1}),
    (4, True, {"num_key_value_heads": 4}),
    (4, False, {"vocab_size": 9}),  # 3 words a rank: the last rank holds padding only
    (4, True, {"vocab_size": 9, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("tp", "split", "extra"), CASES)
def test_equals_the_plain_model(ranks2: Ranks, ranks4: Ranks, tp: int, split: bool, extra: dict[str, Any]) -> None:
    """B053, B059, B097, B098, B103: weights, loss and every logical gradient, for KV heads more, as many and fewer than tp,
    sequence parallel or not, dropout on, a padded vocabulary; what is replicated is bit-equal on all ranks."""
    results = (ranks2 if tp == 2 else ranks4).run(forward_backward, extra, tp, split)
    config = ModelConfig(**UNEVEN | extra)
    weights = assemble(blocks for _, _, blocks, _ in results)
    one = build_model(config, ProcessGroups.single(), seed=1)
    for name, tensor in assemble([blocks_of(one)]).items():
        assert torch.equal(weights[name], tensor), f"initial {name}"
    loss, gradients = plain(config, weights)
    assert len({result[0] for result in results}) == 1, "all tp ranks have the same loss"
    assert abs(results[0][0] - loss) < 1e-4
    for name, mine in assemble(blocks for _, blocks, _, _ in results).items():
        assert (mine - gradients[name]).norm() <= 1e-5 * gradients[name].norm(), name
    assert all(clean for _, _, _, clean in results), "padding stays exactly 0"


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_recomputing_repeats_the_collectives(ranks4: Ranks, checkpointing: str) -> None:
    """Recomputation under tp and sequence parallel gives bit-equal gradients, in the same order of collectives."""
    once, twice = (ranks4.run(forward_backward, {}, 4, True, how) for how in ("none", checkpointing))
    for (loss, gradients, _, _), (same_loss, same, _, _) in zip(once, twice):
        assert loss == same_loss
        assert all(torch.equal(ours[1], theirs[1]) for ours, theirs in zip(gradients, same))


def _round_trip(logical: dict[str, torch.Tensor], tp: int) -> tuple[Blocks, torch.Tensor, torch.Tensor]:
    config = ModelConfig(**UNEVEN | {"num_key_value_heads": 4})
    model = build_model(config, groups_of(tp=tp), seed=2)
    load_logical(model, logical)
    batch = batch_of(config)
    with torch.no_grad():
        return blocks_of(model), model.logits(batch), model.token_losses(batch)


def test_weights_travel_between_layouts(ranks2: Ranks, ranks4: Ranks) -> None:
    """B053: q, k, v and gate, up cut apart: tp 1 -> 2 -> 4 -> 1 gives bit-equal weights, and the same logits at each stop."""
    config = ModelConfig(**UNEVEN | {"num_key_value_heads": 4})
    generator = torch.Generator().manual_seed(0)
    one = build_model(config, ProcessGroups.single(), seed=2)
    logical = {name: torch.randn(tensor.shape, generator=generator) * 0.2 for name, tensor in assemble([blocks_of(one)]).items()}
    load_logical(one, logical)
    logits, losses = one.logits(batch_of(config)), one.token_losses(batch_of(config))
    moved = logical
    for ranks in (ranks2, ranks4):
        results = ranks.run(_round_trip, moved, ranks.world_size)
        moved = assemble(blocks for blocks, _, _ in results)
        for _, theirs, their_losses in results:
            torch.testing.assert_close(theirs, logits.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(their_losses, losses, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(moved[name], tensor) for name, tensor in logical.items())


def _replica(tp: int, dp: int, seeds: list[int]) -> tuple[torch.Tensor, Blocks]:
    config, groups = ModelConfig(**UNEVEN), groups_of(tp=tp, dp=dp)
    model = build_model(config, groups, seed=1, options=ForwardOptions("full"))
    batch = batch_of(config, seeds[groups.dp.rank])
    model(batch, KEY)[0].backward()
    return model.logits(batch).detach(), blocks_of(model, gradient)


def test_replicas_do_not_mix(ranks2: Ranks, ranks4: Ranks) -> None:
    """B102: two replicas of tp 2 with other data each give what two jobs of tp 2 give: no collective leaves its group."""
    both = ranks4.run(_replica, 2, 2, [5, 6])
    for place, seed in enumerate((5, 6)):
        alone = ranks2.run(_replica, 2, 1, [seed])
        for (logits, gradients), (same_logits, same) in zip(both[2 * place : 2 * place + 2], alone):
            assert torch.equal(logits, same_logits)
            assert all(torch.equal(ours[1], theirs[1]) for ours, theirs in zip(gradients, same))


def _uniform_loss() -> float:
    tp = groups_of(tp=2).tp
    hidden, weight = torch.ones(3, 8), torch.zeros(32, 8)
    return vocab_parallel_cross_entropy(hidden, weight, torch.tensor([0, 40, 63]), tp, vocab_start=32 * tp.rank, num_valid_rows=32).item()


def test_equal_logits_cost_the_log_of_the_whole_vocabulary(ranks2: Ranks) -> None:
    """B073: ln 64 a token over two ranks of 32, not ln 128 and not ln 32."""
    for loss in ranks2.run(_uniform_loss):
        assert loss == pytest.approx(3 * 4.158883, abs=1e-5)


def _split_dropout() -> torch.Tensor:
    rank = dist.get_rank()
    samples = sample_keys(KEY, torch.tensor([7]))
    return dropout(torch.ones(1, 8, 32), 0.5, DropoutPlace(samples, first_position=8 * rank), where=EMBEDDING)


def test_split_ranks_have_their_own_masks(ranks2: Ranks) -> None:
    """B098: under sequence parallel the ranks' masks differ, and together are the unsplit mask."""
    first, second = ranks2.run(_split_dropout)
    assert not torch.equal(first, second)
    whole = dropout(torch.ones(1, 16, 32), 0.5, DropoutPlace(sample_keys(KEY, torch.tensor([7]))), where=EMBEDDING)
    assert torch.equal(torch.cat([first, second], dim=1), whole)


def _pairs() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Each collective and its backward on this rank's x, for an upstream gradient that differs between ranks."""
    axis = groups_of(tp=2).tp
    out = {}
    for name, shape in {
        "copy_to": (2, 4, 3),
        "reduce_from": (2, 4, 3),
        "gather_sequence": (2, 4, 3),
        "scatter_sequence": (2, 4, 3),
        "gather_rows": (4, 3),
        "gather_last": (2, 4, 3),
    }.items():
        x = (torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape) + 100 * axis.rank).requires_grad_()
        y = getattr(collectives, name)(x, axis)
        upstream = torch.arange(y.numel(), dtype=torch.float32).view(y.shape) * (1 + axis.rank)
        y.backward(upstream)
        out[name] = (y.detach(), x.grad)
    return out


def test_collectives_and_their_backwards(ranks2: Ranks) -> None:
    """Each pair by its definition, in plain slices and sums."""
    results = ranks2.run(_pairs)

    def x(*shape: int) -> list[torch.Tensor]:
        base = torch.arange(int(np.prod(shape)), dtype=torch.float32).view(shape)
        return [base, base + 100]

    for rank in (0, 1):
        got = results[rank]
        a, b = x(2, 4, 3)
        assert torch.equal(got["copy_to"][0], (a, b)[rank]) and torch.equal(got["copy_to"][1], 3 * a)
        assert torch.equal(got["reduce_from"][0], a + b) and torch.equal(got["reduce_from"][1], a * (1 + rank))
        assert torch.equal(got["gather_sequence"][0], torch.cat([a, b], 1))
        wide = 3 * torch.arange(48.0).view(2, 8, 3)
        assert torch.equal(got["gather_sequence"][1], wide.chunk(2, 1)[rank])
        assert torch.equal(got["scatter_sequence"][0], (a + b).chunk(2, 1)[rank])
        narrow = torch.arange(12.0).view(2, 2, 3)
        assert torch.equal(got["scatter_sequence"][1], torch.cat([narrow, 2 * narrow], 1))
        c, d = x(4, 3)
        assert torch.equal(got["gather_rows"][0], torch.cat([c, d]))
        assert torch.equal(got["gather_rows"][1], (3 * torch.arange(24.0).view(8, 3)).chunk(2)[rank])
        assert torch.equal(got["gather_last"][0], torch.cat([a, b], -1))
        assert torch.equal(got["gather_last"][1], (torch.arange(48.0).view(2, 4, 6) * (1 + rank)).chunk(2, -1)[rank])
