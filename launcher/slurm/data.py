"""A data build as Slurm jobs: an array that reads, a job that looks at the whole corpus, an array that encodes, a job that puts it together.

Each array task does a portion of what the last job, an ordinary build, would do. So a task that is killed and started again goes on, and
what a task could not do is done by the last job.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, get_args

from data_pipeline.build import Stage, build, build_portion
from data_pipeline.config import DataConfig, load_data_config
from data_pipeline.errors import ConfigError, Fault, MegatronLiteError
from data_pipeline.inputs import check_inputs
from data_pipeline.portion import Portion
from data_pipeline.storage import is_url, root_of
from data_pipeline.work_folder import STAGES, check_place
from data_pipeline.yaml_text import dump_yaml
from launcher.console import show
from launcher.slurm.check import check_tools
from launcher.slurm.cluster import ClusterConfig, container_flags, load_cluster, python_in, sbatch_options, split_words
from launcher.slurm.job import JobFailedError
from launcher.slurm.submission import ROOT, next_folder
from launcher.slurm.submit import key_and_value

STOP_SIGNAL, STOP_BEFORE_S, STOPPED = signal.SIGUSR2, 30, 75
# After a kill (a code above 128) a task is started again while it was started again fewer than three times, for whatever reason: Slurm
# counts no other way. Stopped by its time limit, as often as it takes. Not where Slurm itself ends it: requeueing would bring a cancelled
# job back.
AGAIN = f"""\
again() {{
  code=$?
  id=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
  id=${{id:-$SLURM_JOB_ID}}
  if [ $code -eq {STOPPED} ] || {{ [ $code -gt 128 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 3 ]; }}; then
    scontrol show job -o "$id" | grep -q JobState=RUNNING && scontrol requeue "$id"
  fi
  exit $code
}}
trap again EXIT"""


@dataclass
class DataTask:
    """What submitit pickles: a portion of a stage, or the whole build where there is none."""

    config: str
    stage: Stage | None
    index: int = 0
    count: int = 1
    replace: bool = False

    def __call__(self) -> str:
        """Raises JobFailedError; near the time limit it exits with STOPPED."""
        config = load_data_config(self.config)
        signal.signal(STOP_SIGNAL, self._stop_of(config))
        try:
            if self.stage is None:
                build(config, replace=self.replace)
            else:
                build_portion(config, self.stage, Portion(self.index, self.count), replace=self.replace)
        except MegatronLiteError as error:
            show(f"data build: {error}", error=True)
            raise JobFailedError(f"exit code {error.exit_code}: {error}") from None
        return f"{self.stage or 'build'} {self.index + 1} of {self.count} is done"

    def _stop_of(self, config: DataConfig) -> Callable[[int, FrameType | None], None]:
        """What is half written is a temporary file, and workers go with this process. One that was started again and has finished nothing
        more would be started again for ever."""
        publishes = self.stage is None and is_url(config.output)  # what was sent is seen there alone
        before = None if publishes or not int(os.environ.get("SLURM_RESTART_COUNT") or 0) else finished_work(config)

        def stop(number: int, frame: FrameType | None) -> None:
            stuck = before is not None and not finished_work(config) - before
            if stuck:
                show(
                    f"no step of {self.stage or 'build'} ends within the time limit: ask for more time, cluster.time=..., and submit again",
                    error=True,
                )
            else:
                show("the time limit is near: stopped, to be started again")
            sys.stdout.flush()
            os._exit(1 if stuck else STOPPED)

        return stop


def finished_work(config: DataConfig) -> set[Path]:
    """The files that a later start needn't make: in the work folder, the dataset, and beside earlier ones."""
    earlier = (config.dedup.earlier if config.dedup is not None else None) or []
    folders = [*(config.work_folder / name for name in (*STAGES, "dedup")), *(Path(path) / "dedup" for path in earlier), config.folder]
    found = {path for folder in folders for path in folder.rglob("*") if not any(map(_is_half, path.relative_to(folder).parts))}
    return found | set(config.work_folder.glob("inputs*.json"))


def _is_half(name: str) -> bool:
    return ".tmp-" in name or name.endswith(".scratch")


def submit_build(path: str | Path, words: Sequence[str], *, tasks: int, cluster: str | None = None, replace: bool = False) -> list[str]:
    """Check, freeze, queue; the jobs' ids in order. Raises ConfigError with every fault or Slurm's own words, DataError where input is
    missing."""
    overrides, cluster_words = split_words([*words, *([f"cluster={cluster}"] if cluster is not None else [])])
    config = load_data_config(path, overrides)
    asked = _of_a_task(load_cluster(cluster_words, root=ROOT), config, cluster_words)
    check_place(config.folder, config.content(), replace=replace)
    check_inputs(config)
    check_tools()
    if not is_url(config.output):
        config.folder.parent.mkdir(parents=True, exist_ok=True)  # a container can only be given what is there
    folder = next_folder(config.work_folder / "slurm")
    frozen = folder / "config.yaml"
    frozen.write_text(dump_yaml(config.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
    (folder / "cluster.yaml").write_text(asked.to_yaml(), encoding="utf-8")
    ids: list[str] = []
    for stage in (*get_args(Stage), None):
        count = tasks if stage in ("read", "encode") else 1
        portions = [DataTask(str(frozen.resolve()), stage, index, count, replace) for index in range(count)]
        name = f"mlite-data-{config.name}-{stage or 'build'}"
        ids.append(_queue(portions, asked, folders=folders_of(config), folder=folder, name=name, after=ids[-1] if ids else None))
    show(f"job {ids[0]} reads and job {ids[2]} encodes, {tasks} task{'s' if tasks > 1 else ''} each; job {ids[1]} deduplicates in between")
    show(f"job {ids[3]} puts {config.output} together; output of all of them in {folder}")
    show(f"look at them: squeue --job {','.join(ids)}    end them: scancel {' '.join(ids)}")
    return ids


def _of_a_task(cluster: ClusterConfig, config: DataConfig, words: Sequence[str]) -> ClusterConfig:
    """The site's words for one task on one node, with a core a worker and no device."""
    own = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "gpu_type": None, "cpus_per_task": config.workers, "exclusive": False}
    given = [word.removeprefix("--").partition("=") for word in words]
    if faults := [
        Fault(key, value, "nothing: a task has one node, and a core a worker", "--tasks N says how many, workers=N how large")
        for key, _, value in given
        if key.removeprefix("cluster.") in own
    ]:
        raise ConfigError(faults)
    return cluster.model_copy(update=own)


def folders_of(config: DataConfig) -> list[Path]:
    """What a container must see at its own place, by the names that the config has for it and where they lead: the working folder, the
    checkout, the work folder and where the dataset goes; the input, and all that it is compared with or cut by."""
    given: list[str | list[str] | None] = [part for source in config.sources for part in (source.files, source.target_files)]
    given += [source.dataset for source in config.sources if source.dataset is not None and Path(source.dataset).is_dir()]
    given += [config.dedup.earlier] if config.dedup is not None else []
    if (cleaning := config.decontaminate) is not None:
        given += [*(each.files for each in cleaning.evaluations), cleaning.stop_texts]
    if config.filters is not None and config.filters.url is not None:
        given.append(config.filters.url.blocklists)
    patterns = [word for words in given for word in ([words] if isinstance(words, str) else words or []) if not is_url(word)]
    named = [config.work_folder, *([] if is_url(config.output) else [config.folder.parent]), *(Path(root_of(word)) for word in patterns)]
    if (tokenizer := config.tokenizer.name_or_path) is not None:
        place = Path(root_of(tokenizer))
        named += [place, (place / "tokenizer.json").resolve().parent]  # in a cache of the Hub a link to elsewhere
    places = dict.fromkeys(place for path in named for place in (path.absolute(), path.resolve()) if place != Path("/"))
    return list(dict.fromkeys([Path.cwd(), ROOT, *places]))


def _queue(
    portions: Sequence[DataTask], cluster: ClusterConfig, *, folders: Sequence[Path], folder: Path, name: str, after: str | None
) -> str:
    """One job, or an array of them; its id. It starts when `after` has ended well, and is cancelled where that can't be any more."""
    import submitit

    executor = submitit.SlurmExecutor(
        folder=folder.resolve(), python=shlex.join(python_in(cluster, python=sys.executable, folders=folders))
    )
    options: dict[str, Any] = {**sbatch_options(cluster), **dict(key_and_value(word) for word in cluster.sbatch_args)}
    if after is not None:
        options |= {"dependency": f"afterok:{after}", "kill-on-invalid-dep": "yes"}
    executor.update_parameters(
        job_name=name,
        time=None,  # submitit's own default is five minutes
        stderr_to_stdout=True,
        setup=[*cluster.setup, AGAIN],
        srun_args=[*container_flags(cluster, folders=folders), *cluster.srun_args],
        additional_parameters={
            "signal": f"{STOP_SIGNAL.name.removeprefix('SIG')}@{STOP_BEFORE_S}",
            "chdir": str(Path.cwd()),
            **{key.replace("-", "_"): value for key, value in options.items() if key != "open-mode"},
        },
    )
    try:
        jobs = executor.map_array(_call, list(portions))
    except (submitit.core.utils.FailedJobError, submitit.core.utils.FailedSubmissionError) as error:
        raise ConfigError(f"Slurm refused the job: {error}") from None
    return str(jobs[0].job_id).partition("_")[0]


def _call(task: DataTask) -> str:
    return task()
