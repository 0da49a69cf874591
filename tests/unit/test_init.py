"""If this fails, initial weights depend on the layout, are badly distributed, or are not those of the version before."""

import hashlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lite.block_config import NormConfig
from megatron_lite.init_config import InitConfig, MupConfig
from megatron_lite.layers.embedding import vocabulary_spec
from megatron_lite.layers.linear import cut_columns, cut_rows
from megatron_lite.model_config import ModelConfig
from megatron_lite.models import init
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model
from megatron_lite.models.init import distribution, local_init
from megatron_lite.parallel.groups import Axis, ProcessGroups
from megatron_lite.parallel.shard_spec import Piece, ShardSpec, spec_of
from tests.logical import assemble, blocks_of
from tests.paths import ROOT

CONFIG = ModelConfig(
    vocab_size=600, hidden_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=320
)


def local(spec: ShardSpec, seed: int = 1) -> torch.Tensor:
    return local_init(spec, CONFIG, seed).view(spec.local_shape)


def test_golden() -> None:
    """The hash of every initial weight: a change is a new format version, never an accident."""
    whole = assemble([blocks_of(build_model(CONFIG, ProcessGroups.single(), seed=7))])
    digest = hashlib.sha256()
    for name in sorted(whole):
        digest.update(name.encode() + whole[name].numpy().tobytes())
    assert digest.hexdigest()[:16] == "faa9d22f5990ad66"


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_parts_are_cuts_of_the_whole(size: int) -> None:
    """Rows, columns and a vocabulary that does not divide, across tile borders (600 and 576 are no multiples of 256)."""
    axes = [Axis("tp", size, rank) for rank in range(size)]
    one = Axis("tp")
    blocks = {"layers.0.mlp.gate.weight": 576, "layers.0.mlp.up.weight": 576}
    gate, up = local(cut_rows(blocks, 300, one)).chunk(2)
    parts = [local(cut_rows(blocks, 300, axis)).chunk(2) for axis in axes]
    assert torch.equal(torch.cat([part[0] for part in parts]), gate)
    assert torch.equal(torch.cat([part[1] for part in parts]), up)
    down = local(cut_columns("layers.0.mlp.down.weight", 300, 576, one))
    assert torch.equal(torch.cat([local(cut_columns("layers.0.mlp.down.weight", 300, 576, axis)) for axis in axes], dim=1), down)
    table = torch.cat([local(vocabulary_spec("embedding.weight", 601, 96, axis)) for axis in axes])
    assert torch.equal(table[:601], local(vocabulary_spec("embedding.weight", 601, 96, one)))
    assert not table[601:].any(), "padding is zero"


def test_ranges_are_slices() -> None:
    """An engine that owns a ragged flat range gets exactly its elements, padding included."""
    spec = vocabulary_spec("embedding.weight", 601, 96, Axis("tp", 4, 3))  # 148 rows and 3 of padding
    whole = local_init(spec, CONFIG, 1)
    for start, stop in [(0, 1), (95, 97), (5000, 9000), (147 * 96 + 5, 149 * 96 + 3), (len(whole) - 1, len(whole)), (7, 7)]:
        assert torch.equal(local_init(spec, CONFIG, 1, start=start, stop=stop), whole[start:stop])


def test_distribution() -> None:
    """B059: tp parts are no copies of one another; standard deviation as configured, smaller into the residual stream."""
    name = "layers.1.attention.o.weight"
    halves = [local(cut_columns(name, 512, 1024, Axis("tp", 2, rank))) for rank in (0, 1)]
    assert not torch.equal(*halves)
    whole = torch.cat(halves, dim=1)
    assert abs(whole.std() / (0.02 / math.sqrt(4)) - 1) < 0.01
    embedding = local(vocabulary_spec("embedding.weight", 2048, 256, Axis("tp")))
    assert abs(embedding.std() / 0.02 - 1) < 0.01
    normal = (embedding / 0.02).flatten().sort().values.double()
    expected = torch.special.ndtri((torch.arange(normal.numel()) + 0.5).double() / normal.numel())
    assert (torch.special.ndtr(normal) - torch.special.ndtr(expected)).abs().max() < 1.63 / math.sqrt(
        normal.numel()
    )  # Kolmogorov-Smirnov, 1 %
    assert abs(torch.corrcoef(torch.stack([embedding[0], embedding[1]]))[0, 1]) < 0.25
    other = local_init(vocabulary_spec("embedding.weight", 2048, 256, Axis("tp")), CONFIG, 2)
    assert not torch.equal(other, embedding.flatten()), "another seed"
    assert not torch.equal(embedding[:, :96], local(vocabulary_spec("lm_head.weight", 2048, 96, Axis("tp")))), "another name"


def drawn(name: str, shape: tuple[int, int], **init: Any) -> torch.Tensor:
    spec = ShardSpec((Piece(name, shape, (0, 0), shape),), shape, cut=False)
    return local_init(spec, CONFIG.model_copy(update={"init": InitConfig(**init)}), 1).view(shape).double()


def test_xavier_uniform() -> None:
    """Glorot and Bengio 2010, eq. 16: uniform within sqrt(6 / (fan in + fan out)) of each logical matrix; q, k, v apart."""
    values = drawn("layers.0.attention.q.weight", (400, 560), scheme="xavier_uniform").flatten()
    bound = math.sqrt(6 / 960)
    assert 0.999 * bound < values.abs().max() < bound
    ordered, expected = values.sort().values, (torch.arange(values.numel()).double() + 0.5) / values.numel()
    assert ((ordered / bound + 1) / 2 - expected).abs().max() < 1.63 / math.sqrt(values.numel())  # Kolmogorov-Smirnov, 1 %
    into = drawn("layers.0.mlp.down.weight", (400, 560), scheme="xavier_uniform")
    assert into.abs().max() < bound / 2 and into.abs().max() > 0.999 * bound / 2  # 2 layers: the residual's root of 4


def test_standard_deviations_by_scheme() -> None:
    """CONFIG has a width of 96 and 2 layers."""
    by_scheme = {
        ("layers.0.mlp.up.weight", "small"): math.sqrt(2 / (5 * 96)),  # Nguyen and Salazar 2019
        ("embedding.weight", "small"): math.sqrt(2 / (5 * 96)),
        ("embedding.weight", "xavier_uniform"): 96**-0.5,
        ("lm_head.weight", "normal"): 0.02,
    }
    for (name, scheme), std in by_scheme.items():
        assert drawn(name, (512, 512), scheme=scheme).std() == pytest.approx(std, rel=0.01), (name, scheme)
    assert drawn("embedding.weight", (512, 512), embedding_std=0.3).std() == pytest.approx(0.3, rel=0.01)
    assert drawn("layers.1.attention.o.weight", (512, 512), scaled_residual=False).std() == pytest.approx(0.02, rel=0.01)
    for name in ("layers.1.attention.o.weight", "layers.1.mlp.down.weight"):
        assert not drawn(name, (512, 512), zero_residual=True).any()
    wide = CONFIG.model_copy(update={"mup": MupConfig(base_hidden_size=24)})  # 4 times as wide as its base
    for name, std in (("layers.0.mlp.up.weight", 0.01), ("embedding.weight", 0.02), ("lm_head.weight", 0.02)):
        assert distribution(name, (512, 512), wide).std == pytest.approx(std)


@pytest.mark.parametrize("norm", [{}, {"placement": "sandwich"}, {"placement": "sandwich", "zero_centred": True}], ids=str)
def test_zero_residual_layers_change_nothing(norm: dict[str, Any]) -> None:
    """And all their branches learn: what is 0 has a gradient, of a size that a norm of zeros would not leave."""
    config = CONFIG.model_copy(update={"init": InitConfig(zero_residual=True), "norm": NormConfig(**norm)})
    model = build_model(config, ProcessGroups.single(), seed=1)
    ids = torch.arange(8)[None]
    batch = Batch.from_rows(ids.numpy(), ids.numpy(), [[0]], [0], document_mask=True)
    plain = model.final_norm(model.embedding(ids, split=False)) @ model.lm_head.weight.T
    logits = model.logits(batch)
    torch.testing.assert_close(logits, plain)
    logits.square().sum().backward()
    zeros = ("output_norm.weight",) if norm else ("attention.o.weight", "mlp.down.weight")
    sizes = {spec_of(parameter).pieces[0].name: float(parameter.grad.norm()) for parameter in model.parameters()}
    assert len(of_zeros := [size for name, size in sizes.items() if name.endswith(zeros)]) == 4 and min(of_zeros) > 0, sizes
    assert math.hypot(*sizes.values()) < 5 * sizes["lm_head.weight"], sizes


def test_only_the_overlap_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank's share must not cost the whole tensor: draws are counted."""
    counted = []
    original = init._tile_rows
    monkeypatch.setattr(init, "_tile_rows", lambda *args: counted.append(args[-1]) or original(*args))
    spec = cut_rows({"layers.0.mlp.up.weight": 4096}, 512, Axis("tp", 8, 3))
    local(spec)
    assert sum(counted) * init.TILE == spec.pieces[0].numel
    counted.clear()
    local(cut_columns("layers.0.mlp.down.weight", 512, 4096, Axis("tp", 8, 3)))
    assert sum(counted) * init.TILE == 512 * 512


def test_tied_parameter_stays_one() -> None:
    """B061: after building on the meta device the head's weight is the embedding's, once among the parameters."""
    model = build_model(CONFIG.model_copy(update={"tie_word_embeddings": True}), ProcessGroups.single(), seed=1)
    assert model.lm_head.weight is model.embedding.weight
    assert [name for name, _ in model.named_parameters() if "lm_head" in name] == []
    assert all(not parameter.is_meta for parameter in model.parameters())


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of resident memory can be reset on Linux only")
def test_share_of_a_large_model_never_holds_a_full_tensor(capsys: pytest.CaptureFixture[str]) -> None:
    """tp 8 of an 8B shape, one layer with embedding and head: the peak stays below a full tensor, module by module."""
    command = [sys.executable, str(ROOT / "tests/benchmarks/bench_init.py"), "--layers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    with capsys.disabled():
        print(
            f"\n  init of one rank's share, 8B shape with 1 layer at tp 8: {result['seconds']} s, "
            f"{result['ns_per_parameter']} ns a parameter; worst peak {result['worst_peak_over_full_tensor']:.2f} of the full tensor"
        )
    assert result["worst_peak_over_full_tensor"] < 1
