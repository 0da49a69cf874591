"""The stages of a build up to the plan of its shards, each kept under a key of all that it depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.assemble import Planned, contamination_files
from data_pipeline.cache_key import cache_key
from data_pipeline.config import DataConfig
from data_pipeline.decontaminate.evidence import contamination_lines, read_evidence
from data_pipeline.decontaminate.stage import Search
from data_pipeline.dedup.edit import cut_repeats
from data_pipeline.dedup.signatures import signature_files
from data_pipeline.dedup.stage import count, deduplicate
from data_pipeline.earlier import Earlier, open_earlier
from data_pipeline.errors import ConfigError, Fault
from data_pipeline.fim import fim_of
from data_pipeline.ingest import ReadJob, ingest
from data_pipeline.inputs import ReadTask, find_inputs
from data_pipeline.pool import Workers
from data_pipeline.portion import ALL, Portion
from data_pipeline.progress import Progress
from data_pipeline.sharding import plan_shards
from data_pipeline.source_loss import check_losses
from data_pipeline.split import held_out
from data_pipeline.summary import dedup_line
from data_pipeline.tokenizer.stage import make_tokenizer, tokenizer_content


@dataclass(frozen=True)
class Asked:
    """A config with what there is to read for it. `key` names what comes out."""

    config: DataConfig
    tasks: list[ReadTask]
    earlier: Sequence[Earlier]
    search: Search | None
    tokenizer: dict[str, Any]  # what it is a function of

    @property
    def key(self) -> str:
        identities = [["earlier", [each.content for each in self.earlier]]] if self.earlier else []
        return cache_key("build", {**self.config.content(), "tokenizer": self.tokenizer}, [task.key for task in self.tasks], *identities)


def ask(config: DataConfig, workers: Workers, progress: Progress, *, portion: Portion = ALL) -> Asked:
    """Find the inputs, or a portion of them; raises ConfigError or DataError where something isn't there."""
    search = Search.of(config.decontaminate, config.normalise) if config.decontaminate is not None else None
    tasks = find_inputs(config, workers, progress, search=search, portion=portion)
    return Asked(config, tasks, _open_earlier(config), search, tokenizer_content(config.tokenizer))


def read_jobs(asked: Asked) -> list[ReadJob]:
    config = asked.config
    field = config.dedup.field if config.dedup is not None else None
    folder = config.work_folder / "documents"
    return [ReadJob(task, config.normalise, config.strict, folder, config.filters, field, asked.search) for task in asked.tasks]


def _open_earlier(config: DataConfig) -> list[Earlier]:
    paths = (config.dedup.earlier if config.dedup is not None else None) or []
    outputs = (config.output.rstrip("/"), config.folder.resolve())
    if own := [path for path in paths if path.rstrip("/") == outputs[0] or Path(path).resolve() == outputs[1]]:
        raise ConfigError(
            [Fault("dedup.earlier", own[0], "datasets other than the output", "choose another output: the earlier one stays")]
        )
    return open_earlier(paths)


def plan(asked: Asked, workers: Workers, progress: Progress) -> Planned:
    """Read, deduplicate, cut repeats, hold out, make the tokenizer; then which documents go into which shard."""
    config, tasks, earlier, search = asked.config, asked.tasks, asked.earlier, asked.search
    work = config.work_folder
    names = [source.name for source in config.sources]
    store, ledger = ingest(read_jobs(asked), workers=workers, progress=progress)
    contamination = []
    if search is not None:
        contamination = contamination_lines(search.index(), read_evidence(contamination_files(config, tasks)))
        for line in contamination:
            progress.say(line)
    document_keys = [task.key for task in tasks]
    duplicates = None
    kept = np.ones(store.num_documents, dtype=bool)
    chain = list(ledger.stages)
    if config.dedup is not None and (config.dedup.field is not None or config.dedup.exact or config.dedup.minhash is not None):
        settings = config.dedup.model_dump(
            mode="json", exclude={"lines": True, "substring": True, "earlier": True, "minhash": {"audit_documents"}}
        )
        compared = [[each.content for each in earlier]] if earlier else []
        path = work / "dedup" / f"{cache_key('dedup', settings, names, document_keys, *compared)}.duplicates"
        ready = signature_files(store, config.dedup.minhash, work / "signatures")
        duplicates = deduplicate(
            store, config.dedup, priorities=names, path=path, workers=workers, progress=progress, earlier=earlier, ready=ready
        )
        count(store, duplicates, ledger)
        kept = duplicates.kept(store.num_documents)
        chain.append("dedup")
        progress.say(dedup_line(duplicates.stats))
    originals = store
    edit_keys: dict[str, str] = {}
    for stage in ("lines", "substring"):
        if (cutting := getattr(config.dedup, stage, None)) is not None:
            edit_keys[stage] = cache_key(stage, cutting.model_dump(mode="json"), names, document_keys, _content(kept))
            store, kept = cut_repeats(
                store,
                kept,
                cutting,
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
    tokenizer_key = cache_key("tokenizer", asked.tokenizer, config.seed, config.validation.fraction, document_keys, _content(kept))
    tokenizer_path = work / "tokenizer" / f"{tokenizer_key}.json"
    facts = make_tokenizer(
        config.tokenizer,
        store,
        train,
        content=asked.tokenizer,
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
    edited = list(edit_keys.values())
    return Planned(config, asked.key, tasks, store, earlier, originals, edited, duplicates, facts, jobs, ledger, chain, contamination)


def _content(kept: np.ndarray) -> str:
    return np.packbits(kept).tobytes().hex() if kept.size < 4096 else cache_key("dedup", np.packbits(kept).tobytes().hex())
