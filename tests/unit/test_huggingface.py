"""If these fail, a model that leaves for Hugging Face, or comes from there, is another model than it was (invariant 7)."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.errors import CheckpointError, ConfigError
from launcher.commands.export import parse_size
from megatron_lite.checkpoint.huggingface.export import read_in_order, share_out
from megatron_lite.checkpoint.huggingface.families import differences, to_tree
from megatron_lite.checkpoint.huggingface.folder import INDEX, SINGLE, check_tensors, open_tensors, read_model
from megatron_lite.checkpoint.huggingface.llama import LLAMA
from megatron_lite.checkpoint.huggingface.load import load_huggingface
from megatron_lite.checkpoint.load import load_logical
from megatron_lite.checkpoint.manifest import read_manifest
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.slices import OwnedSlice, model_slices
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import Decoder
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.parallel.shard_spec import spec_of
from tests.checkpoint_fakes import Layout, logical_state, run_state, write_checkpoint
from tests.huggingface_cases import MODELS, checkpoint, export, trained, write_config
from tests.paths import ROOT

GQA = MODELS["gqa"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the gqa model."""
    return checkpoint(tmp_path_factory.mktemp("saved"), trained(GQA))


def loaded(folder: Path, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights of a fresh model of ours after loading the folder."""
    model = build_model(config, ProcessGroups.single(), seed=9)
    load_huggingface(folder, model_slices(model), ProcessGroups.single())
    return dict(model.named_parameters())


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---------------------------------------------------------------------------------------------------------- the weights


@pytest.mark.parametrize("name", MODELS)
def test_transformers_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    """What transformers computes with an exported folder is what the model computed, to 1e-4 in fp32 (B053: q, k and v of
    grouped heads; B061: a tied head)."""
    from transformers import AutoModelForCausalLM

    model = trained(MODELS[name])
    assert isinstance(model, Decoder)
    folder = export(checkpoint(tmp_path / "saved", model), tmp_path / "out", max_file_bytes=60_000)
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    ids = torch.randint(0, MODELS[name].vocabulary, (2, 32), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(32).expand(2, 32)
    with torch.no_grad():
        ours = model.logits(Batch(ids, ids, positions, None, torch.arange(2)))
        worst = (theirs(ids).logits - ours).abs().max()
    assert theirs.dtype == torch.float32 and worst < 1e-4, worst
    assert sum(parameter.numel() for parameter in theirs.parameters()) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("max_file_bytes", [10**9, 20_000])
def test_there_and_back_is_the_identity(name: str, max_file_bytes: int, tmp_path: Path) -> None:
    """Bit for bit, in one file or many, read in parts of any length."""
    model = trained(MODELS[name])
    folder = export(checkpoint(tmp_path / "saved", model), tmp_path / "out", max_file_bytes=max_file_bytes, chunk_elements=1000)
    assert (folder / INDEX).exists() == (max_file_bytes < 10**9)
    assert same(loaded(folder, MODELS[name]), dict(model.named_parameters()))


def test_files_of_transformers_load(tmp_path: Path) -> None:
    """What save_pretrained writes, split and in bf16 and fp16, gives those very numbers in fp32; so does a tied head that was
    saved twice, unless it is no copy."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, dtype in (("mqa-tied", torch.bfloat16), ("gqa", torch.float16), ("wide-heads", torch.float32)):
        config = MODELS[name]
        theirs = LlamaForCausalLM(LlamaConfig(**to_tree(LLAMA, config))).to(dtype)
        theirs.save_pretrained(tmp_path / name, max_shard_size="40KB")
        assert (tmp_path / name / INDEX).exists()
        assert differences(LLAMA, config, read_model(tmp_path / name)[1], where="x") == []
        got = dict(export_names(loaded_model(tmp_path / name, config)))
        wanted = {key: value.float() for key, value in theirs.state_dict().items() if key in got}
        assert same(got, wanted) and len(got) == len(LLAMA.places(config))
    twice = load_file(export(checkpoint(tmp_path / "c", trained(MODELS["mqa-tied"])), tmp_path / "twice") / SINGLE)
    twice["lm_head.weight"] = twice["model.embed_tokens.weight"].clone()
    twice["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(twice, tmp_path / "twice" / SINGLE)
    assert same(loaded(tmp_path / "twice", MODELS["mqa-tied"]), dict(trained(MODELS["mqa-tied"]).named_parameters()))
    twice["lm_head.weight"][-1, -1] += 1
    save_file(twice, tmp_path / "twice" / SINGLE)
    said = r"lm_head\.weight is no copy of model\.embed_tokens\.weight: set tie_word_embeddings false in config\.json"
    with pytest.raises(CheckpointError, match=said):
        loaded(tmp_path / "twice", MODELS["mqa-tied"])


def loaded_model(folder: Path, config: ModelConfig) -> torch.nn.Module:
    model = build_model(config, ProcessGroups.single(), seed=9)
    load_huggingface(folder, model_slices(model), ProcessGroups.single())
    return model


def export_names(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A bare model's logical tensors by their names."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    places = LLAMA.places(config)
    found = []
    for owned in model_slices(model):
        for piece in owned.spec.pieces:
            found.append((places[piece.name].theirs, owned.view[piece.offset : piece.offset + piece.numel].view(piece.shape)))
    return found


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_types_are_rounded_once(saved: Path, dtype: str, tmp_path: Path) -> None:
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    stored = load_file(export(saved, tmp_path, dtype=dtype) / SINGLE)
    places = LLAMA.places(GQA)
    for name, tensor in load_logical(saved):
        assert stored[places[name].theirs].dtype == kind and torch.equal(stored[places[name].theirs], tensor.to(kind))


def test_numbers_that_the_type_cannot_hold_are_named(tmp_path: Path) -> None:
    """70,000 is infinite in fp16; a NaN is no model."""
    model = trained(GQA)
    with torch.no_grad():
        model.get_parameter("layers.1.mlp.down.weight")[0, 0] = 70000.0
    path = checkpoint(tmp_path / "a", model)
    export(path, tmp_path / "bf16", dtype="bf16")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down\.weight has 7e\+04 in it, which fp16 can't hold"):
        export(path, tmp_path / "fp16", dtype="fp16")
    with torch.no_grad():
        model.get_parameter("final_norm.weight")[0] = float("nan")
    with pytest.raises(CheckpointError, match=r"final_norm\.weight has numbers in it that are not finite"):
        export(checkpoint(tmp_path / "b", model), tmp_path / "nan")


@pytest.mark.parametrize("layout", [Layout(1, 1, "whole"), Layout(2, 3, "flat"), Layout(4, 2, "each")], ids=str)
@pytest.mark.parametrize("chunk", [37, 10**6])
def test_reading_in_order_puts_any_layout_together(layout: Layout, chunk: int, tmp_path: Path) -> None:
    """Whatever ranks wrote it and however short the parts, each tensor comes whole and in its own order."""
    values = logical_state(5)
    manifest = write_checkpoint(tmp_path / "c", layout, values)
    names = [*reversed(manifest.tensors)]
    found: dict[str, list[torch.Tensor]] = {}
    for name, part in read_in_order(tmp_path / "c", manifest, names, chunk_elements=chunk):
        assert part.numel() <= chunk
        found.setdefault(name, []).append(part.clone())
    assert list(found) == names
    for name, parts in found.items():
        assert torch.equal(torch.cat(parts), values[name, "master"].reshape(-1)), name


def test_a_damaged_checkpoint_does_not_leave(saved: Path, tmp_path: Path) -> None:
    """A flipped byte in the checkpoint is found, and named, before it is written anywhere."""
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    (file,) = copy.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"rank_00000\.safetensors is damaged: bytes"):
        export(copy, tmp_path / "out")


# ---------------------------------------------------------------------------------------------------------- bad folders


def broken(tmp_path: Path, saved: Path, change: str) -> Path:
    """An exported folder with one thing wrong."""
    split = change.startswith("index")
    folder = export(saved, tmp_path / "out", max_file_bytes=60_000 if split else 10**9)
    if split:
        tree = json.loads((folder / INDEX).read_text())
        if change == "index: a file that is not there":
            next(folder.glob("model-00002*")).unlink()
        elif change == "index: another place":
            tree["weight_map"]["model.norm.weight"] = min(tree["weight_map"].values())
        else:
            tree["weight_map"]["model.norm.weight"] = "../out/x.safetensors"
        (folder / INDEX).write_text(json.dumps(tree))
        return folder
    weights = load_file(folder / SINGLE)
    if change == "pickle":
        (folder / SINGLE).rename(folder / "pytorch_model.bin")
    elif change == "cut":
        (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-100])
    elif change == "missing":
        del weights["model.layers.1.mlp.up_proj.weight"]
    elif change == "renamed":
        weights["model.layers.1.mlp.w3.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    elif change == "extra":
        weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    elif change == "shape":
        weights["model.embed_tokens.weight"] = torch.zeros(128, 64)
    elif change == "type":
        weights["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)
    if change not in ("pickle", "cut"):
        save_file(weights, folder / SINGLE)
    return folder


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", r"missing: model\.layers\.1\.mlp\.up_proj\.weight$"),
        ("renamed", r"not part of the model: model\.layers\.1\.mlp\.w3\.weight$"),
        ("extra", r"not part of the model: model\.layers\.0\.self_attn\.q_proj\.bias$"),
        ("shape", r"model\.embed_tokens\.weight: \[128, 64\] instead of \[97, 64\]"),
        ("type", r"model\.norm\.weight: I8"),
        ("pickle", "a pickle, which can run anything"),
        ("cut", "it is missing or was cut off"),
        ("index: a file that is not there", r"model-00002-of-\d+\.safetensors can't be read"),
        ("index: another place", r"does not hold model\.norm\.weight, which model\.safetensors\.index\.json says"),
        ("index: a path", "no weight_map of file names"),
    ],
)
def test_folders_that_are_not_whole_are_refused(change: str, said: str, saved: Path, tmp_path: Path) -> None:
    """B113: a tensor that is missing, renamed, extra or of another shape is never passed over, nor is a file. Before a weight
    is touched, and by the check that needs no torch."""
    folder = broken(tmp_path, saved, change)
    model = build_model(GQA, ProcessGroups.single(), seed=9)
    before = {name: value.clone() for name, value in model.named_parameters()}
    with pytest.raises(CheckpointError) as refused:
        load_huggingface(folder, model_slices(model), ProcessGroups.single())
    assert re.search(said, str(refused.value), re.MULTILINE), refused.value
    assert same(before, dict(model.named_parameters()))
    with pytest.raises(CheckpointError):
        check_tensors(folder, open_tensors(folder), *read_model(folder))


def test_another_model_is_refused_before_it_is_filled(saved: Path, tmp_path: Path) -> None:
    """B113: d_model changed by config."""
    folder = export(saved, tmp_path)
    model = build_model(GQA.model_copy(update={"hidden_size": 32, "head_dim": 16}), ProcessGroups.single(), seed=9)
    with pytest.raises(CheckpointError, match=r"holds another model: .*embedding\.weight: \[97, 64\] instead of \[97, 32\]"):
        load_huggingface(folder, model_slices(model), ProcessGroups.single())
    write_config(folder, {"model_type": "bert"})
    with pytest.raises(ConfigError, match=r"architectures: got 'bert', wanted LlamaForCausalLM or MistralForCausalLM or"):
        read_model(folder)
    with pytest.raises(ConfigError, match="hf download"):
        read_model(tmp_path / "nothing")


# --------------------------------------------------------------------------------------------------------------- sizes


def test_files_are_shared_out_by_size() -> None:
    shapes = {"a": (10,), "b": (10,), "c": (100, 3), "d": (5,), "e": (5,)}
    files = share_out(shapes, item_bytes=2, max_file_bytes=40)
    assert [list(file.shapes) for file in files] == [["a", "b"], ["c"], ["d", "e"]]
    assert [file.name for file in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [file.name for file in share_out(shapes, item_bytes=2, max_file_bytes=10**6)] == [SINGLE]
    assert [parse_size(text) for text in ("5GB", "200 mb", "1.5KB")] == [5 * 10**9, 200 * 10**6, 1500]
    for text in ("5", "0GB", "-1GB", "many"):
        with pytest.raises(ConfigError, match="--max-file-size"):
            parse_size(text)


_MEASURED = """
import re, sys
from pathlib import Path
from tests.huggingface_cases import export

def most_bytes_held():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

small, large, out = map(Path, sys.argv[1:])
export(small, out / "small", dtype="bf16")
before = most_bytes_held()
export(large, out / "large", dtype="bf16", max_file_bytes=10**8)
print(most_bytes_held() - before)
"""


def test_memory_stays_small(saved: Path, tmp_path: Path) -> None:
    """A model of 283 MB, most of it one tensor, is exported with 160 MB: a few blocks, not a tensor."""
    config = ModelConfig(vocab_size=125_000, hidden_size=512, num_hidden_layers=3, tie_word_embeddings=True, max_position_embeddings=8)
    model = build_model(config, ProcessGroups.single(), seed=1, materialise=False)
    slices = [
        OwnedSlice(name, spec_of(parameter), "master", 0, parameter.numel(), torch.randn(parameter.numel()))
        for name, parameter in model.named_parameters()
    ]
    state = run_state(1, model=config.model_dump(mode="json"))
    path = save_checkpoint(tmp_path / "saved", step=1, slices=slices, groups=ProcessGroups.single(), attempt=1, state=state)
    assert read_manifest(path).num_bytes() > 280e6
    done = subprocess.run(
        [sys.executable, "-c", _MEASURED, str(saved), str(path), str(tmp_path)], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 160e6, done.stdout
    stored = open_tensors(tmp_path / "large")
    check_tensors(tmp_path / "large", stored, LLAMA, config)
    assert len({tensor.file for tensor in stored.values()}) == 2  # the embedding alone is larger than a file may be
