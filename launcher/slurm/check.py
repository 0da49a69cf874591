"""What can be known to be wrong before a job waits in a queue: config, world, data, disk, paths, a run that is busy or done."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, Fault, RunInUseError
from data_pipeline.loader import Dataset
from data_pipeline.storage import is_url
from launcher.config import RunConfig, load_config, vocabulary_notice, with_vocabulary, world_faults
from launcher.datasets import open_datasets
from launcher.huggingface import huggingface_folder, require_fitting_weights
from launcher.mixture import cap_faults
from launcher.resume_policy import require_same_meaning
from launcher.run_folder import RunFolder
from launcher.saved_config import read_config
from launcher.slurm.cluster import ClusterConfig
from megatron_lite.checkpoint.committed import committed, stored_state
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
    datasets = open_datasets(config.data)
    sized = with_vocabulary(config, tokenizer_size=datasets[0].vocab_size)
    faults = [*_disk_faults(sized), *_path_faults(cluster), *([] if status else cap_faults(config, datasets))]
    if faults:
        raise ConfigError(faults)
    require_fitting_weights(sized, datasets)
    _require_same_meaning(sized, datasets[0], folder)
    notice = vocabulary_notice(sized, tokenizer_size=datasets[0].vocab_size)
    notes = [*_node_notes(config, cluster), *_memory_notes(config), *([notice] if notice else [])]
    return Checked(config, world, notes, _finished(config, status))


def _require_same_meaning(config: RunConfig, dataset: Dataset, folder: RunFolder) -> None:
    """Of the weights that a run without checkpoints will take from another of ours, where that has some already."""
    source = config.checkpoint.init_from
    if source is None or huggingface_folder(source) is not None or committed(folder.checkpoints):
        return
    if (origin := stored_state(Path(source))) is not None:
        wanted = {"model": config.model.model_dump(mode="json"), "tokenizer_hash": dataset.tokenizer_hash}
        require_same_meaning(origin, wanted, where=source)


def _finished(config: RunConfig, status: Mapping[str, Any]) -> str:
    """Why there is nothing to do; empty where there is. A budget in tokens is compared with the one that is done: how many steps
    that took follows from batch sizes that may have changed on the way."""
    training, done = config.training, status.get("step") or 0
    if status.get("state") != "done":
        return ""
    if training.tokens is not None:
        try:
            before = read_config(config.run.folder).training.tokens
        except ConfigError:
            return ""
        if before is None or training.tokens > before:
            return ""
    elif done < training.num_steps:
        return ""
    budget = "training.steps" if training.steps is not None else "training.tokens"
    return f"{config.run.folder} is finished: {done} steps are done. To train on, raise {budget}"


def check_tools() -> None:
    """Raises ConfigError where this machine can't submit."""
    missing = [tool for tool in ("sbatch", "scontrol", "srun") if shutil.which(tool) is None]
    if missing:
        raise ConfigError(
            [Fault("PATH", ", ".join(missing), "Slurm's commands", "submit from a login node of the cluster; here: mlite train")]
        )


def sizes_that_would_do(config: RunConfig, *, ranks_per_node: int, near: int, count: int = 4) -> list[int]:
    """The numbers of nodes nearest to `near` on which this config starts."""
    batch = config.training.global_batch_size
    worlds = [config.parallel.tp * dp for dp in range(1, batch + 1) if batch % dp == 0]  # every rank has a share of the batch
    whole = [world // ranks_per_node for world in worlds if world % ranks_per_node == 0]
    nearest = sorted(whole, key=lambda nodes: (abs(nodes - near), nodes))
    return sorted(islice((nodes for nodes in nearest if _starts_on(config, nodes * ranks_per_node)), count))


def _starts_on(config: RunConfig, world: int) -> bool:
    """Whether load_config would take it for a world of so many ranks."""
    return not world_faults(config, world_size=world)


def _disk_faults(config: RunConfig) -> list[Fault]:
    """Room for the checkpoints that are kept, and the one being written."""
    folder = config.run.folder.resolve()
    while not folder.exists():
        folder = folder.parent
    one = checkpoint_bytes(config.model)
    kept = len(committed(RunFolder(config.run.folder).checkpoints))
    more = max(1, config.checkpoint.most_on_disk(config.training.num_steps) - kept)
    needed, free = one * more, shutil.disk_usage(folder).free
    if free >= needed:
        return []
    want = f"{needed / 1e9:.1f} GB free for {more} more checkpoint{'s' if more > 1 else ''} of {one / 1e9:.1f} GB; {free / 1e9:.1f} GB are"
    spare = "lower checkpoint.keep_last" + (", raise checkpoint.keep_every_steps" if config.checkpoint.keep_every_steps else "")
    return [Fault("run.dir", str(config.run.folder), want, f"free some, {spare}, or choose another run.dir")]


def _path_faults(cluster: ClusterConfig) -> list[Fault]:
    image = cluster.container.image if cluster.container else ""
    if image.endswith((".sif", ".sqsh")) and not Path(image).exists():
        return [Fault("cluster.container.image", image, "a file that exists", "build it as slurm/README.md says")]
    return []


def _node_notes(config: RunConfig, cluster: ClusterConfig) -> list[str]:
    """A range of nodes may have sizes in it that the layout can't take."""
    fewest, most = cluster.node_range
    sizes = range(fewest, most) if most - fewest < 64 else ()
    bad = [nodes for nodes in sizes if not _starts_on(config, nodes * cluster.ranks_per_node)]
    return [f"with {', '.join(map(str, bad))} nodes the run can't start: the layout does not fit there"] if bad else []


def _memory_notes(config: RunConfig) -> list[str]:
    """What lies in this machine's memory is not seen by other nodes."""
    local = [source.path for source in config.data.mixture if not is_url(source.path)]
    places = {"run.dir": config.run.folder, **{f"data {path}": Path(path) for path in local}}
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
