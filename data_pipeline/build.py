"""Raw text to a dataset folder: the stages in order, each kept under a key of all that it depends on.

Killed at any moment and started again, a build goes on and ends with the same bytes; so it does with any number of
workers. The dataset appears as a whole, by one rename, and nothing in it says when or where it was built.
"""

from __future__ import annotations

import fcntl
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.assemble import Built, assemble, contamination_files, make_plans
from data_pipeline.cache_key import cache_key
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.decontaminate.evidence import contamination_lines, read_evidence
from data_pipeline.decontaminate.stage import Search
from data_pipeline.dedup.edit import cut_repeats
from data_pipeline.dedup.stage import count, deduplicate
from data_pipeline.earlier import Earlier, open_earlier
from data_pipeline.errors import ConfigError, DataError, Fault, RunInUseError
from data_pipeline.fim import fim_of
from data_pipeline.ingest import dropped_path, ingest
from data_pipeline.inputs import ReadTask, find_inputs, unpinned
from data_pipeline.pool import Workers, started
from data_pipeline.progress import Progress, duration, size
from data_pipeline.sharding import make_shard, plan_shards
from data_pipeline.source_loss import check_losses, check_stored_losses
from data_pipeline.split import held_out
from data_pipeline.storage import remove_leftovers
from data_pipeline.summary import dedup_line, summary_lines
from data_pipeline.tokenizer.stage import make_tokenizer, tokenizer_content


def build(config: DataConfig, *, quiet: bool = False, replace: bool = False) -> Dataset:
    """Build the dataset, or finish a build that was killed, or find that it is there already. `replace`: a different
    dataset in the output folder gives way once the new one is complete.

    Raises ConfigError where the output holds something else, DataError where the text can't be used, RunInUseError while
    another build of the same output runs.
    """
    progress = Progress(quiet=quiet)
    begin = time.monotonic()
    with _lock(config.work_folder), started(config.workers) as workers:
        remove_leftovers(config.folder)
        search = Search.of(config.decontaminate, config.normalise) if config.decontaminate is not None else None
        tasks = find_inputs(config, workers, progress, search=search)
        earlier = _open_earlier(config)
        identities = [["earlier", [each.content for each in earlier]]] if earlier else []
        tokenizer = tokenizer_content(config.tokenizer)
        key = cache_key("build", {**config.content(), "tokenizer": tokenizer}, [task.key for task in tasks], *identities)
        ready = _ready(config.folder, key, replace=replace)
        if ready is None:
            built = _stages(config, tasks, key, tokenizer, workers, progress, earlier, search)
            workers.close()  # nothing below needs them, nor the memory that they hold
            assemble(built, replace=replace)
            _prune(built)
        else:
            check_stored_losses(ready.manifest.ledger, limit=config.max_source_loss, progress=progress)
        dataset = Dataset.open(config.folder)
        plans = make_plans(dataset, config.packing)
    if ready is not None:
        progress.say(f"{config.folder} is up to date: the same config and the same input files made it")
        if names := unpinned(tasks):
            progress.say(f"  {', '.join(names)} may hold other text by now: with `revision` in its source a build reads what you name")
    else:
        progress.say(f"\n{config.folder} is ready after {duration(time.monotonic() - begin)}")
    asked = config.tokenizer.vocab_size if config.tokenizer.type == "bpe" else None
    for line in [*summary_lines(dataset, plans, asked_vocab=asked), *_where(config)]:
        progress.say(line)
    return dataset


def _open_earlier(config: DataConfig) -> list[Earlier]:
    paths = (config.dedup.earlier if config.dedup is not None else None) or []
    if own := [path for path in paths if Path(path).resolve() == config.folder.resolve()]:
        raise ConfigError(
            [Fault("dedup.earlier", own[0], "datasets other than the output", "choose another output: the earlier one stays")]
        )
    return open_earlier(paths)


def _stages(
    config: DataConfig,
    tasks: list[ReadTask],
    key: str,
    tokenizer: dict[str, Any],
    workers: Workers,
    progress: Progress,
    earlier: Sequence[Earlier],
    search: Search | None,
) -> Built:
    work = config.work_folder
    names = [source.name for source in config.sources]
    store, ledger = ingest(
        tasks,
        normalise=config.normalise,
        strict=config.strict,
        folder=work / "documents",
        workers=workers,
        progress=progress,
        filters=config.filters,
        dedup_field=config.dedup.field if config.dedup is not None else None,
        decontaminate=search,
    )
    if search is not None:
        for line in contamination_lines(search.index(), read_evidence(contamination_files(config, tasks))):
            progress.say(line)
    document_keys = [task.key for task in tasks]
    duplicates = None
    kept = np.ones(store.num_documents, dtype=bool)
    chain = list(ledger.stages)
    if config.dedup is not None and (config.dedup.field is not None or config.dedup.exact or config.dedup.minhash is not None):
        settings = config.dedup.model_dump(mode="json", exclude={"lines", "substring", "earlier"})
        compared = [[each.content for each in earlier]] if earlier else []
        path = work / "dedup" / f"{cache_key('dedup', settings, names, document_keys, *compared)}.duplicates"
        duplicates = deduplicate(store, config.dedup, priorities=names, path=path, workers=workers, progress=progress, earlier=earlier)
        count(store, duplicates, ledger)
        kept = duplicates.kept(store.num_documents)
        chain.append("dedup")
        progress.say(dedup_line(duplicates.stats))
    originals = [part.path for part in store.parts]
    edit_keys: dict[str, str] = {}
    for stage in ("lines", "substring"):
        if (asked := getattr(config.dedup, stage, None)) is not None:
            edit_keys[stage] = cache_key(stage, asked.model_dump(mode="json"), names, document_keys, _content(kept))
            store, kept = cut_repeats(
                store,
                kept,
                asked,
                stage=stage,
                priorities=names,
                key=edit_keys[stage],
                folder=work / "edited",
                workers=workers,
                progress=progress,
                ledger=ledger,
            )
            document_keys.append(edit_keys[stage])
            chain.append(stage)
    check_losses(ledger, chain, limit=config.max_source_loss, progress=progress)
    validation = held_out(store.keys(), kept, fraction=config.validation.fraction, seed=config.seed)
    train = kept & ~validation
    tokenizer_key = cache_key("tokenizer", tokenizer, config.seed, config.validation.fraction, document_keys, _content(kept))
    tokenizer_path = work / "tokenizer" / f"{tokenizer_key}.json"
    facts = make_tokenizer(
        config.tokenizer,
        store,
        train,
        content=tokenizer,
        seed=config.seed,
        path=tokenizer_path,
        workers=config.workers,
        progress=progress,
    )
    jobs = plan_shards(
        store,
        kept,
        validation,
        sources=names,
        vocabulary=facts.vocabulary,
        tokenizer_path=tokenizer_path,
        tokenizer_type=facts.type,
        folder=work / "shards",
        fim=fim_of(config.fim, tokenizer_json=facts.json_text, seed=config.seed),
        fim_sources=config.fim.sources if config.fim is not None else None,
    )
    with progress.stage("encode", sum(job.text_bytes for job in jobs)) as advance:
        entries = workers.run(make_shard, jobs, advance=advance)
    for job, entry in zip(jobs, entries):
        tally = ledger.tally("encode", job.source)
        for amount in (tally.read, tally.kept, tally.written):
            amount.add(entry.text_bytes, entry.documents)
    ledger.balance(chain=[*chain, "encode"])
    return Built(config, key, tasks, store, earlier, originals, list(edit_keys.values()), duplicates, facts, jobs, entries, ledger)


def _content(kept: np.ndarray) -> str:
    return np.packbits(kept).tobytes().hex() if kept.size < 4096 else cache_key("dedup", np.packbits(kept).tobytes().hex())


# ------------------------------------------------------------------------------------------------ the folder


def _ready(folder: Path, key: str, *, replace: bool) -> Dataset | None:
    """The finished dataset of this key, None where the place is free (or to be freed). Raises ConfigError otherwise."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        if folder.exists():
            folder.rmdir()
        return None
    try:
        dataset = Dataset.open(folder)
    except DataError:
        if (folder / "manifest.json").exists() and replace:
            return None
        raise ConfigError(
            [
                Fault(
                    "output",
                    str(folder),
                    "a folder that doesn't exist yet, or a dataset of ours",
                    "choose another output, or move the folder away",
                )
            ]
        ) from None
    if dataset.manifest.config.get("build_key") == key:
        return dataset
    if replace:
        return None
    raise ConfigError(
        [
            Fault(
                "output",
                str(folder),
                "a place for this dataset",
                "another config, or other input files, made the dataset there: choose another output, or add --replace",
            )
        ]
    )


@contextmanager
def _lock(work: Path) -> Iterator[None]:
    """Hold the work folder; a dead build's hold is gone with it. What killed writers left there is removed."""
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunInUseError(f"another build is writing {work}: wait for it, or choose another output") from None
        for path in [*work.glob(".*.tmp-*"), *work.glob("*/.*.tmp-*")]:
            path.unlink(missing_ok=True)
        yield


def _prune(built: Built) -> None:
    """Delete work of other configs, so that the work folder stays as large as one build needs."""
    used = (
        {*built.originals, *(part.path for part in built.store.parts)}
        | {job.path for job in built.jobs}
        | {job.done_path for job in built.jobs}
    )
    used |= {built.config.work_folder / "documents" / f"{task.key}.json" for task in built.tasks}
    used |= {dropped_path(built.config.work_folder / "documents", task) for task in built.tasks}
    used |= {*contamination_files(built.config, built.tasks), *(Path(job.tokenizer_path) for job in built.jobs)}
    used |= {path for key in built.edit_keys for path in built.config.work_folder.glob(f"edited/{key}*")}
    for stage in ("documents", "edited", "tokenizer", "shards"):
        for path in (built.config.work_folder / stage).glob("*"):
            if path not in used:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _where(config: DataConfig) -> list[str]:
    work = sum(path.stat().st_size for path in config.work_folder.rglob("*") if path.is_file())
    return [
        f"  {'where':<12}{config.folder}/report.html, {config.folder}/manifest.json",
        f"  {'':<12}{config.work_folder} ({size(work)}): makes the next build fast, safe to delete",
        f"  {'next':<12}mlite data inspect {config.folder}",
    ]
