"""What runs inside a job, whoever submitted it: `python -m launcher.slurm.job`, from slurm/pretrain.sh, or submitit's callable."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data_pipeline.errors import ConfigError, Fault, MegatronLiteError
from launcher.config import load_config, parse_arguments
from launcher.console import show
from launcher.slurm import submit
from launcher.slurm.allocation import read_allocation, show_job, tasks_by_node
from launcher.slurm.asked import gpus_per_node, options_of
from launcher.slurm.attempt import run_attempt
from launcher.slurm.chain import Decision
from launcher.slurm.cluster import ClusterConfig, load_cluster, split_words
from launcher.slurm.submission import ROOT, SCRIPT, Submission, freeze, recall, remember

USABLE = ("container", "setup", "srun_args")  # of the cluster's keys, by a job that sbatch started with options of its own
USAGE = "Usage: sbatch [OPTIONS] slurm/pretrain.sh CONFIG [section.key=value ...] [cluster=NAME] [cluster.(container|setup|srun_args)=value ...]"


def main(argv: list[str]) -> int:
    """Inside a job: train, and the job's exit code. Elsewhere: check and submit."""
    try:
        if "SLURM_JOB_ID" not in os.environ:
            return submit.main(argv)
        submission = _submission(argv)
        if submission.setup.exists() and argv[:1] != ["--submission"]:
            _start_over(submission)
        decision = run_attempt(submission, os.environ)
    except MegatronLiteError as error:
        show(f"pretrain: {error}", error=True)
        return error.exit_code
    show(decision.why)
    return decision.code


def _start_over(submission: Submission) -> NoReturn:
    """Once more through the script, which has the lines of setup come before python; a shell forgets signals that wait."""
    if signal.sigpending() & {signal.SIGUSR1, signal.SIGTERM}:
        os.environ["MLITE_STOPPED_EARLY"] = "1"
    sys.stdout.flush()
    os.execvp("bash", ["bash", str(SCRIPT), "--submission", str(submission.folder.resolve())])


def _submission(argv: list[str]) -> Submission:
    """The one that this job was submitted with; for a job that came by sbatch alone, one that is made now and found again when
    the job is requeued. Raises ConfigError, for a bad config too."""
    if argv[:1] == ["--submission"]:
        return Submission(Path(argv[1]))
    found = recall(os.environ)
    if found is not None:
        return found
    run_words, cluster_words = split_words(argv)
    arguments = parse_arguments(run_words, usage=USAGE)
    job = show_job(os.environ["SLURM_JOB_ID"])
    _count_gpus(job)
    allocation = read_allocation(os.environ)
    config = load_config(arguments.config, arguments.overrides, world_size=allocation.world)
    cluster = _cluster_beside_sbatch(cluster_words)
    tasks = tasks_by_node(os.environ, nodes=allocation.nodes)
    options, lost = options_of(job, os.environ, tasks=tasks)
    options["job-name"] = os.environ.get("SLURM_JOB_NAME", "megatron-lite")
    submission = freeze(config, cluster, by="sbatch", options=options, sbatch_args=[], lost=lost)
    remember(submission, os.environ)
    return submission


def _count_gpus(job: Mapping[str, str]) -> None:
    """In a shell of salloc's, where Slurm does not say how many a node has."""
    if "SLURM_GPUS_ON_NODE" not in os.environ and "SLURMD_NODENAME" not in os.environ:
        nodes = read_allocation(os.environ).nodes
        os.environ["SLURM_GPUS_ON_NODE"] = str(gpus_per_node(job, nodes=nodes, tasks=tasks_by_node(os.environ, nodes=nodes)[0]))


def _cluster_beside_sbatch(words: list[str]) -> ClusterConfig:
    """Of the cluster what this job can use still. Raises ConfigError where a word asks for more; what the cluster's file asks for
    is only named."""
    cluster, default = load_cluster(words, root=ROOT), ClusterConfig()
    given = [word.removeprefix("--").partition("=") for word in words]
    want, fix = "nothing here: this job was asked for by sbatch's own options", "give it to sbatch, or submit with bash slurm/pretrain.sh"
    faults = [Fault(key, value, want, fix) for key, _, value in given if key != "cluster" and key.split(".")[1] not in USABLE]
    if faults:
        raise ConfigError(faults)
    unused = [key for key in ClusterConfig.model_fields if key not in USABLE and getattr(cluster, key) != getattr(default, key)]
    if unused:
        show(f"note: sbatch's own options count, not the cluster's {', '.join(unused)}")
    return cluster


class JobFailedError(RuntimeError):
    """The chain ended without finishing the run; submitit hands the message to whoever waits for the job."""


@dataclass
class TrainingJob:
    """What submitit pickles: it is called in the batch script's own process, once a start of the job."""

    submission: str

    def __call__(self) -> str:
        """How the run ended. Raises JobFailedError; exits without a result where another start follows."""
        try:
            decision: Decision = run_attempt(Submission(Path(self.submission)), os.environ)
        except MegatronLiteError as error:
            raise JobFailedError(f"exit code {error.exit_code}: {error}") from None
        show(decision.why)
        if decision.action == "leave":
            sys.stdout.flush()
            os._exit(decision.code)
        if decision.code:
            raise JobFailedError(f"exit code {decision.code}: {decision.why}")
        return decision.why


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
