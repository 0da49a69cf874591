"""A user's working folder on the login node of the test cluster, and what a user looks at while jobs run."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from launcher.run_folder import read_json
from launcher.slurm.allocation import parse_job
from tests.integration.jobs import Workspace, clean_environment
from tests.paths import ROOT
from tests.slurm.cluster import Cluster

PRETRAIN = str(ROOT / "slurm" / "pretrain.sh")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


@dataclass
class Site(Workspace):
    cluster: Cluster = field(kw_only=True)

    def __post_init__(self) -> None:
        self.environ = {**self.environ, "PATH": f"{self.environ['PATH'].split(':')[0]}:{clean_environment()['PATH']}"}

    def submit(self, *command: str, timeout_s: float = 30, **environ: str) -> str:
        """Type a command that submits a job, whose id is returned."""
        result = self.command(*command, timeout_s=timeout_s, **environ)
        assert result.returncode == 0, result.stdout + result.stderr
        match = re.search(r"job (\d+)", result.stdout)
        assert match is not None, result.stdout
        return match[1]

    def job(self, job_id: str) -> dict[str, str]:
        return parse_job(self.command("scontrol", "show", "job", "-o", job_id).stdout)

    def wait_until(self, what: str, test: Callable[[], object], timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not test():
            if time.monotonic() > deadline:
                raise AssertionError(f"waited in vain for {what}\n{self.outputs()}")
            time.sleep(0.1)

    def wait_for_end(self, job_id: str, timeout_s: float = 120) -> dict[str, str]:
        """Until the job is over and not to be started again; what Slurm says of it."""
        self.wait_until(f"the end of job {job_id}", lambda: self.job(job_id).get("JobState") in OVER, timeout_s)
        return self.job(job_id)

    def step(self, name: str) -> int:
        """The last step in metrics.jsonl, 0 where there is none."""
        try:
            return max((int(record["step"]) for record in self.metrics(name)), default=0)
        except (OSError, ValueError):
            return 0

    def wait_for_step(self, name: str, step: int, timeout_s: float = 120) -> None:
        self.wait_until(f"step {step} of {name}", lambda: self.step(name) >= step, timeout_s)

    def signal_job(self, job_id: str, *, to_batch: bool = True) -> None:
        """USR1 to the job's own process, or to all ranks."""
        assert self.command("scancel", *(["--batch"] if to_batch else []), "--signal=USR1", job_id).returncode == 0

    def submission(self, name: str) -> dict[str, object]:
        """What the last submission left on record."""
        return read_json(sorted(self.path(name).glob("submissions/*/submission.json"))[-1])

    def outputs(self) -> str:
        """Everything that jobs have printed here, for a failed test's report."""
        files = sorted([*self.folder.rglob("*.txt"), *self.folder.rglob("*_log.out"), *self.folder.glob("slurm-*.out")])
        queue = subprocess.run(["squeue"], env={**clean_environment(), **self.environ}, capture_output=True, text=True).stdout
        return queue + "".join(f"\n--- {path}\n{path.read_text(errors='replace')}" for path in files)
