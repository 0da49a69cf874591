"""What a job that sbatch started with options of its own has asked for: the next job after it asks for the same."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

# What `scontrol show job` calls sbatch's options.
FIELDS = {
    "time": "TimeLimit",
    "partition": "Partition",
    "account": "Account",
    "qos": "QOS",
    "reservation": "Reservation",
    "constraint": "Features",
    "nodelist": "ReqNodeList",
    "exclude": "ExcNodeList",
    "licenses": "Licenses",
    "network": "Network",
    "mincpus": "MinCPUsNode",
    "mem": "MinMemoryNode",
    "mem-per-cpu": "MinMemoryCPU",
    "tmp": "MinTmpDiskNode",
    "mail-user": "MailUser",
    "mail-type": "MailType",
    "output": "StdOut",
    "error": "StdErr",
}
# {the field: {what may stand in it: the option}}, as `gres:gpu:h100:8`, or `gres/gpu:h100:8` and `gres/gpu:h100=8` in later versions.
COUNTED = {
    "TresPerJob": {"gpu": "gpus"},
    "TresPerTask": {"gpu": "gpus-per-task", "cpu": "cpus-per-task"},
    "TresPerSocket": {"gpu": "gpus-per-socket"},
    "CpusPerTres": {"gpu": "cpus-per-gpu"},
    "MemPerTres": {"gpu": "mem-per-gpu"},
}
EXCLUSIVE: dict[str, dict[str, str | bool]] = {
    "NO": {"exclusive": True},
    "USER": {"exclusive": "user"},
    "MCS": {"exclusive": "mcs"},
    "YES": {"oversubscribe": True},
}
UNTRANSLATED = ("HetJobId", "ArrayJobId", "BurstBuffer", "CoreSpec", "Switches", "TresBind", "TresFreq")
NOTHING = ("", "(null)", "N/A", "*", "0", "0:0")


def options_of(job: Mapping[str, str], environ: Mapping[str, str], *, tasks: Sequence[int]) -> tuple[dict[str, str | bool], list[str]]:
    """(sbatch's options, what of the job they don't say), from `scontrol show job`, what sbatch told the job, and the tasks of each
    node as they were asked for."""
    options: dict[str, str | bool] = {"nodes": str(len(tasks)), "open-mode": "append"}
    options |= {"ntasks-per-node": str(tasks[0])} if len(set(tasks)) == 1 else {"ntasks": str(sum(tasks))}
    if not job:
        return options, ["all else: scontrol does not answer"]
    options |= {option: job[field] for option, field in FIELDS.items() if job.get(field, "") not in NOTHING}
    if job.get("MinMemoryNode") == "0" and job.get("MemPerTres", "") in NOTHING and "mem=" in job.get("AllocTRES", job.get("TRES", "")):
        options["mem"] = "0"  # all of a node's, where the site's default may be less
    if job.get("Requeue") == "0":
        options["no-requeue"] = True
    if options.get("error") == options.get("output"):
        options.pop("error", None)
    if cpus := environ.get("SLURM_CPUS_PER_TASK"):  # set where it was asked for; scontrol says 1 where it was not
        options["cpus-per-task"] = cpus
    if entries := _entries(job.get("TresPerNode", "")):
        options["gres"] = ",".join(entries)
    lost = [f"{field}={job[field]}" for field in UNTRANSLATED if job.get(field, "") not in NOTHING]
    for field, names in COUNTED.items():
        for entry in _entries(job.get(field, "")):
            name, _, count = entry.partition(":")
            if name in names:
                options[names[name]] = count or "1"
            else:
                lost.append(f"{field}={entry}")
    return options | EXCLUSIVE.get(job.get("OverSubscribe", ""), {}), lost


def gpus_per_node(job: Mapping[str, str], *, nodes: int, tasks: int) -> int:
    """As they were asked for, with `tasks` on a node: for a shell of salloc's, which is told nothing of them."""
    shares = {"TresPerNode": 1.0, "TresPerJob": 1 / nodes, "TresPerTask": float(tasks)}
    entries = [(entry.split(":"), share) for field, share in shares.items() for entry in _entries(job.get(field, ""))]
    return int(sum(share * (int(words[-1]) if words[-1].isdigit() else 1) for words, share in entries if words[0] == "gpu"))


def _entries(text: str) -> list[str]:
    """`gres:gpu:2,gres:nvme:1` as gpu:2 and nvme:1, in the spelling of every version."""
    if text in NOTHING:
        return []
    return [re.sub("[/=]", ":", entry).removeprefix("gres:") for entry in text.split(",")]
