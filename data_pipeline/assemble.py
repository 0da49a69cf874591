"""The last stage of a build: everything that the others made, put together as one dataset folder that appears by one rename."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.config import DataConfig, PackingConfig
from data_pipeline.dataset import Dataset
from data_pipeline.decontaminate.evidence import read_evidence, write_contamination
from data_pipeline.dedup.audit import audit
from data_pipeline.dedup.stage import Duplicates, listed
from data_pipeline.earlier import Earlier
from data_pipeline.ingest import contamination_path, dropped_path
from data_pipeline.inputs import ReadTask, describe_inputs
from data_pipeline.manifest import Manifest, ShardEntry, SourceEntry, source_hash, write_manifest
from data_pipeline.report import write_report
from data_pipeline.report_facts import contamination_facts, duplicate_facts
from data_pipeline.sharding import ShardJob
from data_pipeline.shards import token_dtype
from data_pipeline.step import Ledger
from data_pipeline.storage import atomic_folder
from data_pipeline.store import DocumentStore
from data_pipeline.summary import pair_plan_line, plan_line, summary_lines
from data_pipeline.tokenizer.facts import TokenizerFacts


@dataclass(frozen=True)
class Planned:
    """All that is known before texts become tokens. `originals`: the documents as dedup saw them, before repeats were cut out; `chain`: the
    stages so far that the ledger balances over; `contamination`: a line for each evaluation."""

    config: DataConfig
    key: str
    tasks: list[ReadTask]
    store: DocumentStore
    earlier: Sequence[Earlier]
    originals: DocumentStore
    edit_keys: list[str]
    duplicates: Duplicates | None
    facts: TokenizerFacts
    jobs: list[ShardJob]
    ledger: Ledger
    chain: list[str]
    contamination: list[str]


@dataclass(frozen=True)
class Built(Planned):
    """What the last stage puts together."""

    entries: list[ShardEntry]


def assemble(built: Built, *, replace: bool) -> None:
    """The whole folder beside its place, then one rename."""
    with atomic_folder(built.config.folder, replace=replace) as folder:
        (folder / "shards").mkdir()
        for job in built.jobs:
            _link(job.path, folder / "shards" / job.name)
        facts = built.facts
        (folder / "tokenizer.json").write_text(facts.json_text, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(facts.config_json(), encoding="utf-8")
        np.save(folder / "token_bytes.npy", facts.token_bytes)
        _write_dropped(built, folder)
        if built.config.decontaminate is not None:
            write_contamination(folder, contamination_files(built.config, built.tasks))
        if built.duplicates is not None:
            with open(folder / "duplicates.jsonl", "w", encoding="utf-8") as file:
                for line in listed(built.store, built.duplicates, built.earlier):
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
            built.store.release()
        manifest = _manifest(built)
        write_manifest(folder, manifest)
        dataset = Dataset.open(folder)
        plans = make_plans(dataset, built.config.packing)
        asked = built.config.tokenizer.vocab_size if facts.type == "bpe" else None
        summary = summary_lines(dataset, plans, asked_vocab=asked)
        write_report(folder, dataset, summary, title=built.config.name, build=_build_facts(built))


def _build_facts(built: Built) -> dict[str, Any]:
    """What the report shows and the dataset folder doesn't say."""
    facts: dict[str, Any] = {}
    if (duplicates := built.duplicates) is not None:
        facts["duplicates"] = duplicate_facts(built.originals, duplicates, built.earlier)
        dedup = built.config.dedup
        if dedup is not None and dedup.minhash is not None and (found := audit(built.originals, duplicates, dedup.minhash)) is not None:
            facts["near_dedup_audit"] = found.to_dict()
    if built.config.decontaminate is not None:
        facts["contamination"] = contamination_facts(read_evidence(contamination_files(built.config, built.tasks)), built.contamination)
    return facts


def _write_dropped(built: Built, folder: Path) -> None:
    """dropped/SOURCE-00000.jsonl.zst, ...: what the filters dropped, a file for each read task."""
    if built.config.filters is None or not built.config.filters.write_dropped:
        return
    (folder / "dropped").mkdir()
    numbers: Counter[str] = Counter()
    for task in built.tasks:
        name = task.source.name
        _link(dropped_path(built.config.work_folder / "documents", task), folder / "dropped" / f"{name}-{numbers[name]:05d}.jsonl.zst")
        numbers[name] += 1


def contamination_files(config: DataConfig, tasks: Sequence[ReadTask]) -> list[Path]:
    return [contamination_path(config.work_folder / "documents", task) for task in tasks]


def _manifest(built: Built) -> Manifest:
    facts = built.facts
    sources: list[SourceEntry] = []
    for name in [source.name for source in built.config.sources]:
        for split in ("train", "validation"):
            shards = tuple(entry for job, entry in zip(built.jobs, built.entries) if (job.source, job.split) == (name, split))
            if shards:
                digest = source_hash(name, split, shards, tokenizer_hash=facts.vocabulary.tokenizer_hash)
                pairs = any(job.pairs for job in built.jobs if job.source == name)
                sources.append(SourceEntry(name=name, split=split, shards=shards, hash=digest, pairs=pairs))
    return Manifest(
        vocabulary=facts.vocabulary,
        tokenizer=facts.to_manifest(),
        dtype=token_dtype(facts.vocabulary.size - 1).str,
        sources=tuple(sources),
        ledger=built.ledger.to_dict(),
        config={"build_key": built.key, **built.config.content(), "inputs": describe_inputs(built.tasks)},
    )


def _link(source: Path, target: Path) -> None:
    """The same bytes under another name; copied where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def make_plans(dataset: Dataset, packing: Sequence[PackingConfig]) -> list[str]:
    """Make the packing plans that are missing; a line about each."""
    lines = []
    for plan in packing:
        for source in [*dataset.sources, *dataset.validation]:
            if plan.sequence_length is not None:
                made = source.plan(plan.sequence_length, plan.method)
                lines.append(plan_line(source, made, sequence_length=plan.sequence_length, method=plan.method))
            elif plan.source_length is not None and plan.target_length is not None:
                lines.append(pair_plan_line(source, source.pair_plan(plan.source_length, plan.target_length)))
    return lines
