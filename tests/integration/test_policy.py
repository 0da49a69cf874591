"""If these fail, a run folder is overwritten, or refused without saying what to do."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from data_pipeline.loader import Dataset, Phase, RowSource, batch_id
from megatron_lite.checkpoint.committed import stored_state
from tests.integration.jobs import Workspace

PLAIN = ("training.engine=torch", "parallel.zero_stage=0", "training.steps=4")


@pytest.fixture
def trained(workspace: Workspace) -> Workspace:
    """A workspace with run `a`: four steps done, checkpoints of steps 2 and 4."""
    code, output = workspace.run(*PLAIN)
    assert code == 0, output
    return workspace


TEN_FAULTS = {
    "traning.steps=3": "traning: got 'a mapping with steps', wanted no such key. did you mean training?",
    "checkpoint.interval=3": "did you mean checkpoint.interval_steps?",
    "optimizer.lr=-1": "optimizer.lr: got -1, wanted greater than 0",
    "parallel.tp=3": "parallel.tp: got 3, wanted a divisor of model.num_attention_heads (4). use 2 or 4",
    "training.precision=fp8": "training.precision: got 'fp8', wanted 'fp32' or 'bf16'",
    "model.rope.theta=${model.nothing}": "model.rope.theta: got '${model.nothing}', wanted a reference to another key",
    "model.num_key_value_heads=3": "model.num_key_value_heads: got 3, wanted a divisor of num_attention_heads (4). use 2 or 4",
    "lr_scheduler.warmup_steps=100000": "lr_scheduler.warmup_steps: got 100000, wanted at most the run's",
    "deepspeed.train_batch_size=5": "deepspeed.train_batch_size: got 5, wanted",
    "run.name=a/b": "run.name: got 'a/b'",
}


def test_faults_are_all_named_at_once_before_torch_is_loaded(workspace: Workspace) -> None:
    """Exit 2, every fault with its remedy: of composing, of one section, across sections; and no second spent on loading torch."""
    program = f"import sys; sys.argv[1:] = {[str(workspace.config), *TEN_FAULTS]!r}; from launcher.train import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules; sys.exit(code)"
    result = workspace.command("python", "-c", program)
    assert result.returncode == 2, result.stderr
    assert [said for said in TEN_FAULTS.values() if said not in result.stderr] == [], result.stderr
    assert not (workspace.folder / "runs").exists()


def test_a_layout_that_the_world_cannot_hold_is_refused(workspace: Workspace) -> None:
    """One process of a job for two trains nothing alone (B141)."""
    code, output = workspace.run("parallel.tp=2")
    assert code == 2 and "deepspeed --num_gpus 2 launcher/train.py" in output
    assert not workspace.path("a").exists()


def test_no_data_is_exit_3(workspace: Workspace) -> None:
    code, output = workspace.run(*PLAIN, "data.path=nowhere")
    assert code == 3 and "mlite data build" in output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("model.hidden_size=64", "model.hidden_size: got 64, wanted 32"),
        ("model.rope.theta=5e5", "model.rope.theta: got 500000.0, wanted 10000.0"),
        ("run.seed=8", "run.seed: got 8, wanted 7"),
        ("training.sequence_length=16", "training.sequence_length: got 16, wanted 32"),
        ("data.packing=concat", "data.packing: got 'concat', wanted 'best_fit'"),
    ],
)
def test_what_a_run_is_cannot_change(trained: Workspace, change: str, sentence: str) -> None:
    """Exit 2, old and new shown, nothing written but the refusal (B121)."""
    before = trained.metrics("a")
    code, output = trained.run(*PLAIN, change)
    assert code == 2 and sentence in output and "choose another run.name" in output
    assert trained.metrics("a") == before
    assert trained.status("a")["code"] == 2
    assert trained.run(*PLAIN)[0] == 0  # put back, the run goes on (here: is finished)
    assert trained.status("a")["state"] == "done"


def test_foreign_data_is_exit_3(trained: Workspace, other_dataset: Path) -> None:
    """Other tokens under the same tokenizer (B121)."""
    code, output = trained.run(*PLAIN, f"data.path={other_dataset}")
    assert code == 3 and "the data is not what" in output and "init_from" in output


def test_data_that_moved_is_the_same_data(trained: Workspace, dataset: Path, tmp_path: Path) -> None:
    shutil.copytree(dataset, tmp_path / "moved")
    code, output = trained.run(*PLAIN, "training.steps=5", f"data.path={tmp_path / 'moved'}")
    assert code == 0 and "step 5/5" in output


def damage(path: Path, how: str) -> None:
    if how == "flipped byte":
        data = bytearray(path.read_bytes())
        data[-100] ^= 1
        path.write_bytes(data)
    elif how == "truncated":
        os.truncate(path, path.stat().st_size - 7)
    else:
        path.unlink()


@pytest.mark.parametrize("how", ["flipped byte", "truncated", "missing"])
@pytest.mark.parametrize("name", ["rank_00000.safetensors", "manifest.json"])
def test_a_damaged_checkpoint_is_exit_4_and_older_ones_only_when_asked_for(trained: Workspace, how: str, name: str) -> None:
    """Named and refused; with allow_fallback the older one is taken, which is said, and the damaged one is set aside."""
    damage(trained.path("a") / "checkpoints" / "step_00000004" / name, how)
    more = (*PLAIN, "training.steps=6")
    code, output = trained.run(*more)
    assert code == 4 and "step_00000004" in output and "checkpoint.allow_fallback=true" in output
    assert trained.status("a")["code"] == 4
    code, output = trained.run(*more, "checkpoint.allow_fallback=true")
    assert code == 0 and "going on from step_00000002" in output
    assert trained.checkpoints("a") == ["step_00000004", "step_00000004.bad", "step_00000006"]
    assert [record["step"] for record in trained.metrics("a") if "loss" in record] == [1, 2, 3, 4, 5, 6]
    assert trained.events("a", "passed_over")


def test_deleted_checkpoints_do_not_start_the_run_again(trained: Workspace) -> None:
    shutil.rmtree(trained.path("a") / "checkpoints")
    code, output = trained.run(*PLAIN)
    assert code == 4 and "says that step 4 was saved" in output


def test_resume_words(trained: Workspace) -> None:
    """never: no folder with checkpoints is touched; a path seeds an empty run only; the same command then goes on."""
    code, output = trained.run(*PLAIN, "checkpoint.resume=never")
    assert code == 2 and "checkpoint.resume" in output
    seed = (*PLAIN, "training.steps=6", f"checkpoint.resume={trained.path('a')}")
    assert trained.run(*seed)[0] == 2
    code, output = trained.run(*seed, "run.name=b")
    assert code == 0 and "from step 4" in output
    assert [record["step"] for record in trained.metrics("b") if "loss" in record] == [5, 6]
    assert trained.run(*seed, "run.name=b", "training.steps=7")[0] == 0
    code, output = trained.run(*PLAIN, "run.name=c", "checkpoint.resume=runs/nothing")
    assert code == 4 and "runs/nothing" in output


def test_init_from_takes_weights_alone(trained: Workspace, other_dataset: Path) -> None:
    """Step 0, its own schedule, other data; the first held-out loss on the old data is the old run's last. Another rotation is on
    record; other heads of the same shapes are refused."""
    last = trained.metrics("a")[-1]
    code, output = trained.run(*PLAIN, "run.name=b", f"checkpoint.init_from={trained.path('a')}")
    assert code == 0 and "with the weights of" in output
    first = trained.metrics("b")[0]
    assert first["step"] == 0 and first["eval/loss"] == pytest.approx(last["eval/loss"], abs=1e-6)
    start = (*PLAIN, "run.name=c", f"checkpoint.init_from={trained.path('a')}", f"data.path={other_dataset}")
    code, output = trained.run(*start, "model.num_attention_heads=2", "model.num_key_value_heads=1")
    assert code == 2 and "model.num_attention_heads: got 2, wanted 4 as in" in output
    state = stored_state(trained.path("a"))  # what a login node sees of it
    assert state is not None and state["step"] == 4 and state["model"]["num_attention_heads"] == 4
    code, output = trained.run(*start, "model.rope.theta=5e5")
    assert code == 0 and "the weights were trained with model.rope.theta 10000.0" in output
    assert [(event["key"], event["old"], event["new"]) for event in trained.events("c", "changed")] == [("model.rope.theta", 1e4, 5e5)]
    source = f"checkpoint.init_from={trained.path('a')}"
    code, output = trained.run(*PLAIN, "run.name=d", source, "model.num_hidden_layers=3", "model.vocab_size=300")
    assert code == 4 and "layers.2" in output and "model.vocab_size is 300, the data's tokenizer has 257" in output


def test_one_job_a_run_folder(workspace: Workspace) -> None:
    """Exit 7 while another job runs, which it doesn't disturb; none once that is dead, however it died (B141)."""
    first = workspace.start(*PLAIN, fault="slow_step:5")
    first.wait_for("step 1/4")
    code, output = workspace.run(*PLAIN)
    assert code == 7 and "is in use by process" in output and str(first.ranks[0].pid) in output
    assert workspace.status("a")["state"] == "running"
    first.kill()
    code, output = workspace.run(*PLAIN)
    assert code == 0, output


def test_a_finished_run_says_so(trained: Workspace) -> None:
    before = trained.metrics("a")
    code, output = trained.run(*PLAIN)
    assert code == 0 and "is finished: 4 of 4 steps are done" in output
    assert trained.metrics("a") == before


def test_the_saved_config_resumes_the_same_run(trained: Workspace) -> None:
    """A requeue starts from runs/NAME/config.yaml: the same identity, and from another folder it is refused (B147)."""
    saved = Workspace(trained.folder, trained.path("a") / "config.yaml", starts=50)
    code, output = saved.run("training.steps=5")
    assert code == 0 and "attempt 2 from step 4" in output
    (trained.folder / "elsewhere").mkdir()
    away = Workspace(trained.folder / "elsewhere", saved.config)
    code, output = away.run("training.steps=6")
    assert code == 2 and "run.dir" in output


def test_what_is_saved_beside_the_metrics(workspace: Workspace) -> None:
    """The resolved config, DeepSpeed's JSON, the environment and a log a rank stand in the run folder."""
    code, output = workspace.run("parallel.tp=2", "training.steps=2", world=2)
    assert code == 0, output
    run = workspace.path("a")
    assert "vocab_size: 257" in (run / "config.yaml").read_text()
    assert json.loads((run / "deepspeed.json").read_text())["gradient_accumulation_steps"] == 1
    environment = json.loads((run / "attempts/0001/environment.json").read_text())
    assert environment["world_size"] == 2 and environment["packages"]["torch"]
    assert sorted(path.name for path in (run / "attempts/0001/log").iterdir()) == ["rank_00000.log", "rank_00001.log"]
    assert (run / "loss.png").stat().st_size > 1000
    keys = {"step", "tokens", "loss", "grad_norm", "lr", "batch_id", "tokens_per_second", "step_time_s", "data_wait_s"}
    assert keys == json.loads((run / "metrics.jsonl").read_text().splitlines()[1]).keys()


def test_owned_deepspeed_keys_are_refused_with_ours_named(workspace: Workspace) -> None:
    code, output = workspace.run("deepspeed.gradient_clipping=0.5")
    assert code == 2 and "optimizer.max_grad_norm" in output
    code, output = workspace.run(*PLAIN, "deepspeed.zero_optimization.reduce_bucket_size=1000")
    assert code == 2 and "training.engine: torch" in output


def test_new_weights_are_a_new_phase_on_record(workspace: Workspace, dataset: Path, other_dataset: Path) -> None:
    """The mixture may change half-way: from the next sample on, written to events.jsonl and into the checkpoints, and kept."""
    mixture = "data={{sources: [{{path: {}, weight: {}}}, {{path: {}, weight: 1}}]}}"
    assert workspace.run(*PLAIN, mixture.format(dataset, 1, other_dataset))[0] == 0
    changed = mixture.format(dataset, 3, other_dataset)
    code, output = workspace.run(*PLAIN, "training.steps=6", changed)
    assert code == 0 and "data.weights" in output, output
    manifest = json.loads((workspace.path("a") / "checkpoints/step_00000006/manifest.json").read_text())
    phases = [{"from_sample": 0, "weights": [1.0, 1.0]}, {"from_sample": 16, "weights": [3.0, 1.0]}]
    assert manifest["state"]["phases"] == phases
    assert workspace.run(*PLAIN, "training.steps=7", changed)[0] == 0
    manifest = json.loads((workspace.path("a") / "checkpoints/step_00000007/manifest.json").read_text())
    assert manifest["state"]["phases"] == phases
    assert workspace.run(*PLAIN, "training.steps=8", f"data={{sources: [{{path: {dataset}}}]}}")[0] == 3


def test_a_schedule_of_weights_and_a_cap(workspace: Workspace, dataset: Path, other_dataset: Path) -> None:
    """Weights change at a step, stopped before it or not; what was drawn is on record; too many epochs are refused at once."""
    sources = f"sources: [{{path: {dataset}}}, {{path: {other_dataset}}}]"
    mixture = f"data={{{sources}, schedule: [{{from_step: 4, weights: [1, 0]}}]}}"
    assert workspace.run(*PLAIN, "run.name=b", "training.steps=2", mixture)[0] == 0
    code, output = workspace.run(*PLAIN, "run.name=b", "training.steps=6", mixture)
    assert code == 0 and "data.weights" not in output, output
    resumed = [json.loads(line).get("batch_id") for line in (workspace.path("b") / "metrics.jsonl").read_text().splitlines()]
    entries = [(Dataset.open(path), 1.0, None) for path in (dataset, other_dataset)]
    phase = Phase(0, (0.5, 0.5), ((12, (1.0, 0.0)),))
    rows = RowSource.open(entries, sequence_length=32, packing="best_fit", seed=7, phases=[phase])
    straight = [batch_id([rows[sample].digest() for sample in range(4 * step, 4 * step + 4)]) for step in range(6)]
    assert [id for id in resumed if id] == straight
    events = [json.loads(line) for line in (workspace.path("b") / "events.jsonl").read_text().splitlines()]
    drawn = [event for event in events if event["event"] == "mixture"]
    assert drawn[0]["phases"] == drawn[1]["phases"] and [source["samples"] for source in drawn[1]["sources"]] == [14, 2]
    capped = f"data={{sources: [{{path: {dataset}, max_epochs: 0.001}}, {{path: {other_dataset}}}]}}"
    code, output = workspace.run(*PLAIN, "run.name=c", capped)
    assert code == 2 and "data.sources[0].max_epochs" in output and "train at most" in output, output
