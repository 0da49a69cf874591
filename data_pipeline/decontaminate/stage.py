"""Decontamination as a step of the build."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from data_pipeline.cache_key import cache_key
from data_pipeline.decontaminate.config import DecontaminateConfig
from data_pipeline.decontaminate.evidence import EvidenceWriter
from data_pipeline.decontaminate.find import Overlap, find_overlaps
from data_pipeline.decontaminate.index import Index, make_index
from data_pipeline.decontaminate.items import Item, read_items
from data_pipeline.document import Document
from data_pipeline.filters.segments import segments_of
from data_pipeline.filters.stage import DroppedWriter
from data_pipeline.normalise import NormaliseConfig, normalise
from data_pipeline.step import Drop, Ledger, Step
from data_pipeline.storage import list_files, named_files
from data_pipeline.streams import open_bytes, sha256_contents
from data_pipeline.words import Words, code_points, places_before_lowering, segment

_SPACE = re.compile(r"\s")


class Decontaminate(Step):
    """Drops documents for reasons such as contaminated_NAME, or cuts what was found out of them."""

    name = "decontaminate"

    def __init__(
        self,
        config: DecontaminateConfig,
        index: Index,
        ledger: Ledger | None = None,
        *,
        evidence: EvidenceWriter | None = None,
        dropped: DroppedWriter | None = None,
    ) -> None:
        super().__init__(ledger)
        self.config, self.index, self.evidence, self.dropped = config, index, evidence, dropped

    def apply(self, document: Document) -> Document | Drop:
        words = words_of(document.text)
        overlaps = find_overlaps(words, self.index, self.config)
        if not overlaps:
            return document
        spans = char_spans(document.text, words, overlaps)
        if self.evidence is not None:
            self.evidence.add(document, overlaps, spans, self.index)
        pieces, num_cuts = ([], 0) if self.config.action == "document" else cut(document.text, spans, self.config)
        if not pieces or num_cuts > self.config.max_cuts:
            reason = f"contaminated_{self.index.items[overlaps[0].item].evaluation}"
            if self.dropped is not None:
                self.dropped.add(document, self.name, reason)
            return Drop(reason)
        self.ledger.tally(self.name, document.source).note("spans_cut", num_cuts)
        document.text = "\n\n".join(pieces)
        return document


def words_of(text: str) -> Words:
    """The words of a text, in which an underscore (emphasis, a gap to fill) is no letter."""
    return segment(code_points(text.replace("_", " "))) if "_" in text else segments_of(text).words


def char_spans(text: str, words: Words, overlaps: Iterable[Overlap]) -> list[tuple[int, int]]:
    """[begin, end) of each overlap, in characters of the text (its words are numbered in its lower-cased form)."""
    found = [(int(words.begins[overlap.begin]), int(words.ends[overlap.end - 1])) for overlap in overlaps]
    places = places_before_lowering(text)
    return found if places is None else [(int(places[begin]), int(places[end - 1]) + 1) for begin, end in found]


def cut(text: str, spans: Iterable[tuple[int, int]], config: DecontaminateConfig) -> tuple[list[str], int]:
    """(what stays, the number of cuts): each span goes with `margin_chars` on either side and up to the next white space, and so does
    a rest shorter than `min_piece_chars`."""
    wide: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        begin, end = max(0, begin - config.margin_chars), min(len(text), end + config.margin_chars)
        before = max((found.start() + 1 for found in _SPACE.finditer(text, max(0, begin - 100), begin)), default=begin)
        after = _SPACE.search(text, end, min(len(text), end + 100))
        begin, end = before, end if after is None else after.start()
        if wide and begin <= wide[-1][1]:
            wide[-1] = (wide[-1][0], max(end, wide[-1][1]))
        else:
            wide.append((begin, end))
    edges = [0, *(edge for span in wide for edge in span), len(text)]
    pieces = [text[begin:end].strip() for begin, end in zip(edges[::2], edges[1::2])]
    return [piece for piece in pieces if piece and len(piece) >= config.min_piece_chars], len(wide)


# ------------------------------------------------------------------------------------------------- the index


@functools.lru_cache(maxsize=1)
def _open_index(config_json: str, normalise_json: str, content: str) -> Index:
    """Made once a process, for as long as the files' `content` is what it was."""
    config = DecontaminateConfig.model_validate_json(config_json)
    spelling = NormaliseConfig.model_validate_json(normalise_json)
    items = [item for evaluation in config.evaluations for item in read_items(evaluation)]
    stops = []
    for path in list_files(config.stop_texts) if config.stop_texts else []:
        with open_bytes(path) as file:
            stops.append(normalise(file.read().decode("utf-8", "replace"), spelling))
    return make_index([_normalised(item, spelling) for item in items], config, stop_texts=stops)


@dataclass(frozen=True)
class Search:
    """What to look for, for workers to take along: `key`, a decontaminate_key, spares them hashing all evaluations again."""

    config: DecontaminateConfig
    spelling: NormaliseConfig
    key: str

    @classmethod
    def of(cls, config: DecontaminateConfig, spelling: NormaliseConfig) -> Search:
        """Reads every file of the evaluations, to hash it."""
        return cls(config, spelling, decontaminate_key(config))

    def index(self) -> Index:
        """Of all evaluations, their items normalised as documents are. Raises DataError naming a line that is no item."""
        return _open_index(self.config.model_dump_json(), self.spelling.model_dump_json(), self.key)


def _normalised(item: Item, spelling: NormaliseConfig) -> Item:
    def spelled(text: str) -> str:
        return normalise(text, spelling)

    return replace(
        item,
        questions=tuple((name, spelled(text)) for name, text in item.questions),
        choices=tuple(map(spelled, item.choices)),
        answers=tuple(map(spelled, item.answers)),
    )


def decontaminate_key(config: DecontaminateConfig) -> str:
    """Of all that decides what the step does: settings, and the content of evaluations and stop texts, wherever they lie."""
    settings = config.model_dump(mode="json", exclude={"evaluations": {"__all__": {"files"}}, "stop_texts": True})
    files = [named_files(evaluation.files) for evaluation in config.evaluations]
    evaluations = [[[name for _, name in each], sha256_contents([path for path, _ in each])] for each in files]
    return cache_key("decontaminate", settings, evaluations, sha256_contents(list_files(config.stop_texts)) if config.stop_texts else [])
