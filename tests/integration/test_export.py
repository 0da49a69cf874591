"""If these fail, a model that a run exports does not do in `transformers` what it does here, or does not come back."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.loader import Dataset, RowSource
from data_pipeline.tokenizer.encode import Encoder
from launcher.commands.export import export_run
from launcher.commands.generate import Asked, generate_text
from launcher.commands.import_model import import_model
from megatron_lite.checkpoint.load import load_logical
from tests.data_fixtures import tiny_texts
from tests.integration.conftest import CONFIG
from tests.integration.jobs import Workspace

SHORT = ("training.steps=1", "lr_scheduler.warmup_steps=0")
TORCH = ("training.engine=torch", "parallel.zero_stage=0")
HOSTILE = ["", " the of  and\n\n\tto", "naïve 😀 e\u0301 日本", "don't 1234567 x_y", "\r\n a\x00b", "<|not special|>"]


def heldout_loss(model: Any, rows: RowSource, count: int) -> float:
    """Mean over the targets of the first rows, in nats, by `transformers` alone: each document piece is a text of its own."""
    total, targets = 0.0, 0
    for number in range(count):
        row = rows[number]
        ends = [*row.segment_starts[1:], len(row.inputs)]
        for start, end in zip(row.segment_starts, ends):
            wanted = torch.from_numpy(row.targets[start:end].astype("int64"))
            inputs = torch.from_numpy(row.inputs[start:end].astype("int64"))
            with torch.no_grad():
                logits = model(inputs[None]).logits[0].double()
            valid = wanted >= 0
            total += float(torch.nn.functional.cross_entropy(logits[valid], wanted[valid], reduction="sum")) if valid.any() else 0.0
            targets += int(valid.sum())
    return total / targets


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with a trained BPE tokenizer, as `mlite data build` writes it."""
    from data_pipeline.build import build
    from data_pipeline.config import load_data_config

    folder = tmp_path_factory.mktemp("bpe")
    (folder / "raw.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in tiny_texts(60, seed=8)))
    config = folder / "data.yaml"
    sources = [{"name": "raw", "files": str(folder / "raw.jsonl"), "text_field": "text"}]
    tree = {"output": str(folder / "data"), "sources": sources, "tokenizer": {"type": "bpe", "vocab_size": 300}, "workers": 1}
    config.write_text(yaml.safe_dump({**tree, "validation": {"fraction": 0.2}}))
    build(load_data_config(config), quiet=True)
    return folder / "data"


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_a_run_leaves_and_comes_back(
    kind: str,
    bpe: Path,
    dataset: Path,
    tmp_path: Path,
    make_workspace: Callable[[Path], Workspace],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exported, transformers gives the held-out loss of `mlite eval` to 1e-4, the same ids for text, and the same words after a
    prompt, also in a batch with a shorter one; imported again, on two tensor parallel ranks, the run starts with those weights bit for bit."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    workspace, data = make_workspace(tmp_path), {"bytes": dataset, "bpe": bpe}[kind]
    monkeypatch.chdir(tmp_path)
    more = (f"data.path={data}", "model.rope.theta=3000.0", "model.tie_word_embeddings=true" if kind == "bpe" else "model.head_dim=16")
    assert workspace.run(*more, *TORCH, "evaluation.max_sequences=1000")[0] == 0
    exported = workspace.command("mlite", "export", "runs/a", "--to", "out/hf", "--max-file-size", "60KB")
    assert exported.returncode == 0, exported.stderr
    assert "LlamaForCausalLM" in exported.stdout and "model.hidden_dropout 0.1 is for training only" in exported.stdout

    model = AutoModelForCausalLM.from_pretrained("out/hf")
    tokenizer = AutoTokenizer.from_pretrained("out/hf")
    opened = Dataset.open(data)
    rows = RowSource.open([(opened, 1.0, None)], sequence_length=32, packing="best_fit", seed=7, split="validation")
    score = next(record for record in reversed(workspace.metrics("a")) if "eval/loss" in record)
    assert score["eval/sequences"] == len(rows)
    assert heldout_loss(model, rows, len(rows)) == pytest.approx(score["eval/loss"], abs=1e-4)

    encoder = Encoder.open(opened.tokenizer_path)
    for text in [*HOSTILE, *tiny_texts(3, seed=9)]:
        ids = encoder.encode(text).tolist()
        assert tokenizer(text)["input_ids"] == ids and tokenizer.decode(ids) == encoder.decode(ids)
    assert (tokenizer.eos_token_id, model.generation_config.eos_token_id) == (opened.eod_id, opened.eod_id)
    assert (tmp_path / "out" / "hf" / "tokenizer.json").read_bytes() == opened.tokenizer_path.read_bytes()

    prompt = "the of and"
    capsys.readouterr()
    generate_text(Path("runs/a"), [], records=[{"prompt": prompt}], asked=Asked(12, json_lines=True), sampling={"temperature": 0.0})
    ours = json.loads(capsys.readouterr().out)["text"]
    start = tokenizer(tokenizer.bos_token + prompt, return_tensors="pt")
    with torch.no_grad():
        made = model.generate(**start, do_sample=False, max_new_tokens=12)[0, start["input_ids"].shape[1] :].tolist()
    assert tokenizer.decode(made, skip_special_tokens=True) == ours
    padded = tokenizer([tokenizer.bos_token + text for text in ("a", prompt)], padding=True, return_tensors="pt")
    assert padded["attention_mask"][:, 0].tolist() == [0, 1]
    with torch.no_grad():
        both = model.generate(**padded, do_sample=False, max_new_tokens=12)[:, padded["input_ids"].shape[1] :].tolist()
    assert both[1][: len(made)] == made

    back = ("run.name=b", "checkpoint.init_from=hf:out/hf", "optimizer.lr=1e-12", "evaluation.max_sequences=1000")
    code, output = workspace.run(*more, *back, *SHORT, "parallel.tp=2", *TORCH, world=2)
    assert code == 0, output
    first = next(record for record in workspace.metrics("b") if "eval/loss" in record)
    assert first["step"] == 0 and first["eval/loss"] == pytest.approx(score["eval/loss"], abs=1e-5)
    one, other = (
        dict(load_logical(workspace.path(name) / "checkpoints" / step)) for name, step in (("a", "step_00000008"), ("b", "step_00000001"))
    )
    assert max(float((one[name] - other[name]).abs().max()) for name in one) < 1e-9  # one update at lr 1e-12
    assert workspace.events("b", "started")[0]["checkpoint"] == "out/hf"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, dataset: Path) -> Workspace:
    """A short run and, in bf16, its export `hf`."""
    folder = tmp_path_factory.mktemp("exported")
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump({**CONFIG, "data": {"path": str(dataset)}}))
    workspace = Workspace(folder, config)
    assert workspace.run(*TORCH, *SHORT)[0] == 0
    with contextlib.chdir(folder):
        export(Path("runs/a"), to="hf", dtype="bf16")
    return workspace


def export(run: Path, *, to: str, dtype: str = "auto", force: bool = False, overrides: Sequence[str] = ()) -> None:
    export_run(run, overrides, to=Path(to), dtype=dtype, max_file_size="5GB", force=force)


@pytest.fixture
def here(trained: Workspace, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained.folder)
    return trained.folder


def test_what_does_not_fit_is_refused_at_once(trained: Workspace, here: Path, bpe: Path) -> None:
    """A model section, data or a folder that the weights were not made for: exit 2 or 4 with every difference, before training. A
    longer context is on record, as from a run's weights; and a run that has checkpoints of its own does not look at the folder again."""
    shutil.copytree("hf", "copy")
    start = ("run.name=b", "checkpoint.init_from=hf:copy", *TORCH, *SHORT)
    code, output = trained.run(
        *start, "model.rms_norm_eps=1e-6", "model.mlp.bias=true", "model.mlp.activation=relu", "model.hidden_size=64", f"data.path={bpe}"
    )
    assert code == 2 and "rms_norm_eps" not in output
    for name in (
        "model.mlp.bias: got True, wanted False",
        "model.mlp.activation: got 'relu', wanted 'silu'",
        "model.hidden_size: got 64, wanted 32",
        "data.path",
    ):
        assert name in output
    assert "build the data with `tokenizer: {type: pretrained" in output
    assert trained.run(*start, "checkpoint.init_from=hf:nowhere")[0] == 2
    weights = Path("copy", "model.safetensors")
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    code, output = trained.run(*start)
    assert code == 4 and "model.safetensors" in output and not trained.path("b").exists()
    weights.write_bytes(whole)
    code, output = trained.run(*start, "checkpoint.init_from=copy")
    assert code == 2 and "use checkpoint.init_from=hf:copy" in output
    longer = (*start, "model.max_position_embeddings=128", "model.rope.scaling.type=linear", "model.rope.scaling.factor=2.0")
    code, output = trained.run(*longer)
    assert code == 0 and "the weights were trained with model.rope.scaling.type 'none', this run has 'linear'" in output
    assert [(event["key"], event["old"], event["new"]) for event in trained.events("b", "changed")] == [
        ("model.rope.scaling.type", "none", "linear"),
        ("model.rope.scaling.factor", 1.0, 2.0),
    ]
    weights.unlink()
    code, output = trained.run(*longer, "training.steps=2")
    assert code == 0 and "from step 1" in output


def test_import_writes_a_section_that_fits(trained: Workspace, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_model(Path("hf"), to=Path("model.yaml"), force=False)
    assert "init_from: hf:hf" in capsys.readouterr().out
    assert trained.run("run.name=c", "model=model.yaml", "checkpoint.init_from=hf:hf", *SHORT, *TORCH)[0] == 0
    with pytest.raises(ConfigError, match="--force overwrites"):
        import_model(Path("hf"), to=Path("model.yaml"), force=False)
    with pytest.raises(ConfigError, match=r"config\.json"):
        import_model(Path("runs"), to=None, force=False)


def test_export_replaces_nothing_unasked(here: Path) -> None:
    """A folder that is there is left alone; --force replaces a model, never anything else. Bad options are named at once."""
    shutil.copytree("hf", "old")
    before = Path("old", "model.safetensors").read_bytes()
    with pytest.raises(ConfigError, match="--force replaces"):
        export(Path("runs/a"), to="old")
    assert Path("old", "model.safetensors").read_bytes() == before
    export(Path("runs/a/checkpoints/step_00000001"), to="old", force=True)
    assert len(Path("old", "model.safetensors").read_bytes()) > len(before)
    Path("empty").mkdir()
    export(Path("runs/a"), to="empty")
    assert Path("empty", "config.json").exists()
    with pytest.raises(ConfigError, match=r"(?s)fp8.*something other than a model"):
        export(Path("runs/a"), to="runs", dtype="fp8", force=True)
    with pytest.raises(ConfigError, match="RUN"):
        export(Path("runs/nothing"), to="x")
    with pytest.raises(DataError, match="nowhere"):
        export(Path("runs/a"), to="x", overrides=["data.path=nowhere"])
    with pytest.raises(
        ConfigError, match=r"(?s)model\.rope\.theta: got 'another value', wanted the model as it was trained.*model\.mlp\.bias"
    ):
        export(Path("runs/a"), to="x", overrides=["model.rope.theta=5", "--model.mlp.bias=true"])
    assert not Path("x").exists()
