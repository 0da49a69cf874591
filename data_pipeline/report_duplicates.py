"""The report's sections on duplicates, on how well they were found, and on what evaluations were found in the text."""

from __future__ import annotations

import html
from typing import Any

from data_pipeline.report_parts import bars, details, section, table


def duplicates(facts: dict[str, Any]) -> str:
    found = facts.get("duplicates")
    if found is None:
        return ""
    stats = [
        [name.replace("_", " "), f"{value:,}" if isinstance(value, int) else f"{value:.4f}"]
        for name, value in sorted(found["stats"].items())
    ]
    drawn = table(["counted", ""], stats)
    if found["jaccard_of_near"]:
        rows = [
            (f"{each['from']:.2f} to {each['to']:.2f}", each["documents"], f"{each['documents']:,}", "")
            for each in found["jaccard_of_near"]
        ]
        drawn += "<h3>Near duplicates by their Jaccard similarity to the one that stayed</h3>" + bars(rows)
    if (audit := facts.get("near_dedup_audit")) is not None:
        drawn += _audit(audit)
    if found["clusters"]:
        sizes = [
            (_span(each["from"], each["to"]) + " documents", each["clusters"], f"{each['clusters']:,}", "")
            for each in found["cluster_sizes"]
        ]
        drawn += f"<h3>{found['clusters']:,} clusters, by size</h3>" + bars(sizes)
        drawn += "<h3>The largest</h3>" + "".join(map(_cluster, found["largest_clusters"]))
    return section("Duplicates", drawn + "<p>Each removed document and the one that stayed: duplicates.jsonl</p>")


def _audit(audit: dict[str, Any]) -> str:
    def share(name: str) -> str:
        return "no such pair" if audit[name] is None else f"{100 * audit[name]:.2f} %"

    expected = "" if audit["expected_recall"] is None else f"{100 * audit['expected_recall']:.2f} %"
    rows = [
        ["recall: similar pairs that MinHash looked at", f"{audit['found']:,} of {audit['similar']:,}", share("recall"), expected],
        ["precision of its bands, before verifying", f"{audit['found']:,} of {audit['looked_at']:,}", share("precision_of_bands"), ""],
        [
            "precision: removed as near, and similar enough to the one that stayed",
            f"{audit['removed'] - audit['removed_wrongly']:,} of {audit['removed']:,}",
            share("precision"),
            "100.00 %",
        ],
        ["similar pairs of which both stayed", f"{audit['left']:,}", "", ""],
    ]
    said = (
        f"<p>{audit['documents']:,} of {audit['of_documents']:,} documents, chosen by a hash of their text: all {audit['pairs']:,} pairs compared by "
        f"their true Jaccard similarity; similar means {audit['threshold']:g} or more. Exact copies are left out.</p>"
    )
    missed = "".join(
        f'<p class="where">{" and ".join(html.escape(_where(each)) for each in example["documents"])}: {example["jaccard"]}</p>'
        for example in audit["missed_examples"]
    )
    drawn = table(["measured", "", "share", "expected"], rows, wrap={0}) + (details("Pairs that were missed", missed) if missed else "")
    return "<h3>How well near duplicates were found</h3>" + said + drawn


def _cluster(cluster: dict[str, Any]) -> str:
    kept = cluster["kept"]
    text = "in an earlier dataset" if kept["text"] is None else kept["text"]
    others = cluster["removed"] - len(cluster["examples"])
    inside = f'<p class="where">stayed: {html.escape(_where(kept))}</p><pre>{html.escape(text)}</pre>'
    for copy in cluster["examples"]:
        alike = "" if copy["jaccard"] is None or copy["reason"] != "near" else f", Jaccard {copy['jaccard']:.3f}"
        how = "exact copy of one that went as near" if copy["reason"] == "exact" and not copy["same_text"] else copy["reason"]
        inside += f'<p class="where">went ({how}{alike}): {html.escape(_where(copy))}'
        if copy["in_kept"] is not None:
            inside += (
                f"; from character {copy['from_character']:,} on, first the one that stayed</p><pre>{html.escape(copy['in_kept'])}</pre>"
            )
        else:
            inside += "</p>"
        inside += "" if copy["same_text"] else f"<pre>{html.escape(copy['text'])}</pre>"
    more = f"<p>and {others:,} more</p>" if others else ""
    return f'<div class="box"><p><b>{cluster["removed"]:,} went for one</b></p>{inside}{more}</div>'


def contamination(facts: dict[str, Any]) -> str:
    found = facts.get("contamination")
    if found is None:
        return ""
    drawn = "".join(f"<p>{html.escape(line)}</p>" for line in found["summary"])
    for line in found["evidence"]:
        answer = ", with the answer" if line["answer"] else ""
        said = f"{line['evaluation']}, item {line['item']}, {line['field']}: {line['words']:,} of {line['of']:,} words{answer}"
        drawn += (
            f'<p class="where">{html.escape(said)}, in {html.escape(_where(line["document"]))}</p><pre>{html.escape(line["text"])}</pre>'
        )
    if found["lines"]:
        drawn += f"<p>All {found['lines']:,} findings: contamination.jsonl</p>"
    return section("Evaluations found in the text", drawn or "<p>None.</p>")


def _where(named: dict[str, Any]) -> str:
    dataset = f"{named['dataset']}: " if "dataset" in named else ""
    return f"{dataset}{named['source']}, {named['file']}:{named['record']}"


def _span(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"
