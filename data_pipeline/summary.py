"""What a build did, in numbers: for the terminal and for the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.pair_plans import PairPlan, left_out_words
from data_pipeline.plans import Plan
from data_pipeline.progress import size
from data_pipeline.step import Count, Ledger, Tally

STAGE_WORDS = {
    "read": "read",
    "normalise": "normalised",
    "filters": "filtered",
    "decontaminate": "decontaminated",
    "pii": "masked",
    "dedup": "deduplicated",
    "lines": "lines cut",
    "substring": "repeats cut",
    "encode": "encoded",
}


@dataclass(frozen=True)
class Loss:
    """Documents that went at one stage for one reason, and where the first of them stood."""

    stage: str
    reason: str
    count: Count
    is_error: bool
    examples: tuple[str, ...]


def losses(ledger: Ledger) -> list[Loss]:
    """Everything that was dropped or couldn't be read, in the order of the stages."""
    out = []
    for stage in ledger.stages:
        total = ledger.total(stage)
        for columns, is_error in ((total.errors, True), (total.dropped, False)):
            out += [
                Loss(stage, reason, count, is_error, tuple(total.examples.get(reason, ()))) for reason, count in sorted(columns.items())
            ]
    return out


def ends(ledger: Ledger) -> tuple[Tally, Tally]:
    """What the first stage received and what the last passed on."""
    stages = list(ledger.stages)
    return ledger.total(stages[0]), ledger.total(stages[-1])


def source_line(source: TokenSource) -> str:
    shards, what = len(source.entry.shards), "pairs" if source.pairs else "documents"
    ratio = source.text_bytes / max(source.num_tokens - source.num_documents * (1 + source.pairs), 1)
    return (
        f"{source.num_documents:,} {what}, {size(source.text_bytes)}, {source.num_tokens:,} tokens "
        f"({ratio:.2f} bytes a token), {shards} shard{'s' if shards != 1 else ''}"
    )


def plan_line(source: TokenSource, plan: Plan, *, sequence_length: int, method: str) -> str:
    padding = 100 * plan.num_padding_tokens / max(plan.num_rows * sequence_length, 1)
    return f"{source.name} {source.split}, S={sequence_length}, {method}: {plan.num_rows:,} rows, {padding:.2f} % padding, {plan.num_cuts:,} cuts inside documents"


def pair_plan_line(source: TokenSource, plan: PairPlan) -> str:
    one, other = plan.padding
    lengths = f"S={plan.meta['source_length']}, T={plan.meta['target_length']}"
    left_out = left_out_words(list(plan.left_out.items()))
    return f"{source.name} {source.split}, {lengths}: {plan.num_rows:,} rows of {plan.num_pairs / max(plan.num_rows, 1):.1f} pairs, padding {100 * one:.2f} % source, {100 * other:.2f} % target{left_out}"


def summary_lines(dataset: Dataset, plans: Sequence[str], *, asked_vocab: int | None) -> list[str]:
    """The books and what came of them; a table of documents and bytes, then one line a thing."""
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    lines: list[str] = []
    if ledger.stages:
        first, last = ends(ledger)
        lines.append(_row("read", first.read))
        for loss in losses(ledger):
            word = "can't be read" if loss.is_error else STAGE_WORDS.get(loss.stage, loss.stage)
            where = f"   first: {loss.examples[0]}" if loss.examples else ""
            lines.append(_row(f"- {loss.reason.replace('_', ' ')}", loss.count) + f"   {word}{where}")
        changed = first.read.bytes - last.written.bytes - sum(loss.count.bytes for loss in losses(ledger))
        if changed:
            name = (
                "- edited away" if {"filters", "pii", "decontaminate", "lines", "substring"} & set(ledger.stages) else "- normalised away"
            )
            lines.append(f"  {name:<24}{'':>14}{size(abs(changed)) if changed > 0 else '-' + size(-changed):>12}")
        lines.append(_row("kept", last.written))
    lines += [f"  {'' if n else 'train':<12}{source.name}: {source_line(source)}" for n, source in enumerate(dataset.sources)]
    lines += [f"  {'' if n else 'held out':<12}{source.name}: {source_line(source)}" for n, source in enumerate(dataset.validation)]
    tokenizer = dataset.manifest.tokenizer
    fewer = (
        f" ({asked_vocab:,} were asked for; the text has no more pairs to merge)"
        if asked_vocab and asked_vocab != dataset.vocab_size
        else ""
    )
    lines.append(
        f"  {'tokenizer':<12}{tokenizer['type']}, {dataset.vocab_size:,} ids{fewer}, stored as {np.dtype(dataset.manifest.dtype).name}"
    )
    lines += [f"  {'' if n else 'packing':<12}{line}" for n, line in enumerate(plans)]
    return lines


def _row(name: str, count: Count) -> str:
    return f"  {name:<24}{count.documents:>10,} documents{size(count.bytes):>12}"


def dedup_line(stats: dict[str, Any]) -> str:
    """The chance that a pair at the threshold is looked at, and the work done."""
    caught = stats.get("catch_probability_at_threshold")
    chance = f"; a pair at the threshold is looked at with probability {caught:.3f}" if caught is not None else ""
    field = f"{stats['field']:,} by field, " if "field" in stats else ""
    documents = stats["documents"] + stats.get("field", 0)  # texts are compared of those only that stay by their field
    return f"dedup: {field}{stats['exact']:,} exact and {stats.get('near', 0):,} near duplicates of {documents:,} documents{chance}"
