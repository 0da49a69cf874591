"""If these fail, a job starts on other processes than Slurm gave it, or fights another job for a port."""

from __future__ import annotations

import datetime
import socket

import pytest

from launcher.slurm.allocation import PORTS, ended_by, held_port, limit_s, parse_job, read_allocation, seconds_left, tasks_by_node
from launcher.slurm.asked import gpus_per_node, options_of

SHOWN = (
    "JobId=12 JobName=a b UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=4294901759 Nice=0 Account=(null) QOS=(null) "
    "JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:00:04 "
    "TimeLimit=1-02:03:04 TimeMin=N/A EndTime=2026-11-30T08:30:00 Partition=batch NodeList=node[1-2] BatchHost=node1 NumNodes=2 "
    "NumCPUs=4 NumTasks=4 CPUs/Task=3 ReqB:S:C:T=0:0:*:* TRES=cpu=4,node=2,billing=4 MinMemoryNode=200G Features=h100 DelayBoot=00:00:00 "
    "Command=/a b/pretrain.sh WorkDir=/a b StdErr=/a b/o.txt StdOut=/a b/o.txt TresPerNode=gres:gpu:8"
)


def environ(**more: str) -> dict[str, str]:
    return {"SLURM_JOB_ID": "12", **more}


@pytest.mark.parametrize(
    ("given", "ranks", "cpus"),
    [
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "8"}, (4, 4), None),
        ({"SLURM_JOB_NUM_NODES": "3", "SLURM_TASKS_PER_NODE": "4(x2),3", "SLURM_NTASKS": "11"}, (4, 4, 3), None),
        # Slurm counts CPUs as tasks where nobody asked for a number of tasks
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "96(x2)"}, (1, 1), None),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "16(x2)", "SLURM_NTASKS_PER_NODE": "2"}, (2, 2), None),
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "12"}, (8, 8), 12),
        # one task a node, several GPUs: one rank a GPU, and the task's cores are shared out
        ({"SLURM_JOB_NUM_NODES": "2", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_PER_TASK": "96"}, (8, 8), 12),
        ({"SLURM_JOB_NUM_NODES": "1", "SLURM_TASKS_PER_NODE": "1", "SLURM_GPUS_ON_NODE": "1"}, (1,), None),
        ({}, (1,), None),
    ],
)
def test_ranks_a_node(given: dict[str, str], ranks: tuple[int, ...], cpus: int | None) -> None:
    found = read_allocation(environ(**given))
    assert (found.ranks, found.nodes, found.cpus_per_rank, found.world) == (ranks, len(ranks), cpus, sum(ranks))
    assert (f"--ntasks-per-node={ranks[0]}" in found.srun_flags) == (len(set(ranks)) == 1)
    assert f"--ntasks={sum(ranks)}" in found.srun_flags


def test_the_submission_may_say_how_many_ranks_a_node_has() -> None:
    found = read_allocation(environ(SLURM_JOB_NUM_NODES="2", SLURM_TASKS_PER_NODE="16(x2)"), ranks_per_node=2, cpus_per_rank=8)
    assert (found.ranks, found.cpus_per_rank) == ((2, 2), 8)


@pytest.mark.parametrize(("first", "second"), [(1, 16385), (12, 12)])
def test_two_jobs_never_take_one_port(first: int, second: int) -> None:
    """Job ids of the same remainder, and a port that is taken already (B139)."""
    with held_port({}, start=first) as one, held_port({}, start=second) as other:
        assert one != other and one in PORTS and other in PORTS
        with socket.create_server(("", one)):  # as the first rank does: this one may
            pass
        with socket.socket() as rival, pytest.raises(OSError, match="in use"):
            rival.bind(("", one))
    assert not set(PORTS) & set(range(32768, 61000))


def test_a_port_of_the_users_own_is_kept() -> None:
    with held_port({"MASTER_PORT": "23456"}, start=1) as port:
        assert port == 23456


def test_no_port_is_held_where_the_first_rank_will_not_be() -> None:
    """A shell of salloc's is on the login node, and a port that is free there may be taken on the first node."""
    with held_port({"SLURM_JOB_NODELIST": "node[3-4]"}, start=1) as port:
        assert port is None
    with held_port({"SLURM_JOB_NODELIST": "node[3-4]", "SLURMD_NODENAME": "node3"}, start=1) as port:
        assert port in PORTS


def test_what_slurm_says_of_a_job() -> None:
    job = parse_job(SHOWN)
    assert (job["JobName"], job["JobState"], job["StdOut"], job["Restarts"]) == ("a b", "RUNNING", "/a b/o.txt", "0")
    assert limit_s(job) == 93784 and limit_s({"TimeLimit": "UNLIMITED"}) is None
    now = datetime.datetime(2026, 11, 30, 8, 29).timestamp()
    assert seconds_left(job, now=now) == 60 and seconds_left({"EndTime": "Unknown"}, now=now) is None


def test_who_ends_a_job() -> None:
    """A cancelled job is COMPLETING while its script runs still: requeueing it then would bring it back."""
    assert ended_by({}) == "" and ended_by(parse_job(SHOWN)) == "itself"
    assert ended_by({"JobState": "COMPLETING", "RunTime": "00:01:00", "TimeLimit": "01:00:00"}) == "slurm"
    assert ended_by({"JobState": "PENDING", "RunTime": "00:00:00", "TimeLimit": "UNLIMITED"}) == "slurm"
    assert ended_by({"JobState": "COMPLETING", "RunTime": "01:00:01", "TimeLimit": "01:00:00"}) == "time limit"


def test_a_next_job_asks_for_what_this_one_has() -> None:
    assert options_of(parse_job(SHOWN), {}, tasks=[2, 2]) == (
        {
            "nodes": "2",
            "ntasks-per-node": "2",
            "time": "1-02:03:04",
            "partition": "batch",
            "constraint": "h100",
            "gres": "gpu:8",
            "mem": "200G",
            "open-mode": "append",
            "output": "/a b/o.txt",
        },
        [],
    )


def test_one_task_for_eight_devices_stays_one_task() -> None:
    """Its CPUs are those of all ranks: eight tasks of as many would be 768 on a node."""
    given = environ(SLURM_JOB_NUM_NODES="2", SLURM_NTASKS_PER_NODE="1", SLURM_GPUS_ON_NODE="8", SLURM_CPUS_PER_TASK="96")
    options, _ = options_of({"TresPerNode": "gres:gpu:8"}, given, tasks=tasks_by_node(given, nodes=2))
    assert (options["ntasks-per-node"], options["cpus-per-task"], options["gres"]) == ("1", "96", "gpu:8")
    assert read_allocation(given).ranks == (8, 8)
    uneven, _ = options_of({"CPUs/Task": "1"}, {}, tasks=[4, 4, 3])
    assert uneven == {"nodes": "3", "ntasks": "11", "open-mode": "append"}


@pytest.mark.parametrize(
    ("shown", "option", "value"),
    [
        ({"TresPerJob": "gres:gpu:16"}, "gpus", "16"),
        ({"TresPerJob": "gres/gpu:h100:16"}, "gpus", "h100:16"),
        ({"TresPerTask": "gres:gpu:1"}, "gpus-per-task", "1"),
        ({"TresPerTask": "cpu=12,gres/gpu:h100=1"}, "gpus-per-task", "h100:1"),
        ({"TresPerTask": "cpu:12,gres/gpu:1"}, "cpus-per-task", "12"),
        ({"TresPerSocket": "gres:gpu:2"}, "gpus-per-socket", "2"),
        ({"TresPerNode": "gres/gpu:8"}, "gres", "gpu:8"),
        ({"TresPerNode": "gres:gpu:a100:2,gres:nvme:1"}, "gres", "gpu:a100:2,nvme:1"),
        ({"CpusPerTres": "gres:gpu:12"}, "cpus-per-gpu", "12"),
        ({"MemPerTres": "gres:gpu:65536"}, "mem-per-gpu", "65536"),
        ({"MinMemoryCPU": "4G"}, "mem-per-cpu", "4G"),
        ({"MinMemoryNode": "0", "TRES": "cpu=8,mem=512000M,node=2"}, "mem", "0"),
        ({"OverSubscribe": "NO"}, "exclusive", True),
        ({"OverSubscribe": "USER"}, "exclusive", "user"),
        ({"ReqNodeList": "node[3-4]"}, "nodelist", "node[3-4]"),
        ({"Requeue": "0"}, "no-requeue", True),
        ({"StdOut": "/o", "StdErr": "/e"}, "error", "/e"),
    ],
)
def test_every_way_to_ask_is_translated(shown: dict[str, str], option: str, value: str | bool) -> None:
    """As scontrol shows it in Slurm 22.05 and later versions."""
    options, lost = options_of(shown, {}, tasks=[1])
    assert options[option] == value and lost == []


def test_what_can_not_be_asked_for_again_is_named() -> None:
    shown = {"TresPerJob": "gres:gpu:2,gres:fpga:1", "BurstBuffer": "#BB x", "HetJobId": "7", "TresPerNode": "(null)", "MinMemoryNode": "0"}
    options, lost = options_of(shown, {}, tasks=[1])
    assert lost == ["HetJobId=7", "BurstBuffer=#BB x", "TresPerJob=fpga:1"] and options["gpus"] == "2" and "gres" not in options
    assert options_of({}, {}, tasks=[2, 2]) == (
        {"nodes": "2", "open-mode": "append", "ntasks-per-node": "2"},
        ["all else: scontrol does not answer"],
    )


@pytest.mark.parametrize(
    ("shown", "gpus"),
    [
        ({"TresPerNode": "gres:gpu:8"}, 8),
        ({"TresPerNode": "gres/gpu"}, 1),
        ({"TresPerJob": "gres/gpu:h100:16"}, 8),
        ({"TresPerTask": "cpu=2,gres/gpu=1"}, 4),
        ({"TresPerNode": "gres:nvme:2"}, 0),
        ({}, 0),
    ],
)
def test_devices_of_an_allocation_of_salloc(shown: dict[str, str], gpus: int) -> None:
    """Its shell is told nothing of them, and one rank on eight devices would train."""
    assert gpus_per_node(shown, nodes=2, tasks=4) == gpus
