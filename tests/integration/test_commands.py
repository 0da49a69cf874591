"""If these fail, a command line of the README does not do what it says."""

from __future__ import annotations

import gzip
import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.data_fixtures import tiny_texts
from tests.integration.jobs import TRAIN, Workspace, clean_environment, free_port
from tests.paths import ROOT

STEPS = ("training.steps=4",)


def losses(workspace: Workspace, name: str) -> list[tuple[Any, ...]]:
    return [(record["step"], record["batch_id"], record["lr"], record["tokens"]) for record in workspace.metrics(name) if "loss" in record]


def test_every_starter_trains_the_same_run(workspace: Workspace) -> None:
    """deepspeed with tp 2, torchrun with dp 2, mlite, plain python: the same batches, learning rates and losses (B039, B154)."""
    config = ("--config", str(workspace.config), *STEPS)
    commands = {
        "deepspeed": ("deepspeed", "--num_gpus", "2", "--master_port", str(free_port()), TRAIN, *config, "parallel.tp=2"),
        "torchrun": ("torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), TRAIN, *config, "parallel.zero_stage=2"),
        "mlite": (
            "mlite",
            "train",
            *config,
            "parallel.tp=2",
            "parallel.sequence_parallel=true",
            "training.engine=torch",
            "parallel.zero_stage=0",
        ),
        "python": ("python", TRAIN, *config),
    }
    for name, command in commands.items():
        result = workspace.command(*command, f"run.name={name}")
        assert result.returncode == 0, (name, result.stdout, result.stderr)
        assert losses(workspace, name) == losses(workspace, "deepspeed")
        for one, other in zip(workspace.metrics("deepspeed"), workspace.metrics(name)):
            for key in one.keys() & {"loss", "eval/loss"}:
                assert other[key] == pytest.approx(one[key], abs=1e-4), (name, one, other)

    last = [record for record in workspace.metrics("python") if "eval/loss" in record][-1]
    result = workspace.command("mlite", "eval", "runs/deepspeed")
    score = json.loads(result.stdout)
    assert score["loss"] == pytest.approx(last["eval/loss"], abs=1e-4) and score["step"] == 4
    assert math.log(score["perplexity"]) == pytest.approx(score["loss"], abs=1e-6)  # B079
    status = json.loads(workspace.command("mlite", "status", "runs/torchrun").stdout)
    assert (status["state"], status["step"], status["alive"]) == ("done", 4, False)
    two = workspace.command(
        "torchrun", "--nproc_per_node", "2", "--master_port", str(free_port()), "-m", "launcher.cli", "eval", "runs/python", "parallel.tp=2"
    )
    assert json.loads(two.stdout)["loss"] == pytest.approx(last["eval/loss"], abs=1e-4), two.stderr


@pytest.fixture
def trained(workspace: Workspace) -> Workspace:
    assert workspace.run(*STEPS, "training.engine=torch", "parallel.zero_stage=0")[0] == 0
    return workspace


def test_eval_of_other_data_and_generate(trained: Workspace, other_dataset: Path) -> None:
    own = json.loads(trained.command("mlite", "eval", "runs/a").stdout)
    other = json.loads(trained.command("mlite", "eval", "runs/a", f"data.path={other_dataset}").stdout)
    assert other["loss"] != own["loss"] and other["data"] == str(other_dataset)
    older = json.loads(trained.command("mlite", "eval", "runs/a/checkpoints/step_00000002").stdout)
    assert older["step"] == 2 and older["loss"] > own["loss"]
    lost = trained.command("mlite", "eval", "runs/a", "data.path=nowhere", "model.rope.theta=5e5", "model.max_position_embeddings=128")
    assert lost.returncode == 3
    for change in ("model.rope.theta 10000.0, this model has 500000.0", "model.max_position_embeddings 64, this model has 128"):
        assert f"warning: the weights were trained with {change}: it is not the model" in lost.stderr
    assert trained.command("mlite", "eval", "runs/nothing").returncode == 2

    greedy = ("mlite", "generate", "runs/a", "--temperature", "0", "--max-tokens", "8")
    text = trained.command(*greedy, "--prompt", "the ")
    assert text.returncode == 0 and text.stdout.startswith("the ") and text.stdout.endswith("\n")
    lines = [json.loads(line) for line in trained.command(*greedy, "-p", "the ", "-p", "of and to", "--json").stdout.splitlines()]
    assert [line["prompt"] for line in lines] == ["the ", "of and to"] and "the " + lines[0]["text"] + "\n" == text.stdout
    sampled = [trained.command("mlite", "generate", "runs/a", "--seed", str(seed), "--max-tokens", "8").stdout for seed in (1, 2)]
    assert sampled[0] != sampled[1]
    assert trained.command("mlite", "generate", "runs/a", "--temperature", "-1").returncode == 2


def test_init_prints_commands_that_train(tmp_path: Path) -> None:
    """`mlite init x --text DIR` and what it prints, typed as they stand, end in a model that writes."""
    (tmp_path / "my texts").mkdir()
    for number, text in enumerate(tiny_texts(60, seed=1)):
        with gzip.open(tmp_path / "my texts" / f"{number}.jsonl.gz", "wt") as file:
            file.write(json.dumps({"title": "t", "content": text * 3}) + "\n")
    workspace = Workspace(tmp_path, tmp_path / "configs" / "run" / "x.yaml")
    first = workspace.command("mlite", "init", "x", "--text", "my texts")
    assert first.returncode == 0, first.stderr
    assert 'text_field: "content"' in (tmp_path / "configs" / "data" / "x.yaml").read_text()
    commands = [shlex.split(line) for line in first.stdout.splitlines() if line.startswith("  mlite")]
    assert len(commands) == 2
    for command in commands:
        short = (
            ("training.steps=3", "lr_scheduler.warmup_steps=1", "training.sequence_length=64", "logging.wandb.mode=disabled")
            if "train" in command
            else ()
        )
        result = workspace.command(*command, *short)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
    assert workspace.command("mlite", "generate", "runs/x", "--max-tokens", "3").returncode == 0
    again = workspace.command("mlite", "init", "x", "--text", "my texts")
    assert again.returncode == 2 and "--force" in again.stderr
    assert workspace.command("mlite", "init", "y", "--text", "nothing here").returncode == 3


@pytest.mark.parametrize(
    ("make", "expected"), [("paragraphs", "txt_documents: paragraph"), ("lines", "txt_documents: line"), ("files", None)]
)
def test_init_cuts_few_text_files(tmp_path: Path, make: str, expected: str | None) -> None:
    """One file has to give many documents, or none could be held out."""
    texts = tiny_texts(200, seed=2)
    if make == "files":
        for number, text in enumerate(texts):
            (tmp_path / f"{number}.txt").write_text(text)
    else:
        (tmp_path / "all.txt").write_text(("\n\n" if make == "paragraphs" else "\n").join(texts))
    workspace = Workspace(tmp_path, tmp_path / "unused")
    assert workspace.command("mlite", "init", "x", "--text", "*.txt").returncode == 0
    config = (tmp_path / "configs" / "data" / "x.yaml").read_text()
    assert expected in config if expected else "txt_documents" not in config


def test_help_comes_at_once_and_mistakes_are_usage() -> None:
    """Half a second, since nothing heavy is loaded; exit 2 for what isn't a command."""
    program = "import sys, launcher.cli; heavy = {'torch', 'numpy', 'datasets', 'tokenizers', 'deepspeed', 'wandb', 'matplotlib', 'pyarrow'} & set(sys.modules); assert not heavy, heavy"
    workspace = Workspace(ROOT, ROOT)
    result = workspace.command(sys.executable, "-c", program)
    assert result.returncode == 0, result.stderr
    began = time.monotonic()
    shown = workspace.command("mlite", "--help")
    assert shown.returncode == 0 and "train" in shown.stdout and time.monotonic() - began < 20  # 0.1 s where nothing else runs
    assert workspace.command("mlite", "tain").returncode == 2
    assert workspace.command("mlite", "train").returncode == 2
    assert workspace.command("mlite", "eval").returncode == 2


def test_doctor_looks_at_everything() -> None:
    result = Workspace(ROOT, ROOT).command("mlite", "doctor")
    assert result.returncode == 0, result.stdout
    for word in ("Python", "packages", "cores", "processes on this machine", "wandb"):
        assert word in result.stdout


@pytest.mark.parametrize(
    "settings",
    [{"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9"}],
    ids=["offline", "dead server"],
)
def test_wandb_itself_never_stops_training(workspace: Workspace, settings: dict[str, str]) -> None:
    """The real package, offline and with a server that isn't there: all steps are done, quickly, and in metrics.jsonl (B149)."""
    pytest.importorskip("wandb")
    workspace.environ.update(settings, HOME=str(workspace.folder))
    code, output = workspace.run("training.engine=torch", "parallel.zero_stage=0", "logging.wandb.mode=auto", "parallel.tp=2", world=2)
    assert code == 0 and output.count("warning: wandb") <= 1, output
    assert [record["step"] for record in workspace.metrics("a") if "loss" in record] == list(range(1, 9))
    if settings.get("WANDB_MODE") == "offline":
        assert len(list((workspace.path("a") / "wandb").glob("offline-run-*"))) == 1  # one run, of the first rank (B150)


def test_clean_environment_is_clean() -> None:
    assert not {"RANK", "WANDB_MODE", "SLURM_JOB_ID"} & clean_environment().keys()
