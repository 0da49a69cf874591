"""If these fail, Slurm is asked for something else than the cluster's file says, or a mistake in it is found only in the queue."""

from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from launcher.config import RunConfig, world_faults
from launcher.slurm.allocation import read_allocation
from launcher.slurm.check import sizes_that_would_do
from launcher.slurm.cluster import ClusterConfig, container_flags, load_cluster, rank_command, sbatch_options, split_words, to_flags
from tests.paths import ROOT

SHIPPED = sorted((ROOT / "configs" / "cluster").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_sound(path: Path) -> None:
    assert load_cluster([f"cluster={path.stem}"], root=ROOT) == load_cluster([f"cluster={path}"], root=Path("elsewhere"))


def test_the_defaults_file_shows_every_key_and_changes_none() -> None:
    assert load_cluster([], root=ROOT) == ClusterConfig()


def test_words_of_the_cluster_are_told_from_those_of_the_run() -> None:
    words = ["run.yaml", "parallel.tp=2", "cluster=h100", "--cluster.nodes=2", "run.name=cluster"]
    assert split_words(words) == (["run.yaml", "parallel.tp=2", "run.name=cluster"], ["cluster=h100", "--cluster.nodes=2"])
    cluster = load_cluster(split_words(words)[1], root=ROOT)
    assert (cluster.node_range, cluster.ranks_per_node) == ((2, 2), 8)
    assert to_flags(sbatch_options(cluster)) == [
        "--nodes=2",
        "--ntasks-per-node=8",
        "--cpus-per-task=12",
        "--gres=gpu:8",
        "--mem=0",
        "--time=24:00:00",
        "--partition=gpu",
        "--exclusive",
        "--requeue",
        "--open-mode=append",
    ]


def test_a_range_of_nodes_asks_for_no_number_of_tasks() -> None:
    """Slurm keeps the number of tasks of the first start, and would wait for as many nodes at a requeue."""
    flags = to_flags(sbatch_options(ClusterConfig(nodes="2-4", tasks_per_node=4, cpus_per_task=6)))
    assert flags == ["--nodes=2-4", "--mincpus=24", "--requeue", "--open-mode=append"]


@pytest.mark.parametrize(
    ("asked", "mincpus", "a_rank"),
    [
        ({"tasks_per_node": 1, "gpus_per_node": 8, "cpus_per_task": 96}, "96", 12),  # the one task stands for eight ranks
        ({"gpus_per_node": 8, "cpus_per_task": 12}, "96", 12),
        ({"tasks_per_node": 4, "gpus_per_node": 8, "cpus_per_task": 6}, "24", 6),
        ({"tasks_per_node": 1, "gpus_per_node": 8, "cpus_per_task": 4}, "8", 1),
        ({"tasks_per_node": 1, "gpus_per_node": 8}, "8", None),
    ],
)
def test_cpus_of_a_task_are_shared_by_its_ranks(asked: dict[str, int], mincpus: str, a_rank: int | None) -> None:
    """The same of a range of nodes as of a number."""
    cluster = ClusterConfig.model_validate({"nodes": "1-2", **asked})
    assert sbatch_options(cluster)["mincpus"] == mincpus and cluster.cpus_per_rank == a_rank
    if a_rank is not None:
        fixed = {"SLURM_NTASKS_PER_NODE": str(asked.get("tasks_per_node", 8)), "SLURM_CPUS_PER_TASK": str(asked["cpus_per_task"])}
        found = read_allocation({"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "8", **fixed})
        assert (found.cpus_per_rank, found.ranks) == (a_rank, (cluster.ranks_per_node,) * 2)


def test_mistakes_are_named_all_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_cluster(["cluster.nodes=4-2", "cluster.partion=gpu", "cluster.sbatch_args=[-x]"], root=ROOT)
    text = str(error.value)
    assert len(error.value.faults) == 3 and "did you mean cluster.partition?" in text.replace("mean partition", "mean cluster.partition")
    with pytest.raises(ConfigError, match="gpus_per_node of 1 or more beside gpu_type"):
        load_cluster(["cluster.gpu_type=h100"], root=ROOT)  # it would ask for none
    with pytest.raises(ConfigError, match=r"default, h100"):
        load_cluster(["cluster=h200"], root=ROOT)


@pytest.mark.parametrize(("tasks", "gpus", "ranks"), [(None, 0, 1), (None, 8, 8), (1, 8, 8), (4, 8, 4), (2, 0, 2), (1, 0, 1)])
def test_one_rank_a_task_or_a_gpu(tasks: int | None, gpus: int, ranks: int) -> None:
    assert ClusterConfig(tasks_per_node=tasks, gpus_per_node=gpus).ranks_per_node == ranks


def test_ranks_run_in_the_container_and_see_their_folders() -> None:
    folders = [Path("/here"), Path("/data")]
    given = {"script": Path("/x/train.py"), "arguments": ["--config", "c"], "folders": folders}
    apptainer = validate(ClusterConfig, {"gpus_per_node": 1, "container": {"image": "a.sif", "mounts": ["/s:/t"]}})
    assert rank_command(apptainer, python="p", **given) == [
        *("apptainer", "exec", "--nv", "--bind", "/here:/here", "--bind", "/data:/data", "--bind", "/s:/t", "--pwd", "/here", "a.sif"),
        *("python", "/x/train.py", "--config", "c"),
    ]
    unasked = validate(ClusterConfig, {"container": {"image": "a.sif"}})  # devices may come by sbatch's own options
    assert "--nv" in rank_command(unasked, python="p", has_gpus=True, **given) and "--nv" not in rank_command(unasked, python="p", **given)
    pyxis = validate(ClusterConfig, {"container": {"runtime": "pyxis", "image": "i", "python": "python3"}})
    assert rank_command(pyxis, python="p", **given) == ["python3", "/x/train.py", "--config", "c"]
    assert container_flags(pyxis, folders=folders)[0] == "--container-image=i" and container_flags(apptainer, folders=folders) == []
    assert rank_command(ClusterConfig(), python="p", **given)[0] == "p"


def test_numbers_of_nodes_that_would_do() -> None:
    """A global batch of 12 with micro batches of 2 divides into dp 1, 2, 3 and 6."""
    training = {"steps": 1, "global_batch_size": 12, "micro_batch_size": 2}
    config = validate(RunConfig, {"run": {"name": "x"}, "data": {"path": "x"}, "parallel": {"tp": 2}, "training": training})
    assert sizes_that_would_do(config, ranks_per_node=2, near=4) == [1, 2, 3, 6]
    assert sizes_that_would_do(config, ranks_per_node=1, near=4) == [2, 4, 6, 12]
    assert sizes_that_would_do(config, ranks_per_node=16, near=1) == []
    sized = config.model_copy(update={"deepspeed": {"train_micro_batch_size_per_gpu": 4}})  # a rank's share: dp 3 alone
    assert sizes_that_would_do(sized, ranks_per_node=2, near=4) == [3]


@pytest.mark.parametrize(("tp", "micro", "ranks"), [(1, "auto", 1), (2, "auto", 8), (4, 2, 2), (8, 3, 4), (2, 5, 3)])
def test_numbers_of_nodes_are_all_that_start(tp: int, micro: int | str, ranks: int) -> None:
    """The same as trying each."""
    training = {"steps": 1, "global_batch_size": 60, "micro_batch_size": micro}
    tree = {"run": {"name": "x"}, "data": {"path": "x"}, "model": {"num_attention_heads": 8}, "parallel": {"tp": tp}, "training": training}
    config = validate(RunConfig, tree)
    start = [nodes for nodes in range(1, 600) if not world_faults(config, world_size=nodes * ranks)]
    assert sizes_that_would_do(config, ranks_per_node=ranks, near=5, count=1000) == start
    assert sizes_that_would_do(config, ranks_per_node=ranks, near=5, count=1) == sorted(start, key=lambda n: (abs(n - 5), n))[:1]
