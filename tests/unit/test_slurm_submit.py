"""If these fail, a job waits in a queue for a mistake that was plain at the login node, or trains something else than was submitted."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from data_pipeline.errors import ConfigError, DataError, RunInUseError
from launcher.commands.status import newest_job, show_status
from launcher.config import load_config
from launcher.lock import RunLock
from launcher.slurm import check as checks
from launcher.slurm import submission as submissions
from launcher.slurm.check import check, check_tools
from launcher.slurm.cluster import ClusterConfig
from launcher.slurm.job import _cluster_beside_sbatch
from launcher.slurm.submission import Submission, folders_of, freeze, recall, remember
from launcher.slurm.submit import HOLD, queue, submit
from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.paths import ROOT

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "max_position_embeddings": 32}
TRAINING = {"steps": 8, "sequence_length": 32, "global_batch_size": 4}
FAKE_SBATCH = """#!/bin/sh
env | grep ^MLITE > env.txt
for word in "$@"; do echo "$word"; done > sbatch.txt
if [ -e refuse ]; then echo "sbatch: error: invalid partition specified: gpu" >&2; exit 1; fi
echo 4711
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a config and data, on a machine that seems to have Slurm."""
    monkeypatch.chdir(tmp_path)
    tiny_dataset(tmp_path / "data", tiny_texts(12))
    (tmp_path / "run.yaml").write_text(
        yaml.safe_dump({"run": {"name": "a"}, "model": SMALL, "data": {"path": "data"}, "training": TRAINING})
    )
    (tmp_path / "bin").mkdir()
    for name, text in (("sbatch", FAKE_SBATCH), ("srun", "#!/bin/sh\n"), ("scontrol", "#!/bin/sh\nexit 1\n")):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    return tmp_path


def test_what_was_submitted_is_frozen(folder: Path) -> None:
    """Config with overrides, cluster, commit and difference lie in the run's folder; the job is given these and nothing else (B147)."""
    words = ["run.yaml", "training.steps=6", "cluster.nodes=2", "cluster.setup=['module load x']"]
    assert submit(words, by="sbatch", usage="") == 0
    found = Submission(folder / "runs" / "a" / "submissions" / "0001")
    (folder / "run.yaml").write_text("edited: true")
    assert found.load(world_size=2).training.steps == 6 and found.cluster().nodes == 2
    assert found.setup.read_text() == "module load x\n"
    record = found.record()
    assert record["job"] == "4711" and record["cwd"] == str(folder) and len(record["commit"] or "0" * 40) == 40
    given = (folder / "sbatch.txt").read_text().splitlines()
    assert given[-2:] == ["--submission", str(found.folder)] and "--nodes=2" in given and "--job-name=mlite-a" in given
    assert found.python.read_text() == f"{sys.executable}\n"
    handed_on = {line.partition("=")[0] for line in (folder / "env.txt").read_text().splitlines()}
    assert not handed_on - set(os.environ)  # all is in the files: sites may have sbatch hand no environment on
    assert newest_job(folder / "runs" / "a") == ("4711", {})


def test_the_next_job_waits_for_this_one_and_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for as the first was; that this one was stopped early is not handed on."""
    assert submit(["run.yaml", "cluster.requeue=false"], by="sbatch", usage="") == 0
    monkeypatch.setenv("MLITE_STOPPED_EARLY", "1")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert queue(Submission(folder / "runs" / "a" / "submissions" / "0001"), after="4711") == "4711"
    given = (folder / "sbatch.txt").read_text().splitlines()
    assert "--dependency=singleton,afterany:4711" in given and "--no-requeue" in given
    assert "STOPPED" not in (folder / "env.txt").read_text()


def test_what_slurm_refuses_leaves_nothing_behind(folder: Path) -> None:
    (folder / "refuse").touch()
    with pytest.raises(ConfigError, match="invalid partition specified: gpu"):
        submit(["run.yaml", "cluster.partition=gpu"], by="sbatch", usage="")
    assert list((folder / "runs" / "a" / "submissions").iterdir()) == []


def test_a_dry_run_submits_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(["run.yaml", "cluster.nodes=2-4"], by="submitit", usage="", dry_run=True) == 0
    assert "would run 4 ranks: sbatch --job-name=mlite-a --nodes=2-4" in capsys.readouterr().out
    assert not (folder / "runs").exists() and not (folder / "sbatch.txt").exists()


def test_faults_are_named_before_the_queue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Config and world, data, disk, a missing image, a busy run: each with its own exit code."""
    config = folder / "run.yaml"
    with pytest.raises(ConfigError, match=r"global_batch_size: got 4.*6 processes"):
        check(config, [], ClusterConfig(nodes=3, tasks_per_node=2))
    with pytest.raises(DataError):
        check(config, ["data.path=elsewhere"], ClusterConfig())
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    with pytest.raises(ConfigError) as error:
        check(config, [], ClusterConfig.model_validate({"container": {"image": "gone.sif"}}))
    assert {fault.field for fault in error.value.faults} == {"run.dir", "cluster.container.image"}
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    lock = RunLock(folder / "runs" / "a" / ".lock")
    lock.acquire(job_id="9")
    with pytest.raises(RunInUseError):
        check(config, [], ClusterConfig())
    lock.release()
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match="sbatch, scontrol, srun"):
        check_tools()


def test_weights_of_other_heads_or_tokens_do_not_wait_in_a_queue(folder: Path) -> None:
    """As their manifest says; where there is none yet, another job will have made it by then."""
    assert check(folder / "run.yaml", ["checkpoint.init_from=runs/b"], ClusterConfig()).world == 1
    state = {"model": {**SMALL, "num_attention_heads": 2, "num_key_value_heads": None}, "tokenizer_hash": "f" * 64}
    saved = folder / "runs" / "b" / "checkpoints" / "step_00000004"
    saved.mkdir(parents=True)
    (saved / "manifest.json").write_text(json.dumps({"state": state}))
    for source in ("runs/b", str(saved)):
        with pytest.raises(ConfigError) as error:
            check(folder / "run.yaml", [f"checkpoint.init_from={source}"], ClusterConfig())
        assert [fault.field for fault in error.value.faults] == [
            "model.num_attention_heads", "model.num_key_value_heads", "the data's tokenizer"
        ]  # fmt: skip


def test_faults_of_run_and_cluster_are_named_together(folder: Path) -> None:
    with pytest.raises(ConfigError) as error:
        submit(["run.yaml", "optimizer.lrr=1", "cluster.nodez=2", "cluster.gpus_per_node=-1"], by="sbatch", usage="")
    assert {fault.field for fault in error.value.faults} == {"optimizer.lrr", "cluster.nodez", "cluster.gpus_per_node"}


def test_what_is_finished_is_not_queued(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "runs" / "a").mkdir(parents=True)
    (folder / "runs" / "a" / "status.json").write_text(json.dumps({"state": "done", "code": 0, "step": 8, "time": time.time()}))
    assert submit(["run.yaml"], by="sbatch", usage="") == 0
    assert "is finished: 8 steps are done" in capsys.readouterr().out and not (folder / "sbatch.txt").exists()
    assert check(folder / "run.yaml", ["training.steps=9"], ClusterConfig()).finished == ""


def test_a_budget_in_tokens_is_compared_with_the_one_that_was_done(folder: Path) -> None:
    """Steps don't tell: 1,024 tokens took 6 where half of them were trained on at another batch size (8 at 4 sequences, 4 at 8)."""
    run = folder / "runs" / "a"
    run.mkdir(parents=True)
    (run / "status.json").write_text(json.dumps({"state": "done", "code": 0, "step": 6, "time": time.time()}))
    tree = yaml.safe_load((folder / "run.yaml").read_text())
    tree["training"] = {**TRAINING, "steps": None, "tokens": 1024}
    for path in (folder / "run.yaml", run / "config.yaml"):
        path.write_text(yaml.safe_dump(tree))
    finished = check(folder / "run.yaml", [], ClusterConfig()).finished
    assert finished == "runs/a is finished: 6 steps are done. To train on, raise training.tokens"
    larger = ["training.tokens=1280", "training.global_batch_size=8"]  # 5 steps, were they all of this size: but 256 tokens are left
    assert check(folder / "run.yaml", larger, ClusterConfig()).finished == ""
    by_steps = ["training.tokens=null", "training.steps=6"]
    assert check(folder / "run.yaml", by_steps, ClusterConfig()).finished.endswith("raise training.steps")
    (run / "config.yaml").write_text(yaml.safe_dump({**tree, "from_the_future": 1}))
    assert check(folder / "run.yaml", [], ClusterConfig()).finished == ""  # not known here: the job will say


def test_room_is_asked_for_every_checkpoint_that_stays(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that stay for good too, less those that are there; what was moved aside or is half written makes no room."""
    saved = folder / "runs" / "a" / "checkpoints"
    for name in ("step_00000001", "step_00000002", "step_00000002.bad", "step_00000003.tmp-1", "step_00000001.deleting"):
        (saved / name).mkdir(parents=True)
        (saved / name / "manifest.json").touch()
    size = check(folder / "run.yaml", [], ClusterConfig()).config.model
    datasets = checks.Dataset.open("data")
    one = checks.checkpoint_bytes(size.model_copy(update={"vocab_size": datasets.vocab_size}))
    usage = namedtuple("usage", "total used free")
    words = [
        "checkpoint={interval_steps: 2, keep_last: 1, keep_every_steps: 2}"
    ]  # 7 and 8 of 8 steps, and 2, 4, 6: five, of which two are there
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(1, 1, 3 * one))
    check(folder / "run.yaml", words, ClusterConfig())
    monkeypatch.setattr(checks.shutil, "disk_usage", lambda path: usage(1, 1, 3 * one - 1))
    with pytest.raises(ConfigError, match=r"for 3 more checkpoints of .* raise checkpoint\.keep_every_steps"):
        check(folder / "run.yaml", words, ClusterConfig())


def test_sizes_of_a_range_that_do_not_fit_are_said(folder: Path) -> None:
    notes = check(folder / "run.yaml", ["model.vocab_size=300"], ClusterConfig(nodes="2-4")).notes
    assert any(note.startswith("with 3 nodes the run can't start") for note in notes)
    assert any(note.startswith("model.vocab_size is 300, the data's tokenizer has 257") for note in notes)


def test_a_requeued_job_finds_what_it_started_with(folder: Path) -> None:
    """A job that came by sbatch alone: the config that it froze, not the file that was edited since (B147)."""
    environ = {"SLURM_JOB_ID": "8", "SLURM_SUBMIT_DIR": str(folder)}
    frozen = freeze(check(folder / "run.yaml", [], ClusterConfig()).config, ClusterConfig(), by="sbatch", options={}, sbatch_args=[])
    assert recall(environ) is None
    remember(frozen, environ)
    assert recall(environ) is None  # another job of that id, on a cluster that counts anew
    found = recall({**environ, "SLURM_RESTART_COUNT": "1"})
    assert found is not None and found.folder.samefile(frozen.folder)
    assert recall({**environ, "SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "1"}) is None


def test_a_container_sees_all_that_the_config_names(folder: Path) -> None:
    """Where weights come from too; and a link by its own name, which the config has, beside what it leads to."""
    for name in ("theirs", "before", "store/data"):
        (folder / name).mkdir(parents=True)
    (folder / "link").symlink_to(folder / "store")
    for key, source in (("checkpoint.init_from=hf:theirs", "theirs"), ("checkpoint.resume=before", "before")):
        config = load_config(folder / "run.yaml", ["data.path=link/data", "run.dir=elsewhere", key])
        places = ("elsewhere", "link/data", "store/data", source)
        assert folders_of(config) == [folder, ROOT, *(folder / place for place in places)]
    gone = load_config(folder / "run.yaml", ["checkpoint.init_from=gone"])  # no longer needed by a run that has checkpoints
    assert folders_of(gone) == [folder, ROOT, folder / "runs/a", folder / "data"]
    (folder / "cache").mkdir()
    far = load_config(folder / "run.yaml", ["data.path=s3://bucket/x", "data.cache.dir=cache"])
    assert folders_of(far) == [folder, ROOT, folder / "runs/a", folder / "cache"]


def test_words_that_a_job_of_sbatch_can_not_use_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has its nodes already; what a cluster's file asks for besides is named."""
    with pytest.raises(ConfigError) as error:
        _cluster_beside_sbatch(["cluster.nodes=2", "cluster.time=60", "cluster.srun_args=[--mpi=none]"])
    assert {fault.field for fault in error.value.faults} == {"cluster.nodes", "cluster.time"}
    (folder / "site.yaml").write_text("{partition: gpu, gpus_per_node: 8, setup: [module load x]}")
    found = _cluster_beside_sbatch(["cluster=site.yaml", "cluster.container.image=a.sif"])
    assert found.setup == ["module load x"] and found.container is not None
    assert "sbatch's own options count, not the cluster's gpus_per_node, partition" in capsys.readouterr().out


def test_signals_are_held_back_alike_by_both_ways_to_submit() -> None:
    assert f"hold='{HOLD}'" in (ROOT / "slurm" / "pretrain.sh").read_text()


def test_submissions_are_numbered(folder: Path) -> None:
    config = check(folder / "run.yaml", [], ClusterConfig()).config
    make: Callable[[], Submission] = lambda: freeze(config, ClusterConfig(), by="sbatch")
    assert [make().folder.name for _ in range(3)] == ["0001", "0002", "0003"]
    assert submissions.job_name(config) == "mlite-a"


def test_status_of_a_run_that_waits_in_the_queue(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Submitted, not begun: the job is named, whether or not Slurm answers here."""
    assert submit(["run.yaml"], by="sbatch", usage="") == 0
    capsys.readouterr()
    show_status(folder / "runs" / "a")
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], shown["alive"], shown["job"]) == ("queued", False, {"id": "4711"})
