"""What can be known to be wrong before a job waits in a queue: config, world, data, disk, paths, a run that is busy or done."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import ConfigError, Fault, RunInUseError
from data_pipeline.loader import Dataset
from launcher.config import RunConfig, load_config, with_vocabulary
from launcher.huggingface import require_fitting_weights
from launcher.mixture import cap_faults
from launcher.run_folder import RunFolder
from launcher.slurm.cluster import ClusterConfig
from megatron_lite.checkpoint.committed import committed
from megatron_lite.sizes import checkpoint_bytes

MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True)
class Checked:
    """A config that will start, what it will start on, and what the user should know though it stops nothing."""

    config: RunConfig
    world: int
    notes: list[str]
    finished: str = ""  # why there is nothing to do


def check(path: Path, overrides: list[str], cluster: ClusterConfig) -> Checked:
    """Raises ConfigError with every fault of config, world, paths and disk; DataError; RunInUseError. Loads no torch."""
    world = cluster.node_range[1] * cluster.ranks_per_node
    config = load_config(path, overrides, world_size=world)
    folder = RunFolder(config.run.folder)
    status = folder.status()
    if folder.in_use():
        raise RunInUseError(f"{folder.path} is in use: a job is at it now. Wait for it, cancel it, or choose another run.name")
    datasets = [Dataset.open(source.path) for source in config.data.mixture]
    sized = with_vocabulary(config, tokenizer_size=datasets[0].vocab_size)
    faults = [*_disk_faults(sized), *_path_faults(cluster), *([] if status else cap_faults(config, datasets))]
    if faults:
        raise ConfigError(faults)
    require_fitting_weights(sized, datasets)
    notes = [*_node_notes(path, overrides, cluster), *_memory_notes(config)]
    steps = config.training.num_steps
    done = status.get("state") == "done" and (status.get("step") or 0) >= steps
    finished = f"{folder.path} is finished: {steps} steps are done. To train on, raise training.steps" if done else ""
    return Checked(config, world, notes, finished)


def check_tools() -> None:
    """Raises ConfigError where this machine can't submit."""
    missing = [tool for tool in ("sbatch", "scontrol", "srun") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            [Fault("PATH", ", ".join(missing), "Slurm's commands", "submit from a login node of the cluster; here: mlite train")]
        )


def sizes_that_would_do(config: RunConfig, *, ranks_per_node: int, near: int, count: int = 4) -> list[int]:
    """The numbers of nodes nearest to `near` on which this config starts: the global batch divides into dp and micro batches."""
    training, tp = config.training, config.parallel.tp
    micro = training.micro_batch_size if isinstance(training.micro_batch_size, int) else 1
    fits = [
        nodes
        for nodes in range(1, max(near, tp * training.global_batch_size // ranks_per_node) + 1)
        if (nodes * ranks_per_node) % tp == 0 and training.global_batch_size % ((nodes * ranks_per_node) // tp * micro) == 0
    ]
    return sorted(sorted(fits, key=lambda nodes: (abs(nodes - near), nodes))[:count])


def _disk_faults(config: RunConfig) -> list[Fault]:
    """Room for the checkpoints that are kept, and the one being written."""
    folder = config.run.folder.resolve()
    while not folder.exists():
        folder = folder.parent
    one = checkpoint_bytes(config.model)
    kept = len(committed(RunFolder(config.run.folder).checkpoints))
    needed, free = one * max(1, config.checkpoint.keep_last + 1 - kept), shutil.disk_usage(folder).free
    if free >= needed:
        return []
    want = f"{needed / 1e9:.1f} GB free for {config.checkpoint.keep_last} + 1 checkpoints of {one / 1e9:.1f} GB; {free / 1e9:.1f} GB are"
    return [Fault("run.dir", str(config.run.folder), want, "free some, lower checkpoint.keep_last, or choose another run.dir")]


def _path_faults(cluster: ClusterConfig) -> list[Fault]:
    image = cluster.container.image if cluster.container else ""
    if image.endswith((".sif", ".sqsh")) and not Path(image).exists():
        return [Fault("cluster.container.image", image, "a file that exists", "build it as slurm/README.md says")]
    return []


def _node_notes(path: Path, overrides: list[str], cluster: ClusterConfig) -> list[str]:
    """A range of nodes may have sizes in it that the layout can't take."""
    fewest, most = cluster.node_range
    bad = []
    for nodes in range(fewest, most) if most - fewest < 64 else ():
        try:
            load_config(path, overrides, world_size=nodes * cluster.ranks_per_node)
        except ConfigError:
            bad.append(nodes)
    return [f"with {', '.join(map(str, bad))} nodes the run can't start: the layout does not fit there"] if bad else []


def _memory_notes(config: RunConfig) -> list[str]:
    """What lies in this machine's memory is not seen by other nodes."""
    places = {"run.dir": config.run.folder, **{f"data {source.path}": Path(source.path) for source in config.data.mixture}}
    return [
        f"{name} is in this machine's memory ({place.resolve()}): other nodes won't see it"
        for name, place in places.items()
        if _file_system(place) in MEMORY_FILE_SYSTEMS
    ]


def _file_system(path: Path) -> str:
    """Its type, by the longest mount point that holds the path; empty where that can't be known."""
    best, kind, target = -1, "", path.resolve()
    try:
        mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in mounts:
        _, point, this, *_ = line.split()
        if (target == Path(point) or Path(point) in target.parents) and len(point) > best:
            best, kind = len(point), this
    return kind
