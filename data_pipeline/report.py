"""`report.html` of a dataset: one page without anything to fetch, the same bytes for the same dataset. Everything that it shows is in
`report.json` beside it, from which it is drawn."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.dataset import Dataset
from data_pipeline.pair_packing import TOO_LONG
from data_pipeline.progress import size
from data_pipeline.report_duplicates import contamination, duplicates
from data_pipeline.report_facts import dataset_facts
from data_pipeline.report_parts import STYLE, bars, details, notice, percent, section, table, tiles


def write_report(folder: Path, dataset: Dataset, summary: Sequence[str], *, title: str, build: dict[str, Any] | None = None) -> None:
    """report.json and report.html in the folder. `build`: what only the build knows, under "duplicates", "near_dedup_audit" and
    "contamination"."""
    facts = {"title": title, "summary": list(summary), **dataset_facts(dataset), **(build or {})}
    (folder / "report.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "report.html").write_text(page(facts), encoding="utf-8")


def page(facts: dict[str, Any]) -> str:
    title = html.escape(facts["title"])
    drawn = "".join(draw(facts) for draw in _SECTIONS)
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    return f'<!doctype html><html lang="en">{head}<title>{title}</title><style>{STYLE}</style><main><h1>{title}</h1>{drawn}</main></html>\n'


def _overview(facts: dict[str, Any]) -> str:
    train = [source for source in facts["sources"] if source["split"] == "train"]
    numbers = [
        ("documents to train on", f"{sum(source['documents'] for source in train):,}"),
        ("tokens to train on", f"{sum(source['tokens'] for source in train):,}"),
        ("held-out documents", f"{sum(source['documents'] for source in facts['sources'] if source['split'] != 'train'):,}"),
        ("token ids", f"{facts['tokenizer']['vocab_size']:,}"),
    ]
    if (flow := facts["funnel"]) and flow[0]["documents"]:
        numbers.insert(0, ("of the documents stayed", percent(flow[-1]["documents"] / flow[0]["documents"])))
    return tiles(numbers) + details("In words", f"<pre>{html.escape(chr(10).join(facts['summary']))}</pre>")


def _alarms(facts: dict[str, Any]) -> str:
    sources, above = facts["source_loss"]["sources"], facts["source_loss"]["alarm_above"]
    if not sources:
        return ""
    alarms = [source for source in sources if source["alarm"]]
    rows = [[source["source"], percent(source["share"]), source["why"] or "nothing"] for source in sources]
    said = (
        notice([f"{source['source']} lost {percent(source['share'])} of its text: {source['why']}" for source in alarms])
        if alarms
        else f"<p>No source lost more than {percent(above)} of its documents or of its text.</p>"
    )
    return section("Source loss", said + table(["source", "lost", "most by"], rows, wrap={2}))


def _funnel(facts: dict[str, Any]) -> str:
    if not facts["funnel"]:
        return ""
    rows = [(step["words"], step["documents"], f"{step['documents']:,}", size(step["bytes"])) for step in facts["funnel"]]
    return section("From files to tokens", "<p>Documents and bytes of text that are left after each stage.</p>" + bars(rows))


def _lost(facts: dict[str, Any]) -> str:
    if not facts["lost"]:
        return section("What was dropped", "<p>Nothing.</p>") if facts["funnel"] else ""
    rows = [
        (f"{row['reason'].replace('_', ' ')} ({row['stage']})", row["documents"], f"{row['documents']:,}", size(row["bytes"]))
        for row in facts["lost"]
    ]
    names = sorted({source for row in facts["lost"] for source in row["by_source"]})
    by_source = [
        [
            row["reason"].replace("_", " "),
            row["stage"],
            *(f"{row['by_source'].get(name, 0):,}" for name in names),
            "; ".join(row["examples"]),
        ]
        for row in facts["lost"]
    ]
    return section(
        "What was dropped",
        bars(rows[:20])
        + details("By source, with places", table(["reason", "stage", *names, "first places"], by_source, left={1}, wrap={len(names) + 2})),
    )


def _sources(facts: dict[str, Any]) -> str:
    quantiles = list(facts["sources"][0]["tokens_a_document"]) if facts["sources"] else []
    rows = [
        [
            source["name"],
            source["split"],
            f"{source['documents']:,}",
            size(source["text_bytes"]),
            f"{source['tokens']:,}",
            f"{source['text_bytes'] / max(source['tokens'] - source['documents'] * (1 + source['pairs']), 1):.2f}",
            f"{source['shards']:,}",
            source["hash"][:12],
        ]
        for source in facts["sources"]
    ]
    lengths = [[f"{s['name']}, {s['split']}", *(f"{s['tokens_a_document'][name]:,}" for name in quantiles)] for s in facts["sources"]]
    head = ["source", "split", "documents", "text", "tokens", "bytes a token", "shards", "hash"]
    drawn = "".join(map(_lengths, facts["sources"]))
    return section("Sources", table(head, rows, left={1}) + table(["tokens a document", *quantiles], lengths) + drawn)


def _lengths(source: dict[str, Any]) -> str:
    """Histograms: of documents; of pairs, one for each side."""
    name = f"{html.escape(source['name'])}, {source['split']}"
    if not source["pairs"]:
        return f"<h3>{name}: tokens a document</h3>" + _histogram(source["lengths"])
    return "".join(f"<h3>{name}: tokens of the {side} side</h3>{_histogram(bins)}" for side, bins in source["sides"].items())


def _histogram(bins: Sequence[dict[str, int]]) -> str:
    total = max(sum(each["tokens"] for each in bins), 1)
    return bars(
        (f"{each['from']:,} to {each['to']:,}", each["documents"], f"{each['documents']:,}", f"{percent(each['tokens'] / total)} of tokens")
        for each in bins
    )


def _packing(facts: dict[str, Any]) -> str:
    if not facts["packing"]:
        return ""
    documents = [plan for plan in facts["packing"] if "sequence_length" in plan]
    rows = [
        [
            plan["source"],
            plan["split"],
            f"{plan['sequence_length']:,}",
            plan["method"],
            f"{plan['num_rows']:,}",
            _share(plan["num_padding_tokens"], plan["num_rows"] * plan["sequence_length"]),
            f"{plan['num_cuts']:,}",
        ]
        for plan in documents
    ]
    drawn = (
        table(["source", "split", "targets a row", "method", "rows", "padding", "cuts inside documents"], rows, left={1, 3}) if rows else ""
    )
    pairs = [plan for plan in facts["packing"] if "source_length" in plan]
    rows = [
        [
            plan["source"],
            plan["split"],
            f"{plan['source_length']:,} and {plan['target_length']:,}",
            f"{plan['num_rows']:,}",
            f"{plan['num_pairs']:,}",
            _share(plan["num_rows"] * plan["source_length"] - plan["num_source_tokens"], plan["num_rows"] * plan["source_length"]),
            _share(plan["num_rows"] * plan["target_length"] - plan["num_targets"], plan["num_rows"] * plan["target_length"]),
            *(f"{plan[reason]:,}" for reason in TOO_LONG),
        ]
        for plan in pairs
    ]
    head = ["source", "split", "room for source and targets", "rows", "pairs", "padding of source", "of targets"]
    drawn += table([*head, *(f"left out: {reason.replace('_', ' ')}" for reason in TOO_LONG)], rows, left={1}) if rows else ""
    return section("Packing", drawn)


def _share(padding: int, places: int) -> str:
    return f"{100 * padding / max(places, 1):.3f} %"


def _books(facts: dict[str, Any]) -> str:
    """read = kept + dropped + errors, stage by stage and source by source."""
    rows = []
    for stage, sources in facts["books"].items():
        for source, tally in sorted(sources.items()):
            gone = sorted({**tally["errors"], **tally["dropped"]}.items())
            rows.append(
                [
                    stage,
                    source,
                    f"{tally['read']['documents']:,}",
                    f"{tally['kept']['documents']:,}",
                    ", ".join(f"{reason} {count['documents']:,}" for reason, count in gone) or "0",
                    ", ".join(f"{kind} {number:,}" for kind, number in tally["notes"].items()),
                    f"{tally['written']['bytes']:,}",
                ]
            )
    head = ["stage", "source", "read", "kept", "dropped or not readable", "repaired", "bytes passed on"]
    return section("Books", table(head, rows, left={1}, wrap={4, 5})) if rows else ""


def _samples(facts: dict[str, Any]) -> str:
    shown = [
        f'<p class="where">{html.escape(s["source"])}, {html.escape(s["file"])}:{s["record"]}, {s["id"]}</p><pre>{html.escape(s["text"])}</pre>'
        for s in facts["samples"]
    ]
    return section("Samples, decoded from the shards", "".join(shown))


def _config(facts: dict[str, Any]) -> str:
    import yaml

    text = yaml.safe_dump(facts["config"], sort_keys=False, allow_unicode=True)
    return section("Config", details("Show", f"<pre>{html.escape(text)}</pre>"))


_SECTIONS: Iterable[Callable[[dict[str, Any]], str]] = (
    _overview,
    _alarms,
    _funnel,
    _lost,
    _sources,
    duplicates,
    contamination,
    _packing,
    _books,
    _samples,
    _config,
)
