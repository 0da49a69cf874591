"""`report.html` of a dataset: one page without anything to fetch, the same bytes for the same dataset."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.dedup.stage import Duplicates
from data_pipeline.fim import fim_of_dataset, text_tokens
from data_pipeline.step import Ledger
from data_pipeline.tokenizer.encode import Encoder

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0}td,th{padding:.15rem .8rem;border-bottom:1px solid #ddd;text-align:right}
td:first-child,th:first-child{text-align:left}pre{background:#f6f6f6;padding:.8rem;overflow-x:auto;white-space:pre-wrap}
.bar{background:#4a7ebb;height:.8rem;display:inline-block}"""


def write_report(path: Path, dataset: Dataset, duplicates: Duplicates | None, summary: Sequence[str], *, title: str) -> None:
    sections = [
        f"<h1>{html.escape(title)}</h1><pre>{html.escape(chr(10).join(summary))}</pre>",
        _ledger(Ledger.from_dict(dataset.manifest.ledger)),
        *(_source(source) for source in [*dataset.sources, *dataset.validation]),
        _dedup(duplicates) if duplicates is not None else "",
        _samples(dataset),
        f"<h2>Config</h2><pre>{html.escape(_yaml(dataset.manifest.config))}</pre>",
    ]
    page = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>{"".join(sections)}</html>\n'
    path.write_text(page, encoding="utf-8")


def _ledger(ledger: Ledger) -> str:
    """read = kept + dropped + errors, stage by stage and source by source."""
    rows = []
    for stage, sources in ledger.stages.items():
        for source, tally in sorted(sources.items()):
            gone = [f"{reason} {count.documents:,}" for reason, count in sorted({**tally.errors, **tally.dropped}.items())]
            notes = [f"{kind} {number:,}" for kind, number in sorted(tally.notes.items())]
            rows.append(
                [
                    stage,
                    source,
                    f"{tally.read.documents:,}",
                    f"{tally.kept.documents:,}",
                    ", ".join(gone) or "0",
                    ", ".join(notes),
                    f"{tally.written.bytes:,}",
                ]
            )
            rows += [["", "", "", "", f"{kind}: {place}", "", ""] for kind, places in sorted(tally.examples.items()) for place in places]
    return "<h2>Books</h2>" + _table(["stage", "source", "read", "kept", "dropped or not readable", "repaired", "bytes passed on"], rows)


def _source(source: TokenSource) -> str:
    lengths = source.lengths()
    rows = [["documents", f"{source.num_documents:,}"], ["tokens", f"{source.num_tokens:,}"], ["hash", source.hash[:16]]]
    rows += [
        [f"{name} tokens a document", f"{int(value):,}"]
        for name, value in zip(("median", "90 %", "longest"), np.quantile(lengths, [0.5, 0.9, 1.0]))
    ]
    edges = 2 ** np.arange(0, int(lengths.max()).bit_length() + 1)
    counts, _ = np.histogram(lengths, bins=edges)
    bars = [
        [f"{low:,} to {high - 1:,}", f"{number:,}", f'<span class="bar" style="width:{300 * number // max(counts.max(), 1)}px"></span>']
        for low, high, number in zip(edges, edges[1:], counts)
        if number
    ]
    return (
        f"<h2>{html.escape(source.name)}, {source.split}</h2>"
        + _table(["", ""], rows)
        + _table(["tokens", "documents", ""], bars, raw=True)
    )


def _dedup(duplicates: Duplicates) -> str:
    rows = [
        [name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4f}"] for name, value in duplicates.stats.items()
    ]
    near = duplicates.removals[duplicates.removals["reason"] == 1]["jaccard"]
    if near.size:
        rows.append(["Jaccard of near duplicates: least, median", f"{near.min():.3f}, {np.median(near):.3f}"])
    return "<h2>Duplicates</h2>" + _table(["", ""], rows) + "<p>Each removed document and the one that stayed: duplicates.jsonl</p>"


def _samples(dataset: Dataset) -> str:
    encoder, fim = Encoder.open(dataset.tokenizer_path), fim_of_dataset(dataset)
    shown = []
    for source in dataset.sources:
        for number in sorted({0, source.num_documents // 2, source.num_documents - 1}):
            shard, inside = source.find(number)
            file, record = shard.origin(inside)
            text = encoder.decode(text_tokens(shard.document(inside), fim)[:200].tolist())
            shown.append(f"<p>{html.escape(source.name)}, {html.escape(file)}:{record}</p><pre>{html.escape(text[:600])}</pre>")
    return "<h2>Samples, decoded from the shards</h2>" + "".join(shown)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, raw: bool = False) -> str:
    cells = ["".join(f"<td>{cell if raw else html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table><tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _yaml(tree: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
