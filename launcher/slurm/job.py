"""What runs inside a job, whoever submitted it: `python -m launcher.slurm.job`, from slurm/pretrain.sh, or submitit's callable."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import MegatronLiteError
from launcher.config import load_config, parse_arguments
from launcher.console import show
from launcher.slurm import submit
from launcher.slurm.allocation import read_allocation, show_job
from launcher.slurm.attempt import run_attempt
from launcher.slurm.chain import Decision
from launcher.slurm.cluster import load_cluster, split_words
from launcher.slurm.submission import ROOT, Submission, freeze, options_of, recall, remember

USAGE = "Usage: sbatch slurm/pretrain.sh CONFIG [section.key=value ...] [cluster=NAME] [cluster.key=value ...]"


def main(argv: list[str]) -> int:
    """Inside a job: train, and the job's exit code. Elsewhere: check and submit."""
    try:
        if "SLURM_JOB_ID" not in os.environ:
            return submit.main(argv)
        decision = run_attempt(_submission(argv), os.environ)
    except MegatronLiteError as error:
        show(f"pretrain: {error}", error=True)
        return error.exit_code
    show(decision.why)
    return decision.code


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
    allocation = read_allocation(os.environ)
    config = load_config(arguments.config, arguments.overrides, world_size=allocation.world)
    options = options_of(show_job(allocation.job_id), tasks_per_node=allocation.ranks[0])
    options["job-name"] = os.environ.get("SLURM_JOB_NAME", "megatron-lite")
    submission = freeze(config, load_cluster(cluster_words, root=ROOT), by="sbatch", options=options, sbatch_args=[])
    remember(submission, os.environ)
    return submission


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
