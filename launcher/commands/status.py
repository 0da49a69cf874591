"""`mlite status`: where a run stands."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from launcher.metrics import last_rates, to_line
from launcher.run_folder import RunFolder, read_json
from launcher.slurm.allocation import seconds_left, show_job


def show_status(run: Path) -> None:
    """status.json as one line of JSON, with `alive`: whether a job holds the folder on this host, or touched it just now; the
    rate of the last logged step; and of a Slurm job what Slurm says, where it can be asked from here."""
    folder = RunFolder(run)
    status, (job, last) = folder.status(), newest_job(run)
    if not status and job is None:
        raise ConfigError([Fault("RUN", str(run), "a run folder, with a status.json in it", "it is printed when a run starts: runs/NAME")])
    age_s = time.time() - status.pop("time", time.time())
    shown = {
        "run": str(run),
        **(status or {"state": "queued"}),
        "alive": folder.in_use(),
        "age_s": round(age_s),
        **last_rates(folder.metrics),
    }
    print(to_line({**shown, **({"job": {**describe_job(job), **last}} if job else {})}), end="")


def newest_job(run: Path) -> tuple[str | None, dict[str, str]]:
    """The id of the job that was submitted last for this run, or that ran it last; and how that job's last start ended."""
    submissions = sorted((run / "submissions").glob("[0-9]*"))
    attempts = sorted((run / "attempts").glob("[0-9]*"))
    submitted = read_json(submissions[-1] / "submission.json") if submissions else {}
    started = read_json(attempts[-1] / "environment.json").get("job") if attempts else None
    return submitted.get("job") or started, {"last_start": submitted["last"]} if "last" in submitted else {}


def describe_job(job_id: str) -> dict[str, Any]:
    """Its state, how often it was started again, and the seconds left to its time limit."""
    job = show_job(job_id) if shutil.which("scontrol") else {}
    if not job:
        return {"id": job_id}
    left = seconds_left(job, now=time.time()) if job.get("JobState") == "RUNNING" else None
    reason = job.get("Reason", "None")
    return {
        "id": job_id,
        "state": job.get("JobState"),
        "restarts": int(job.get("Restarts", 0)),
        **({} if reason == "None" else {"reason": reason}),
        **({} if left is None else {"seconds_left": round(left)}),
        **({"nodes": job["NodeList"]} if job.get("NodeList", "(null)") != "(null)" else {}),
    }
