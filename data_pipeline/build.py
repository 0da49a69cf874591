"""Raw text to a dataset folder: the stages in order, each kept under a key of all that it depends on.

Killed at any moment and started again, a build goes on and ends with the same bytes; so it does with any number of
workers, and of processes on other machines that did portions of it before. The dataset appears as a whole, by one rename, and nothing
in it says when or where it was built.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

from data_pipeline.assemble import Built, assemble, contamination_files, make_plans
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.dedup.signatures import make_signatures, signature_jobs
from data_pipeline.errors import DataError
from data_pipeline.ingest import dropped_path, parts_of, read_missing
from data_pipeline.inputs import unpinned
from data_pipeline.pool import Workers, started
from data_pipeline.portion import Portion
from data_pipeline.progress import Progress, duration, size
from data_pipeline.publish import publish
from data_pipeline.sharding import make_shard
from data_pipeline.source_loss import check_stored_losses
from data_pipeline.stages import Asked, ask, plan, read_jobs
from data_pipeline.storage import atomic_write, is_url, remove_leftovers
from data_pipeline.summary import summary_lines
from data_pipeline.work_folder import finished_at, held, prune

Stage = Literal["read", "join", "encode"]


def build(config: DataConfig, *, quiet: bool = False, replace: bool = False) -> Dataset:
    """Build the dataset, or finish a build that was killed, or find that it is there already. `replace`: a different
    dataset in the output folder gives way once the new one is complete.

    Raises ConfigError where the output holds something else, DataError where the text can't be used, RunInUseError while
    another build of the same output runs, MegatronLiteError where a remote output can't be written.
    """
    progress = Progress(quiet=quiet)
    begin = time.monotonic()
    with held(config.work_folder), started(config.workers) as workers:
        remove_leftovers(config.folder)
        asked = ask(config, workers, progress)
        ready = finished_at(config.folder, asked.key, replace=replace)
        if ready is None:
            built = _build(asked, workers, progress)
            workers.close()  # nothing below needs them, nor the memory that they hold
            assemble(built, replace=replace)
            prune(config.work_folder, _used(built))
        else:
            check_stored_losses(ready.manifest.ledger, limit=config.max_source_loss, progress=progress)
        dataset = Dataset.open(config.folder)
        plans = make_plans(dataset, config.packing)
        if is_url(config.output):
            sent = publish(config.folder, config.output, replace=replace, progress=progress)
    if ready is not None:
        progress.say(f"{config.output} is up to date: the same config and the same input files made it")
        if names := unpinned(asked.tasks):
            progress.say(f"  {', '.join(names)} may hold other text by now: with `revision` in its source a build reads what you name")
    else:
        progress.say(f"\n{config.output} is ready after {duration(time.monotonic() - begin)}")
    if is_url(config.output):
        progress.say(f"{sent} files sent to {config.output}" if sent else f"everything was in {config.output} already")
    asked_vocab = config.tokenizer.vocab_size if config.tokenizer.type == "bpe" else None
    for line in [*summary_lines(dataset, plans, asked_vocab=asked_vocab), *_where(config)]:
        progress.say(line)
    return dataset


def build_portion(config: DataConfig, stage: Stage, portion: Portion, *, quiet: bool = False, replace: bool = False) -> None:
    """Do a portion of what `build` would do, in advance and beside others that do the rest, on any machine that sees the same files.

    read: read, clean, and MinHash signatures, for a portion of the input. join: all that looks at the whole corpus, by one process
    when everything is read. encode: a portion of the shards, when that is done. After them `build` finds its work done; what is missing,
    it does itself. Done again, a portion takes what is there. Raises as `build`, and DataError where files changed in between.
    """
    progress = Progress(quiet=quiet)
    with held(config.work_folder, shared=stage != "join"), started(config.workers) as workers:
        if stage == "read":
            _read(ask(config, workers, progress, portion=portion), workers, progress)
            return
        asked = ask(config, workers, progress)
        joined = config.work_folder / "joined" / asked.key
        if stage == "encode" and not joined.exists():
            raise DataError(f"{config.work_folder}: the stage before this one is not done for these inputs. If files changed, begin again.")
        if stage == "join":
            finished_at(config.folder, asked.key, replace=replace)  # what build would refuse in the end is refused before the work
        planned = plan(asked, workers, progress)
        if stage == "join":
            with atomic_write(joined):
                return
        jobs = portion.of(planned.jobs)
        with progress.stage("encode", sum(job.text_bytes for job in jobs)) as advance:
            workers.run(make_shard, jobs, advance=advance)


def _read(asked: Asked, workers: Workers, progress: Progress) -> None:
    jobs = read_jobs(asked)
    read_missing(jobs, workers=workers, progress=progress)
    dedup = asked.config.dedup
    if dedup is not None and dedup.minhash is not None:
        waiting = signature_jobs(parts_of(jobs), dedup.minhash, asked.config.work_folder / "signatures")
        with progress.stage("signatures", sum(job.text_bytes for job in waiting)) as advance:
            workers.run(make_signatures, waiting, advance=advance)


def _build(asked: Asked, workers: Workers, progress: Progress) -> Built:
    planned = plan(asked, workers, progress)
    with progress.stage("encode", sum(job.text_bytes for job in planned.jobs)) as advance:
        entries = workers.run(make_shard, planned.jobs, advance=advance)
    for job, entry in zip(planned.jobs, entries):
        tally = planned.ledger.tally("encode", job.source)
        for amount in (tally.read, tally.kept, tally.written):
            amount.add(entry.text_bytes, entry.documents)
    planned.ledger.balance(chain=[*planned.chain, "encode"])
    return Built(**vars(planned), entries=entries)


def _used(built: Built) -> set[Path]:
    """What of the work folder the next build can use."""
    work = built.config.work_folder
    used = {part.path for part in (*built.originals.parts, *built.store.parts)}
    used |= {path for job in built.jobs for path in (job.path, job.done_path, Path(job.tokenizer_path))}
    used |= {path for task in built.tasks for path in (work / "documents" / f"{task.key}.json", dropped_path(work / "documents", task))}
    return used | {
        *contamination_files(built.config, built.tasks),
        *(path for key in built.edit_keys for path in work.glob(f"edited/{key}*")),
    }


def _where(config: DataConfig) -> list[str]:
    work = sum(path.stat().st_size for path in config.work_folder.rglob("*") if path.is_file())
    return [
        f"  {'where':<12}{config.folder}/report.html, {config.folder}/manifest.json",
        f"  {'':<12}{config.work_folder} ({size(work)}): makes the next build fast, safe to delete",
        f"  {'next':<12}mlite data inspect {config.folder}",
    ]
