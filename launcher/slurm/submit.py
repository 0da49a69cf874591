"""From the login node to the queue: check, freeze, submit, by sbatch or by submitit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any, Literal

from data_pipeline.errors import ConfigError
from launcher.config import Arguments, load_config, parse_arguments
from launcher.console import show
from launcher.slurm.check import check, check_tools
from launcher.slurm.cluster import ClusterConfig, load_cluster, sbatch_options, shown, split_words, to_flags
from launcher.slurm.submission import ROOT, SCRIPT, Submission, freeze, job_name

By = Literal["sbatch", "submitit"]
# As in pretrain.sh: blocked signals wait over exec, so that none is lost while python loads.
HOLD = "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGTERM]); os.execvp(sys.argv[1], sys.argv[1:])"


def submit(words: list[str], *, by: By, usage: str, dry_run: bool = False) -> int:
    """Check everything, write the submission down, queue it; the exit code. With `dry_run`, only say what would be asked for."""
    run_words, cluster_words = split_words(words)
    arguments = parse_arguments(run_words, usage=usage)
    cluster = _cluster_for(cluster_words, arguments)
    checked = check(arguments.config, list(arguments.overrides), cluster)
    for note in checked.notes:
        show(f"note: {note}")
    if checked.finished:
        show(checked.finished)
        return 0
    options = {"job-name": job_name(checked.config), **sbatch_options(cluster)}
    if dry_run:
        show(f"would run {checked.world} ranks: {shown(['sbatch', *to_flags(options), *cluster.sbatch_args, str(SCRIPT)])}")
        return 0
    check_tools()
    submission = freeze(checked.config, cluster, by=by, options=options, sbatch_args=cluster.sbatch_args)
    try:
        job_id = queue(submission)
    except ConfigError:
        shutil.rmtree(submission.folder)
        raise
    show(f"job {job_id}: {checked.world} ranks, {submission.folder}; output in {output_of(submission, job_id)}")
    show(f"look at it: mlite status {checked.config.run.folder}    end it: scancel {job_id}")
    return 0


def _cluster_for(words: list[str], arguments: Arguments) -> ClusterConfig:
    """Raises ConfigError with the faults of the run's config beside the cluster's own."""
    try:
        return load_cluster(words, root=ROOT)
    except ConfigError as error:
        faults = list(error.faults)
        try:
            load_config(arguments.config, arguments.overrides)
        except ConfigError as another:
            faults += another.faults
        raise ConfigError(faults) if faults else error from None


def queue(submission: Submission, *, after: str | None = None) -> str:
    """Submit; the job's id. With `after`, it waits until that job and all of its name have ended. Raises ConfigError with Slurm's
    own words."""
    record = submission.record()
    options: dict[str, Any] = dict(record["options"])
    if after is not None:
        options["dependency"] = f"singleton,afterany:{after}"  # the name alone may be another's, where sbatch was given none
    job_id = (_by_submitit if record["by"] == "submitit" else _by_sbatch)(submission, options, record)
    submission.note(job=job_id)
    return job_id


def output_of(submission: Submission, job_id: str) -> Path:
    return submission.folder / (f"{job_id}_0_log.out" if submission.record()["by"] == "submitit" else f"job-{job_id}.txt")


def _by_sbatch(submission: Submission, options: dict[str, Any], record: dict[str, Any]) -> str:
    folder = submission.folder.resolve()
    flags = to_flags({"output": str(folder / "job-%j.txt"), **options, "parsable": True})
    command = ["sbatch", *flags, *record["sbatch_args"], str(SCRIPT), "--submission", str(folder)]
    submission.note(command=shown(command))
    answer = subprocess.run(command, capture_output=True, text=True, env=_environment(), cwd=record["cwd"])
    if answer.returncode:
        raise ConfigError(f"Slurm refused the job: {answer.stderr.strip()}\nasked for: {shown(command)}")
    return answer.stdout.strip().partition(";")[0]


def _by_submitit(submission: Submission, options: dict[str, Any], record: dict[str, Any]) -> str:
    """submitit writes the batch script and keeps the result; the batch script's own process runs the attempt, which starts
    the ranks by srun, so that it is one code whoever submitted."""
    os.environ["SUBMITIT_PREEMPT_SIGNAL"] = "USR1"  # read when submitit is imported, here and in the job
    import submitit

    from launcher.slurm.job import TrainingJob

    python = record["python"]
    executor = submitit.SlurmExecutor(folder=submission.folder.resolve(), python=f"exec {shown([python, '-S', '-c', HOLD, python])}")
    setup = ["trap 'export MLITE_STOPPED_EARLY=1' USR1 TERM", "export SUBMITIT_PREEMPT_SIGNAL=USR1"]
    if submission.setup.exists():
        setup.append(f". {shown([str(submission.setup.resolve())])}")
    setup.append("trap '' USR1 TERM")
    asked = {**options, **dict(key_and_value(word) for word in record["sbatch_args"])}
    executor.update_parameters(
        time=None,  # submitit's own default is five minutes
        use_srun=False,
        stderr_to_stdout=True,
        setup=setup,
        additional_parameters={
            "signal": "B:USR1@1",  # the job watches its own time limit; submitit would have the signal go elsewhere
            "chdir": record["cwd"],
            **{key.replace("-", "_"): value for key, value in asked.items() if key != "open-mode"},
        },
    )
    try:
        job = executor.submit(TrainingJob(str(submission.folder.resolve())))
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise ConfigError(f"Slurm refused the job: {error}") from None
    return str(job.job_id)


def key_and_value(word: str) -> tuple[str, str | bool]:
    key, equals, value = word.removeprefix("--").partition("=")
    return key, value if equals else True


def _environment() -> dict[str, str]:
    """The job gets this environment, but for what belongs to another job or another launcher."""
    foreign = ("SLURM_", "MLITE_STOPPED_EARLY")
    return {name: value for name, value in os.environ.items() if not name.startswith(foreign) or name == "SLURM_CONF"}


def main(words: list[str]) -> int:
    """For `bash slurm/pretrain.sh` on a login node."""
    dry_run = "--dry-run" in words
    return submit([word for word in words if word != "--dry-run"], by="sbatch", usage=USAGE, dry_run=dry_run)


USAGE = "Usage: bash slurm/pretrain.sh CONFIG [section.key=value ...] [cluster=NAME] [cluster.key=value ...] [--dry-run]"
