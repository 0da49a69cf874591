"""One attempt inside a job: start the ranks by srun, hand signals on, watch the time limit, wait, and see that the chain goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from types import FrameType

from data_pipeline.errors import ConfigError, MegatronLiteError, RunInUseError
from launcher.config import RunConfig
from launcher.console import show
from launcher.datasets import open_datasets
from launcher.environment import Environment
from launcher.metrics import last_rates
from launcher.run_folder import RunFolder, read_json
from launcher.slurm.allocation import Allocation, ended_by, held_port, limit_s, read_allocation, seconds_left, show_job
from launcher.slurm.chain import Attempt, Decision, decide, lead_s, newest_step, stuck
from launcher.slurm.check import sizes_that_would_do
from launcher.slurm.cluster import ClusterConfig, container_flags, rank_command, shown
from launcher.slurm.submission import ROOT, Submission, folders_of
from launcher.slurm.submit import queue

POLL_S = 0.2
LOOK_EVERY_S = 10.0  # at the measured time to save, against the time limit
SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FOREIGN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GROUP_RANK")  # of launchers around the submission


class StopSignal:
    """A request to stop that came to the job's own process, also while it loaded: pretrain.sh has held it back until now."""

    def __init__(self, *, already: bool) -> None:
        self.asked = already
        for number in SIGNALS:
            signal.signal(number, self._hear)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def run_attempt(submission: Submission, environ: Mapping[str, str]) -> Decision:
    """Train until the run ends or must stop, then requeue, or queue the next job, or neither. Raises ConfigError where the layout
    does not fit what Slurm gave, and DataError: both end the chain."""
    stop = StopSignal(already=bool(environ.get("MLITE_STOPPED_EARLY")))
    try:
        cluster = submission.cluster()
        allocation = _allocation_for(submission, cluster, environ)
        config = _config_for(submission, allocation)
        open_datasets(config.data)
    except Exception as error:
        code = error.exit_code if isinstance(error, MegatronLiteError) else 1
        _write_down(submission, environ, code=code, why=f"not started again: {error}")
        raise
    folder, job = RunFolder(config.run.folder), show_job(allocation.job_id)
    checkpoint = newest_step(folder.checkpoints)
    before = submission.chain.attempts()
    if stuck(before, checkpoint):
        why = f"{len(before)} attempts, and the last ones brought no new checkpoint: not started again"
        _write_down(submission, environ, code=1, why=why)
        return Decision("end", 1, why)
    submission.chain.add(Attempt(allocation.job_id, allocation.restart, checkpoint, allocation.nodes, allocation.world))
    attempt_before = folder.status().get("attempt", 0)
    show(f"job {allocation.job_id}, start {allocation.restart + 1}: {allocation.world} ranks on {allocation.nodes} nodes, {folder.path}")
    srun_code = 0 if stop.asked else _train(submission, config, cluster, allocation, folder, job=job, stop=stop, environ=environ)
    status = folder.status()
    is_new = status.get("attempt", 0) > attempt_before
    if not is_new and folder.lock.touched_lately() and folder.lock.holder().get("job") not in (None, allocation.job_id):
        srun_code = RunInUseError.exit_code  # which srun's own code need not show: it ends the other ranks by a signal
    job = show_job(allocation.job_id)
    decision = decide(
        status,
        is_new=is_new,
        srun_code=srun_code,
        attempts=submission.chain.attempts(),
        checkpoint=newest_step(folder.checkpoints),
        ended_by=ended_by(job),
    )
    submission.note(last=decision.why)
    _show_failure(folder, since=attempt_before)
    if decision.action == "again":
        decision = _go_on(decision, submission, allocation, job)
        if decision.action == "end":
            submission.note(last=decision.why)
    return decision


def _write_down(submission: Submission, environ: Mapping[str, str], *, code: int, why: str) -> None:
    """For mlite status, an end before any rank could say so itself."""
    submission.note(last=why)
    run = submission.folder.resolve().parent.parent
    try:
        RunFolder(run).refuse(Environment(job_id=environ.get("SLURM_JOB_ID")), code=code, message=why)
    except (MegatronLiteError, OSError) as error:
        show(f"{run / 'status.json'} was not updated: {error}", error=True)


def _allocation_for(submission: Submission, cluster: ClusterConfig, environ: Mapping[str, str]) -> Allocation:
    """Where sbatch was asked for no number of tasks, the cluster's file says how many ranks a node has."""
    if {"ntasks-per-node", "ntasks"} & set(submission.record()["options"]):
        return read_allocation(environ)
    return read_allocation(environ, ranks_per_node=cluster.ranks_per_node, cpus_per_rank=cluster.cpus_per_rank)


def _config_for(submission: Submission, allocation: Allocation) -> RunConfig:
    try:
        return submission.load(world_size=allocation.world)
    except ConfigError as error:
        ranks = allocation.ranks[0]
        if len(set(allocation.ranks)) > 1:
            raise
        config = submission.load(world_size=None)
        fits = sizes_that_would_do(config, ranks_per_node=ranks, near=allocation.nodes)
        would = f"nodes that would do, with {ranks} ranks each: {', '.join(map(str, fits))}" if fits else "no number of such nodes would do"
        raise ConfigError(f"on {allocation.nodes} nodes x {ranks} ranks: {error}\n{would}") from None


def _train(
    submission: Submission,
    config: RunConfig,
    cluster: ClusterConfig,
    allocation: Allocation,
    folder: RunFolder,
    *,
    job: Mapping[str, str],
    stop: StopSignal,
    environ: Mapping[str, str],
) -> int:
    """Start the ranks and wait for them; srun's exit code."""
    with held_port(environ, start=int(allocation.job_id)) as port:
        environment = {name: value for name, value in environ.items() if name not in FOREIGN}
        environment.update(PYTHONUNBUFFERED="1", **({"MASTER_PORT": str(port)} if port else {}))
        if allocation.cpus_per_rank:
            environment.setdefault("OMP_NUM_THREADS", str(allocation.cpus_per_rank))
        command = srun_command(submission, config, cluster, allocation)
        print(shown(command), flush=True)
        step = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        limit, told = TimeLimit(allocation.job_id, job, folder), False
        while step.poll() is None:
            stop.asked = stop.asked or limit.is_near()
            if stop.asked and not told:
                told = True
                step.send_signal(signal.SIGUSR1)  # srun hands it to every rank
            time.sleep(POLL_S)
        return step.returncode if step.returncode >= 0 else 128 - step.returncode


def srun_command(submission: Submission, config: RunConfig, cluster: ClusterConfig, allocation: Allocation) -> list[str]:
    """`srun ... python launcher/train.py CONFIG`: one rank that fails ends all; every line says whose it is."""
    folders = folders_of(config)
    ranks = rank_command(
        cluster,
        python=sys.executable,
        script=ROOT / "launcher" / "train.py",
        arguments=["--config", str(submission.config)],
        folders=folders,
        has_gpus=allocation.gpus > 0,
    )
    # ranks get this process's environment, also where a site has sbatch export nothing, which srun would follow
    flags = ["--kill-on-bad-exit=1", "--label", "--export=ALL", *container_flags(cluster, folders=folders), *cluster.srun_args]
    return ["srun", *allocation.srun_flags, *flags, *ranks]


class TimeLimit:
    """The job's time limit as Slurm tells it, looked at now and then."""

    def __init__(self, job_id: str, job: Mapping[str, str], folder: RunFolder) -> None:
        self._job_id, self._job, self._folder = job_id, dict(job), folder
        self._looked = time.monotonic()

    def is_near(self) -> bool:
        """Whether the run must begin to stop. The limit may have been raised since the job began, so Slurm is asked again first."""
        if time.monotonic() - self._looked < LOOK_EVERY_S:
            return False
        self._looked = time.monotonic()
        if not self._job or self._short():
            self._job = show_job(self._job_id) or self._job
        if not self._short():
            return False
        show(f"the time limit is near: stopping (a save takes {self._folder.status().get('save_s', 'an unknown number of')} s)")
        return True

    def _short(self) -> bool:
        limit, left = limit_s(self._job), seconds_left(self._job, now=time.time())
        if limit is None or left is None:
            return False
        step_s = float(last_rates(self._folder.metrics).get("step_time_s", 0.0))
        return left <= lead_s(self._folder.status(), step_s=step_s, limit_s=limit)


def _show_failure(folder: RunFolder, *, since: int) -> None:
    """The first failing rank's own words, last in the job's output."""
    folder.attempt = folder.status().get("attempt", 0)
    failure = read_json(folder.attempt_folder / "failed.json") if folder.attempt > since else {}
    if failure:
        show(f"\nthe first to fail was rank {failure.get('rank')}: {failure.get('message')}\n{failure.get('details', '')}", error=True)
        show(f"its log: {folder.log_file(int(failure.get('rank', 0)))}", error=True)


def _go_on(decision: Decision, submission: Submission, allocation: Allocation, job: Mapping[str, str]) -> Decision:
    """Requeue this job; where Slurm refuses, queue a next one that waits for this one's end."""
    if job.get("BatchFlag", "1") != "1":
        return Decision("end", 75, f"{decision.why}; no batch job, so nothing starts it again: start the same command to go on")
    show(f"{decision.why}: to be started again")
    if job.get("Requeue", "1") == "1":
        sys.stdout.flush()
        answer = subprocess.run(["scontrol", "requeue", allocation.job_id], capture_output=True, text=True)
        if answer.returncode == 0:
            return Decision("leave", 75, f"{decision.why}: requeued")  # the sooner this process ends, the sooner the job is free to start
        if ended_by(show_job(allocation.job_id)) == "slurm":
            return Decision("leave", 75, f"{decision.why}; Slurm has begun to end this job itself")
        show(f"Slurm does not requeue this job ({answer.stderr.strip()})")
    if lost := submission.record().get("lost"):
        return Decision(
            "end",
            75,
            f"{decision.why}; Slurm does not requeue this job, and a next one can't be asked for as this one was ({'; '.join(lost)}): "
            "give the same command to go on",
        )
    try:
        following = queue(submission, after=allocation.job_id)
    except ConfigError as error:
        return Decision("end", 75, f"{decision.why}; {error}")
    return Decision("leave", 0, f"{decision.why}; job {following} goes on")
