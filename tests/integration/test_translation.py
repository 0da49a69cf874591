"""If this fails, an encoder-decoder can't be trained from aligned pairs by the command that trains everything, or not translate."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import megatron_lite
from data_pipeline.build import build
from launcher.cli import app
from launcher.datasets import open_datasets, open_rows
from launcher.mixture import cap_faults, expected_mixture
from launcher.saved_config import read_config
from megatron_lite.inference.beam import BeamOptions
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.inference.text import Answer
from tests.integration.conftest import CONFIG
from tests.integration.jobs import Workspace
from tests.unit.test_pairs import pair_config, sentences, write_files

PLAIN = ("training.engine=torch", "parallel.zero_stage=0")


def test_pairs_train_resume_on_another_layout_and_translate(tmp_path: Path) -> None:
    """tp 2 with sequence parallel for three steps, then one process: the losses, batches and held-out scores of a run that nothing
    happened to; rows longer than the source's are refused; a translation stands for itself, a line for each source."""
    write_files(tmp_path, sentences(120))
    build(pair_config(tmp_path, tmp_path / "data"), quiet=True)
    lengths = {"source_length": 48, "sequence_length": 64}
    config = {**CONFIG, "data": {"path": str(tmp_path / "data")}, "lr_scheduler": {"name": "inverse_sqrt", "warmup_steps": 2}}
    config["model"] = {**CONFIG["model"], "family": "seq2seq", "tie_word_embeddings": True, "encoder": {"num_hidden_layers": 1}}
    config["training"] = {**CONFIG["training"], **lengths, "steps": 5, "loss": {"label_smoothing": 0.1}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    workspace = Workspace(tmp_path, tmp_path / "run.yaml")
    code, output = workspace.run(*PLAIN, "run.name=whole")
    assert code == 0, output
    cut = ("parallel.tp=2", "parallel.sequence_parallel=true", "run.name=parts", "training.steps=3")
    code, output = workspace.run(*cut, world=2)
    assert code == 0, output
    code, output = workspace.run(*PLAIN, "run.name=parts", "training.source_length=64")
    assert code == 2 and "training.source_length" in output, output
    code, output = workspace.run(*PLAIN, "run.name=parts")
    assert code == 0, output
    whole, parts = ([line for line in workspace.metrics(name) if "loss" in line] for name in ("whole", "parts"))
    assert [line["batch_id"] for line in parts] == [line["batch_id"] for line in whole]
    assert [line["loss"] for line in parts] == pytest.approx([line["loss"] for line in whole], abs=1e-4)
    scores = [
        [line["eval/loss"] for line in workspace.metrics(name) if line["step"] == 5 and "eval/loss" in line] for name in ("whole", "parts")
    ]
    assert scores[1] == pytest.approx(scores[0], abs=1e-4) and len(scores[0]) == 1

    prompts = [one for one, _ in sentences(3, seed=8)]
    (tmp_path / "sources.txt").write_text("\n".join([prompts[0], "", *prompts[1:]]) + "\n")  # line 2 is blank, and so is its translation
    options = ["--file", str(tmp_path / "sources.txt"), "--beams", "2", "--max-tokens", "6"]
    done = CliRunner().invoke(app, ["generate", str(workspace.path("parts")), *options])
    assert done.exit_code == 0, done.output
    model = megatron_lite.load(workspace.path("parts"))
    expected = [model.best([prompt], max_new_tokens=6, beams=BeamOptions(num_beams=2))[0][0] for prompt in prompts]
    first, *others = (" ".join(each.text.split("\n")) for each in expected)
    assert done.output == "".join(f"{line}\n" for line in (first, "", *others))
    blank, whole_answer = model.best(["", prompts[0]], max_new_tokens=6, beams=BeamOptions(num_beams=2))
    assert blank == [Answer("", "", [], "stop")] and whole_answer == [expected[0]]
    drawn = model.answers([" ", prompts[0]], max_new_tokens=6, n=2)
    assert drawn[0] == [Answer(" ", "", [], "stop", seed=seed) for seed in (0, 1)] and list(model.stream("")) == []
    assert drawn[1][1] == model.answers(prompts[:1], max_new_tokens=6, sampling=SamplingOptions(seed=3))[0][0]
    unasked = CliRunner().invoke(app, ["generate", str(workspace.path("parts"))])
    assert "--prompt: got None, wanted a source" in str(unasked.exception)
    config = read_config(workspace.path("parts"))
    datasets = open_datasets(config.data)
    (about,), epochs = expected_mixture(config, datasets), 5 * config.training.global_batch_size / len(open_rows(config, datasets))
    assert epochs <= about["epochs"] + 1e-3 <= 1.3 * epochs and not cap_faults(config, datasets)
    assert model.scores(["eins"], prompts=["one"]) != model.scores(["eins"], prompts=["two"])
