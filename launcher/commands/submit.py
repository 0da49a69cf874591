"""`mlite submit`: from a cluster's login node to its queue, by submitit."""

from __future__ import annotations

from launcher.slurm.submit import submit

USAGE = "Usage: mlite submit CONFIG [section.key=value ...] [cluster=NAME] [cluster.key=value ...]"


def submit_run(words: list[str], *, dry_run: bool) -> int:
    """The exit code. Raises ConfigError, DataError, RunInUseError: nothing is queued then."""
    return submit(words, by="submitit", usage=USAGE, dry_run=dry_run)
