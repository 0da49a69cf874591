"""Cleaning as a step: every filter that the config names, in one pass over a document's words and lines."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from data_pipeline.cache_key import cache_key
from data_pipeline.document import Document
from data_pipeline.filters.c4 import c4
from data_pipeline.filters.config import FiltersConfig, LanguageConfig
from data_pipeline.filters.fineweb import fineweb
from data_pipeline.filters.gopher import quality, repetition
from data_pipeline.filters.ratios import ratios
from data_pipeline.filters.segments import Segments, segments_of
from data_pipeline.filters.url import hosts, url
from data_pipeline.language import check_languages, identify
from data_pipeline.step import Drop, Ledger, Step
from data_pipeline.storage import atomic_write
from data_pipeline.streams import sha256_contents

Outcome = Segments | str | None  # the text that stays if it is another one, why it goes, or None: it stays as it is


@dataclass(frozen=True, slots=True)
class Filter:
    """`section` of the config turns it on; `prefix` begins the reasons that it gives."""

    section: str
    prefix: str
    look: Callable[[Segments, Any], Outcome]


def _language(text: Segments, config: LanguageConfig) -> str | None:
    code, score = identify(text.text, sample_chars=config.sample_chars)
    if code not in config.keep:
        return "other"
    return "unsure" if score < config.min_score else None


# The order of FineWeb (Penedo et al. 2024), the shares of characters last. A document goes at the first filter that doesn't want it.
ORDER = (
    Filter("language", "language", _language),
    Filter("gopher_repetition", "repetition", repetition),
    Filter("gopher_quality", "quality", quality),
    Filter("c4", "c4", c4),
    Filter("fineweb", "fineweb", fineweb),
    Filter("ratios", "ratio", ratios),
)


class Filters(Step):
    """Drops documents, for reasons such as quality_few_words; C4's rules may also cut lines out of those that stay."""

    name = "filters"

    def __init__(self, config: FiltersConfig, ledger: Ledger | None = None, *, dropped: DroppedWriter | None = None) -> None:
        super().__init__(ledger)
        self.url = config.url
        self.filters = [(each, getattr(config, each.section)) for each in ORDER if getattr(config, each.section) is not None]
        self.dropped = dropped

    def apply(self, document: Document) -> Document | Drop:
        reason, text = self._look(document)
        if reason is not None:
            if self.dropped is not None:
                self.dropped.add(document, self.name, reason)
            return Drop(reason)
        if text != document.text:
            self.ledger.tally(self.name, document.source).note("lines_cut")
            document.text = text
        return document

    def _look(self, document: Document) -> tuple[str | None, str]:
        """(why it goes or None, the text that stays)."""
        if self.url is not None and (reason := url(document.meta.get("fields", {}).get(self.url.field), self.url)) is not None:
            return f"url_{reason}", document.text
        text = segments_of(document.text)
        for each, config in self.filters:
            outcome = each.look(text, config)
            if isinstance(outcome, str):
                return f"{each.prefix}_{outcome}", document.text
            text = outcome or text
        return None, text.text


class DroppedWriter(AbstractContextManager["DroppedWriter"]):
    """A jsonl.zst of dropped documents, each whole as it came and with its reason; the file appears at the end, as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> DroppedWriter:
        import zstandard

        self._atomic = atomic_write(self.path)
        self._file = zstandard.ZstdCompressor(level=3).stream_writer(self._atomic.__enter__(), closefd=False)
        return self

    def add(self, document: Document, stage: str, reason: str) -> None:
        where = {"id": document.id, "source": document.source, **document.meta}
        line = json.dumps({"text": document.text, **where, "stage": stage, "reason": reason}, ensure_ascii=False, default=str)
        # Fields may hold halves of surrogate pairs, which UTF-8 has no bytes for; with a backslash before it each is what JSON calls it.
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._file.close()
        self._atomic.__exit__(kind, error, trace)


def filters_key(config: FiltersConfig) -> str:
    """Of all that decides what the filters do: settings, the content of block lists, the language model. Raises ConfigError or
    DataError where one of them is missing, before any work is done."""
    lists = config.url.blocklists if config.url is not None else []
    if config.url is not None:
        hosts(tuple(config.url.block), tuple(lists))
    model = check_languages(config.language.keep) if config.language is not None else None
    return cache_key("filters", config.model_dump(mode="json"), sha256_contents(lists), model)
