"""If these fail, a rank takes another's place, or several jobs of one process train where one job was meant."""

from __future__ import annotations

import pytest
import torch

from data_pipeline.errors import ConfigError
from launcher.distributed import start_device
from launcher.environment import Environment, first_node, read_environment

SLURM_BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "n[3-4]"}
SLURM_STEP = {
    **SLURM_BATCH,
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NODELIST": "n[3-4]",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


def test_one_process_needs_nothing() -> None:
    assert read_environment({}) == Environment()


def test_torchrun_and_deepspeed() -> None:
    common = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "h", "MASTER_PORT": "123"}
    torchrun = read_environment({**common, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"})
    deepspeed = read_environment({**common, "LOCAL_SIZE": "2"})
    assert (torchrun.rank, torchrun.local_rank, torchrun.world_size, torchrun.local_world_size) == (3, 1, 4, 2)
    assert torchrun.master == deepspeed.master == ("h", 123)
    assert (torchrun.starter, deepspeed.starter, deepspeed.local_world_size) == ("torchrun", "deepspeed", 2)


def test_a_slurm_step_is_a_world_and_its_batch_script_is_not() -> None:
    """The script's own shell has SLURM_PROCID and SLURM_NTASKS too (B141)."""
    step = read_environment(SLURM_STEP)
    assert (step.rank, step.local_rank, step.world_size, step.local_world_size, step.starter) == (5, 1, 8, 4, "srun")
    assert step.master is not None and step.master[0] == "n3" and 15000 <= step.master[1] < 35000
    batch = read_environment(SLURM_BATCH)
    assert (batch.rank, batch.world_size, batch.job_id) == (0, 1, "7")


def test_ranks_of_a_step_agree_on_the_address() -> None:
    masters = {read_environment({**SLURM_STEP, "SLURM_PROCID": str(rank)}).master for rank in range(8)}
    assert len(masters) == 1


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("n[003-010,12],x1", "n003"),
        ("gpu[003-010,12],login1", "gpu003"),
        ("a,b", "a"),
        ("b2,a1", "b2"),
        ("gpu[7]", "gpu7"),
        ("node[1,2]", "node1"),
        ("r1n[2-3]s,r", "r1n2s"),
        ("a[1-2],b[09-10]", "a1"),
        ("rack1-node[001-002,004]", "rack1-node001"),
        ("a[1-2]b[1-2]", "a1b1"),
        ("r[1,3]n[08-12,20].site.org,x", "r1n08.site.org"),
    ],
)
def test_the_first_node_in_every_spelling(nodelist: str, first: str) -> None:
    """In the order given, zeros kept (B137)."""
    assert first_node(nodelist) == first


def test_the_first_rank_listens_where_the_others_look() -> None:
    """A list that another node leads is a mistake with a remedy, not a hang (B138)."""
    first = {**SLURM_STEP, "SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    assert read_environment({**first, "SLURMD_NODENAME": "n3"}).master == read_environment(SLURM_STEP).master
    with pytest.raises(ConfigError, match="MASTER_ADDR=n4"):
        read_environment({**first, "SLURMD_NODENAME": "n4"})
    chosen = read_environment({**first, "SLURMD_NODENAME": "n4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4000"})
    assert chosen.master == ("10.0.0.1", 4000)


def test_ports_of_steps_stay_below_what_kernels_give_out() -> None:
    """A port that the kernel may have given to anybody is no meeting point (B139)."""
    ports = [read_environment({**SLURM_STEP, "SLURM_JOB_ID": str(job)}).master for job in (1, 16385, 999999)]
    assert all(master is not None and 15000 <= master[1] < 32768 for master in ports)


@pytest.mark.parametrize("environ", [{"RANK": "4", "WORLD_SIZE": "4"}, {"RANK": "x", "WORLD_SIZE": "4"}, {"RANK": "0", "WORLD_SIZE": ""}])
def test_contradictions_are_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_environment(environ)


@pytest.mark.parametrize(("visible", "local_rank", "number"), [(1, 3, 0), (1, 0, 0), (8, 3, 3), (4, 5, 1)])
def test_a_task_that_sees_one_device_uses_that(visible: int, local_rank: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm may show each task its own GPU alone, which then is number 0 whatever the task's number."""
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", lambda precision: None)
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction
    try:
        assert start_device(Environment(rank=local_rank, local_rank=local_rank, world_size=8)) == torch.device("cuda", number)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before
    assert chosen == [number]
