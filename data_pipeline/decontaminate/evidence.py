"""What decontamination found, by item and by span, for people to read and to count."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from data_pipeline.decontaminate.find import Overlap
from data_pipeline.decontaminate.index import Index
from data_pipeline.document import Document
from data_pipeline.storage import atomic_write

_SHOWN_CHARS = 300


class EvidenceWriter(AbstractContextManager["EvidenceWriter"]):
    """contamination.jsonl: a line for each item that a document holds a part of. The file appears at the end, as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> EvidenceWriter:
        self._atomic = atomic_write(self.path)
        self._file = self._atomic.__enter__()
        return self

    def add(self, document: Document, overlaps: list[Overlap], spans: list[tuple[int, int]], index: Index) -> None:
        for line in evidence(document, overlaps, spans, index):
            self._file.write(_encoded(line))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._atomic.__exit__(kind, error, trace)


def evidence(document: Document, overlaps: list[Overlap], spans: list[tuple[int, int]], index: Index) -> Iterator[dict[str, Any]]:
    """For people to read and to count: the item, how much of it, where."""
    where = {"id": document.id, "source": document.source, "file": document.meta.get("file"), "record": document.meta.get("record")}
    for overlap, (begin, end) in zip(overlaps, spans):
        item = index.items[overlap.item]
        text = document.text[begin:end]
        yield {
            "evaluation": item.evaluation,
            "item": item.name,
            "field": overlap.field,
            "words": overlap.shared,
            "of": overlap.of,
            "answer": overlap.answer,
            "document": where,
            "begin": begin,
            "end": end,
            "text": text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " ...",
        }


def _encoded(line: dict[str, Any]) -> bytes:
    return json.dumps(line, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def write_evidence(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    with atomic_write(path) as file:
        for line in lines:
            file.write(_encoded(line))


def write_contamination(folder: Path, parts: Iterable[Path]) -> None:
    """contamination.jsonl of a dataset, of what its read tasks wrote, in their order."""
    with open(folder / "contamination.jsonl", "wb") as out:
        for part in parts:
            out.write(part.read_bytes())


def read_evidence(parts: Iterable[Path]) -> Iterator[dict[str, Any]]:
    for part in parts:
        with open(part, "rb") as file:
            yield from map(json.loads, file)


def contamination_lines(index: Index, evidence_lines: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each evaluation: how many of its items were found, in how many documents, and how many can't be looked for."""
    items: dict[str, set[str]] = {}
    documents: dict[str, set[str]] = {}
    for line in evidence_lines:
        items.setdefault(line["evaluation"], set()).add(line["item"])
        documents.setdefault(line["evaluation"], set()).add(line["document"]["id"])
    totals = Counter(item.evaluation for item in index.items)
    short = Counter(item.evaluation for item in index.too_short)
    return [
        f"{name}: {len(items.get(name, ())):,} of {total:,} items found, in {len(documents.get(name, ())):,} documents"
        + (f"; {short[name]:,} are too short to be looked for" if short[name] else "")
        for name, total in totals.items()
    ]
