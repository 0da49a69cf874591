"""A submission: what was asked for when a job was submitted, frozen in the run's folder, so that nothing edited later changes it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.schema import validate
from data_pipeline.storage import atomic_write, is_url
from data_pipeline.yaml_text import read_yaml
from launcher.config import RunConfig, load_config
from launcher.huggingface import huggingface_folder
from launcher.slurm.chain import Chain
from launcher.slurm.cluster import ClusterConfig

ROOT = Path(__file__).resolve().parent.parent.parent  # the checkout
SCRIPT = ROOT / "slurm" / "pretrain.sh"


@dataclass(frozen=True)
class Submission:
    """The folder `runs/NAME/submissions/0001`, and what is read from it."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "config.yaml"

    @property
    def chain(self) -> Chain:
        return Chain(self.folder / "attempts.json")

    @property
    def setup(self) -> Path:
        return self.folder / "setup.sh"

    @property
    def python(self) -> Path:
        """A file that names the interpreter, for pretrain.sh."""
        return self.folder / "python"

    def cluster(self) -> ClusterConfig:
        return validate(ClusterConfig, read_yaml(self.folder / "cluster.yaml"), prefix="cluster")

    def load(self, *, world_size: int | None) -> RunConfig:
        return load_config(self.config, world_size=world_size)

    def record(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "submission.json").read_text(encoding="utf-8")))

    def note(self, **more: Any) -> None:
        """Add to submission.json."""
        path = self.folder / "submission.json"
        record = {**(self.record() if path.exists() else {}), **more}
        with atomic_write(path) as file:
            file.write(json.dumps(record, indent=1).encode() + b"\n")


def freeze(config: RunConfig, cluster: ClusterConfig, **record: Any) -> Submission:
    """Write the resolved config, the cluster's, the commit and what differs from it into the run's next submission folder."""
    try:
        folder = next_folder(config.run.folder / "submissions")
    except OSError as error:
        raise ConfigError([Fault("run.dir", str(config.run.folder), "a folder that can be written", str(error))]) from None
    (folder / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
    (folder / "cluster.yaml").write_text(cluster.to_yaml(), encoding="utf-8")
    submission = Submission(folder)
    submission.python.write_text(sys.executable + "\n", encoding="utf-8")
    if cluster.setup:
        submission.setup.write_text("\n".join(cluster.setup) + "\n", encoding="utf-8")
    commit, diff = _git("rev-parse", "HEAD").strip(), _git("diff", "HEAD")
    if diff:
        (folder / "diff.patch").write_text(diff, encoding="utf-8")
    submission.note(commit=commit or None, changed=bool(diff), python=sys.executable, cwd=str(Path.cwd()), **record)
    return submission


def next_folder(parent: Path) -> Path:
    """A new folder 0001, 0002, ..."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(entry.name) for entry in parent.iterdir() if entry.name.isdigit()), default=0)
    folder = parent / f"{number:04d}"
    folder.mkdir()
    return folder


def job_name(config: RunConfig) -> str:
    return f"mlite-{config.run.name}"


def _git(*words: str) -> str:
    try:
        result = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout if result.returncode == 0 else ""


# -------------------------------------------------------------------------------- jobs that nobody froze a submission for


def remember(submission: Submission, environ: Mapping[str, str]) -> None:
    """Leave a note of which submission a job that was started by sbatch itself belongs to, for when it is requeued."""
    with atomic_write(_memory(environ)) as file:
        file.write(f"{submission.folder.resolve()}\n".encode())


def recall(environ: Mapping[str, str]) -> Submission | None:
    """The submission of a requeued job, if it left a note."""
    if not int(environ.get("SLURM_RESTART_COUNT") or 0):
        return None
    try:
        return Submission(Path(_memory(environ).read_text(encoding="utf-8").strip()))
    except OSError:
        return None


def _memory(environ: Mapping[str, str]) -> Path:
    name = f"{environ.get('SLURM_CLUSTER_NAME', 'slurm')}-{environ['SLURM_JOB_ID']}"
    return Path("runs") / ".slurm" / name  # where the job starts: in the folder that sbatch was typed in


def folders_of(config: RunConfig) -> Sequence[Path]:
    """What a container must see at its own place, by the names that the config has for it and where they lead: the working folder,
    the checkout, the run, the data with the cache of what is elsewhere, and what a start takes weights from while that is there."""
    wanted = config.checkpoint
    data = [Path(source.path) for source in config.data.mixture if not is_url(source.path)]
    weights = [Path(wanted.resume), *([huggingface_folder(wanted.init_from) or Path(wanted.init_from)] if wanted.init_from else [])]
    cache = config.data.cache  # unstated, it is in the system's folder for temporary files, which a container has
    blocks = [cache.folder] if cache.dir is not None and len(data) < len(config.data.mixture) else []
    named = [config.run.folder, *data, *(path for path in (*weights, *blocks) if path.exists())]
    return list(dict.fromkeys([Path.cwd(), ROOT, *(place for path in named for place in (path.absolute(), path.resolve()))]))
