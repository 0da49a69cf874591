"""Steps from documents to documents, and the ledger in which every one of them ends in exactly one column."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from data_pipeline.document import Document, utf8_bytes

NUM_EXAMPLES = 5


@dataclass(slots=True)
class Count:
    """Documents, and bytes: UTF-8 bytes of a document's text, raw bytes of what never became a document."""

    documents: int = 0
    bytes: int = 0

    def add(self, num_bytes: int, documents: int = 1) -> None:
        self.documents += documents
        self.bytes += num_bytes


@dataclass(slots=True)
class Tally:
    """One source in one stage. `read`, `kept`, `dropped` and `errors` are measured as the stage received the documents,
    `written` as it passed them on, so a stage that edits text balances too. `notes` counts repairs of kept documents;
    `examples` names the first few places of each error."""

    read: Count = field(default_factory=Count)
    kept: Count = field(default_factory=Count)
    written: Count = field(default_factory=Count)
    dropped: dict[str, Count] = field(default_factory=dict)
    errors: dict[str, Count] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)

    def keep(self, num_bytes: int, written_bytes: int | None = None) -> None:
        self.read.add(num_bytes)
        self.kept.add(num_bytes)
        self.written.add(num_bytes if written_bytes is None else written_bytes)

    def drop(self, reason: str, num_bytes: int) -> None:
        self.read.add(num_bytes)
        self.dropped.setdefault(reason, Count()).add(num_bytes)

    def error(self, kind: str, num_bytes: int, *, where: str | None = None) -> None:
        self.read.add(num_bytes)
        self.errors.setdefault(kind, Count()).add(num_bytes)
        if where is not None:
            self._example(kind, [where])

    def note(self, kind: str, count: int = 1) -> None:
        self.notes[kind] = self.notes.get(kind, 0) + count

    def _example(self, kind: str, places: Sequence[str]) -> None:
        # the smallest, not the first to come: the same whatever the order in which workers report
        self.examples[kind] = sorted({*self.examples.get(kind, ()), *places}, key=_place)[:NUM_EXAMPLES]

    def merge(self, other: Tally) -> None:
        for mine, theirs in ((self.read, other.read), (self.kept, other.kept), (self.written, other.written)):
            mine.add(theirs.bytes, theirs.documents)
        for columns, more in ((self.dropped, other.dropped), (self.errors, other.errors)):
            for reason, count in more.items():
                columns.setdefault(reason, Count()).add(count.bytes, count.documents)
        for kind, number in other.notes.items():
            self.note(kind, number)
        for kind, places in other.examples.items():
            self._example(kind, places)


def _place(where: str) -> tuple[str, int]:
    path, _, number = where.rpartition(":")
    return (path, int(number)) if number.isdigit() else (where, 0)


class Ledger:
    """Tallies by stage and source: read = kept + dropped + errors, in documents and in bytes."""

    def __init__(self) -> None:
        self.stages: dict[str, dict[str, Tally]] = {}

    def tally(self, stage: str, source: str) -> Tally:
        return self.stages.setdefault(stage, {}).setdefault(source, Tally())

    def total(self, stage: str) -> Tally:
        """All sources of a stage together."""
        total = Tally()
        for tally in self.stages.get(stage, {}).values():
            total.merge(tally)
        return total

    def merge(self, other: Ledger) -> None:
        """Add another's counts, as from a worker or another file."""
        for stage, sources in other.stages.items():
            for source, tally in sources.items():
                self.tally(stage, source).merge(tally)

    def balance(self, *, chain: Sequence[str] = ()) -> None:
        """Raises AssertionError (a bug of ours, never the user's) where a column is missing. For the stages of `chain`, in
        order, it also holds that each received exactly what the one before passed on."""
        for stage, sources in self.stages.items():
            for source, tally in sources.items():
                for unit in ("documents", "bytes"):
                    lost = [sum(getattr(count, unit) for count in columns.values()) for columns in (tally.dropped, tally.errors)]
                    read, kept = getattr(tally.read, unit), getattr(tally.kept, unit)
                    if read != kept + sum(lost):
                        raise AssertionError(
                            f"{stage}/{source}: read {read} {unit}, but kept {kept} + dropped {lost[0]} + errors {lost[1]}"
                        )
                if tally.kept.documents != tally.written.documents:
                    raise AssertionError(f"{stage}/{source}: kept {tally.kept.documents} documents, but wrote {tally.written.documents}")
        for before, after in pairwise(chain):
            for source in sorted({*self.stages.get(before, {}), *self.stages.get(after, {})}):
                passed, received = self.tally(before, source).written, self.tally(after, source).read
                if passed != received:
                    raise AssertionError(f"{source}: {before} passed on {passed}, {after} received {received}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; stages in the order in which they ran, the rest sorted."""
        return {stage: {source: _tally_to_dict(sources[source]) for source in sorted(sources)} for stage, sources in self.stages.items()}

    @classmethod
    def from_dict(cls, tree: dict[str, Any]) -> Ledger:
        ledger = cls()
        for stage, sources in tree.items():
            for source, values in sources.items():
                ledger.stages.setdefault(stage, {})[source] = _tally_from_dict(values)
        return ledger


def _tally_to_dict(tally: Tally) -> dict[str, Any]:
    def plain(count: Count) -> dict[str, int]:
        return {"documents": count.documents, "bytes": count.bytes}

    return {
        **{name: plain(getattr(tally, name)) for name in ("read", "kept", "written")},
        **{name: {reason: plain(count) for reason, count in sorted(getattr(tally, name).items())} for name in ("dropped", "errors")},
        "notes": dict(sorted(tally.notes.items())),
        "examples": {kind: list(places) for kind, places in sorted(tally.examples.items())},
    }


def _tally_from_dict(values: dict[str, Any]) -> Tally:
    def columns(name: str) -> dict[str, Count]:
        return {reason: Count(**count) for reason, count in values[name].items()}

    return Tally(
        read=Count(**values["read"]),
        kept=Count(**values["kept"]),
        written=Count(**values["written"]),
        dropped=columns("dropped"),
        errors=columns("errors"),
        notes=dict(values["notes"]),
        examples={kind: list(places) for kind, places in values["examples"].items()},
    )


@dataclass(frozen=True, slots=True)
class Drop:
    """What a step returns instead of a document."""

    reason: str


class Step(ABC):
    """Turns documents into documents; each is kept, perhaps edited, or dropped for a reason, and counted under `name`."""

    name: str

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger = Ledger() if ledger is None else ledger

    @abstractmethod
    def apply(self, document: Document) -> Document | Drop:
        """The document to pass on (the same object may be edited), or why not."""

    def run(self, documents: Iterator[Document]) -> Iterator[Document]:
        for document in documents:
            num_bytes = utf8_bytes(document.text)
            tally = self.ledger.tally(self.name, document.source)
            result = self.apply(document)
            if isinstance(result, Drop):
                tally.drop(result.reason, num_bytes)
            else:
                tally.keep(num_bytes, utf8_bytes(result.text))
                yield result
