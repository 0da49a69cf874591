"""How a site's Slurm is asked for machines: one file a cluster in configs/cluster, overridden by words `cluster.key=value`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator, model_validator

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.schema import Section, apply_override, validate
from data_pipeline.yaml_text import dump_yaml, read_yaml

DEFAULT = "default"


class ContainerConfig(Section):
    """Ranks run inside this image. What starts them (sbatch, srun) stays outside."""

    runtime: Literal["apptainer", "pyxis"] = "apptainer"  # what starts the image
    image: str  # apptainer: a .sif file or a folder; pyxis: what --container-image takes
    mounts: list[str] = []  # SOURCE:TARGET; the working folder and the checkout are mounted anyway
    python: str = "python"  # inside the image


class ClusterConfig(Section):
    """What sbatch is asked for. What is null is not asked for: the site's default holds."""

    nodes: int | str = 1  # 4, or a range: 2-4 takes what is free, now and at every requeue
    tasks_per_node: int | None = Field(None, gt=0)  # null: one a GPU, or one on machines without
    gpus_per_node: int = Field(0, ge=0)  # --gres
    gpu_type: str | None = None  # --gres=gpu:TYPE:N
    cpus_per_task: int | None = Field(None, gt=0)  # --cpus-per-task
    memory: int | str | None = None  # of a node: 200G; 0 is all of it
    time: int | str | None = None  # 24:00:00; a number is minutes
    account: str | None = None  # --account
    partition: str | None = None  # --partition
    qos: str | None = None  # --qos
    constraint: str | None = None  # --constraint
    exclusive: bool = False  # whole nodes
    requeue: bool = True  # false: the site refuses it, and the next job waits for this one instead
    sbatch_args: list[str] = []  # more options of sbatch, each in one word
    srun_args: list[str] = []  # more options of srun
    setup: list[str] = []  # lines of shell before python starts: module load ...
    container: ContainerConfig | None = None

    @field_validator("nodes")
    @classmethod
    def _range(cls, value: int | str) -> int | str:
        match = re.fullmatch(r"([1-9][0-9]*)(?:-([1-9][0-9]*))?", str(value))
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise ValueError("a number of nodes, or a range of them | for example 4, or 2-4")
        return value

    @field_validator("sbatch_args", "srun_args")
    @classmethod
    def _long(cls, value: list[str]) -> list[str]:
        if any(not word.startswith("--") for word in value):
            raise ValueError("long options, each in one word | for example --mail-type=END")
        return value

    @model_validator(mode="after")
    def _type_of_some(self) -> ClusterConfig:
        if self.gpu_type is not None and self.gpus_per_node == 0:
            raise ValueError(f"gpus_per_node of 1 or more beside gpu_type | without GPUs no {self.gpu_type} is asked for")
        return self

    @property
    def node_range(self) -> tuple[int, int]:
        """(fewest, most) nodes."""
        fewest, _, most = str(self.nodes).partition("-")
        return int(fewest), int(most or fewest)

    @property
    def ranks_per_node(self) -> int:
        """Processes a node: the tasks, or one a GPU where there is one task for several."""
        tasks = self.tasks_per_node or max(1, self.gpus_per_node)
        return self.gpus_per_node if tasks == 1 and self.gpus_per_node > 1 else tasks

    @property
    def cpus_per_rank(self) -> int | None:
        """A task's CPUs, shared out where it stands for several ranks."""
        tasks = self.tasks_per_node or max(1, self.gpus_per_node)
        return max(1, self.cpus_per_task * tasks // self.ranks_per_node) if self.cpus_per_task else None

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(mode="json"))


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(words for the run, words for the cluster): `cluster=NAME` and `cluster.key=value` are the latter's."""
    ours = [word for word in words if re.match(r"(--)?cluster(\.[^=]*)?=", word)]
    return [word for word in words if word not in ours], ours


def load_cluster(words: Sequence[str], *, root: Path) -> ClusterConfig:
    """The cluster that the words name (`cluster=NAME`, or a path), else configs/cluster/default.yaml under `root`, with their
    overrides. Raises ConfigError with every fault."""
    name = DEFAULT
    for word in words:
        key, _, value = word.removeprefix("--").partition("=")
        name = value if key == "cluster" else name
    path = Path(name) if name.endswith((".yaml", ".yml")) else root / "configs" / "cluster" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(each.stem for each in (root / "configs" / "cluster").glob("*.yaml"))
        raise ConfigError([Fault("cluster", name, "a file in configs/cluster, or the path of one", f"there: {', '.join(known)}")])
    tree = {"cluster": read_yaml(path)}
    for word in words:
        if not word.removeprefix("--").startswith("cluster="):
            apply_override(tree, word)
    return validate(ClusterConfig, tree["cluster"], prefix="cluster")


def sbatch_options(cluster: ClusterConfig) -> dict[str, str | bool]:
    """The long options of sbatch, without their dashes; True for a flag.

    With a range of nodes no number of tasks is asked for, but the CPUs that they need: Slurm would keep the number that the first
    start had, and wait for as many nodes at a requeue.
    """
    fewest, most = cluster.node_range
    tasks = cluster.tasks_per_node or max(1, cluster.gpus_per_node)
    gpus = f"gpu:{cluster.gpu_type}:{cluster.gpus_per_node}" if cluster.gpu_type else f"gpu:{cluster.gpus_per_node}"
    options: dict[str, str | int | bool | None] = {
        "nodes": cluster.nodes,
        "ntasks-per-node": tasks if fewest == most else None,
        "cpus-per-task": cluster.cpus_per_task if fewest == most else None,
        "mincpus": max(cluster.ranks_per_node, tasks * (cluster.cpus_per_task or 1)) if fewest < most else None,
        "gres": gpus if cluster.gpus_per_node else None,
        "mem": cluster.memory,
        "time": cluster.time,
        "account": cluster.account,
        "partition": cluster.partition,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "exclusive": cluster.exclusive or None,
        "requeue" if cluster.requeue else "no-requeue": True,
        "open-mode": "append",
    }
    return {key: value if isinstance(value, bool) else str(value) for key, value in options.items() if value is not None}


def to_flags(options: dict[str, str | bool]) -> list[str]:
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]


def rank_command(
    cluster: ClusterConfig, *, python: str, script: Path, arguments: Sequence[str], folders: Sequence[Path], has_gpus: bool = False
) -> list[str]:
    """What srun starts as a rank. With `has_gpus` the node has some, whether or not the cluster's file asked for them."""
    return [*python_in(cluster, python=python, folders=folders, has_gpus=has_gpus), str(script), *arguments]


def python_in(cluster: ClusterConfig, *, python: str, folders: Sequence[Path], has_gpus: bool = False) -> list[str]:
    """`python` itself, or python in the container with `folders` mounted at their own places."""
    container = cluster.container
    if container is None:
        return [python]
    if container.runtime == "pyxis":
        return [container.python]
    binds = [word for mount in (*(f"{folder}:{folder}" for folder in folders), *container.mounts) for word in ("--bind", mount)]
    gpus = ["--nv"] if cluster.gpus_per_node or has_gpus else []
    return ["apptainer", "exec", *gpus, *binds, "--pwd", str(folders[0]), container.image, container.python]


def container_flags(cluster: ClusterConfig, *, folders: Sequence[Path]) -> list[str]:
    """srun's own options for the container: pyxis has them, apptainer none."""
    container = cluster.container
    if container is None or container.runtime != "pyxis":
        return []
    mounts = ",".join([*(f"{folder}:{folder}" for folder in folders), *container.mounts])
    return [f"--container-image={container.image}", f"--container-mounts={mounts}", f"--container-workdir={folders[0]}"]


def shown(command: Sequence[str]) -> str:
    """A command line as one would type it."""
    return shlex.join(command)
