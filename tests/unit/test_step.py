"""If this fails, documents can vanish between stages without a reason in the books."""

import json

import pytest

from data_pipeline.document import Document, document_id, utf8_bytes
from data_pipeline.step import NUM_EXAMPLES, Drop, Ledger, Step


class Shorten(Step):
    name = "shorten"

    def apply(self, document: Document) -> Document | Drop:
        if document.text.startswith("x"):
            return Drop("begins_with_x")
        document.text = document.text[:2]
        return document


def some_documents() -> list[Document]:
    texts = ["äpfel", "xyz", "pears", "x"]
    return [Document(document_id("s", "f", number), text, "ab"[number % 2]) for number, text in enumerate(texts)]


def test_every_document_is_kept_or_dropped_for_a_reason_in_documents_and_bytes() -> None:
    ledger = Ledger()
    kept = list(Shorten(ledger).run(iter(some_documents())))
    assert [document.text for document in kept] == ["äp", "pe"]
    tally = ledger.total("shorten")
    assert (tally.read.documents, tally.read.bytes) == (4, 6 + 3 + 5 + 1)
    assert (tally.kept.documents, tally.kept.bytes, tally.written.bytes) == (2, 11, 3 + 2)
    assert (tally.dropped["begins_with_x"].documents, tally.dropped["begins_with_x"].bytes) == (2, 4)
    ledger.balance()


def test_a_missing_document_or_byte_is_an_error() -> None:
    ledger = Ledger()
    list(Shorten(ledger).run(iter(some_documents())))
    ledger.tally("shorten", "a").read.documents += 1
    with pytest.raises(AssertionError, match="shorten/a: read 3 documents, but kept 2"):
        ledger.balance()
    ledger.tally("shorten", "a").read.documents -= 1
    ledger.tally("shorten", "b").dropped["begins_with_x"].bytes -= 1
    with pytest.raises(AssertionError, match="shorten/b: read 4 bytes"):
        ledger.balance()


def test_a_stage_must_receive_what_the_one_before_passed_on() -> None:
    ledger = Ledger()
    ledger.tally("read", "a").keep(10, 8)
    ledger.tally("next", "a").keep(8)
    ledger.balance(chain=["read", "next"])
    ledger.tally("read", "b").keep(5)
    ledger.balance()
    with pytest.raises(AssertionError, match="b: read passed on"):
        ledger.balance(chain=["read", "next"])


def test_ledgers_of_workers_add_up_in_any_order_and_survive_json() -> None:
    parts = []
    for worker in range(4):
        part = Ledger()
        part.tally("read", "s").keep(10 + worker)
        for line in range(3):
            part.tally("read", "s").error("invalid_json", 7, where=f"file{worker}:{line + 8}")
        part.tally("read", "s").note("bom_stripped")
        parts.append(part)
    forward, backward = Ledger(), Ledger()
    for part in parts:
        forward.merge(part)
    for part in reversed(parts):
        backward.merge(part)
    assert forward.to_dict() == backward.to_dict()
    forward.balance()
    tally = forward.total("read")
    assert (tally.read.documents, tally.errors["invalid_json"].documents, tally.notes["bom_stripped"]) == (16, 12, 4)
    assert tally.examples["invalid_json"] == ["file0:8", "file0:9", "file0:10", "file1:8", "file1:9"]
    assert len(tally.examples["invalid_json"]) == NUM_EXAMPLES
    assert Ledger.from_dict(json.loads(json.dumps(forward.to_dict()))).to_dict() == forward.to_dict()


def test_ids_depend_on_where_a_text_stands_and_nothing_else() -> None:
    """Golden: existing datasets name documents by these."""
    assert document_id("web", "a/b.jsonl", 7) == "56b8d0d3aeff8d5b5198b08360b7d050"
    assert len({document_id(*place) for place in [("a", "b", 1), ("a", "b", 2), ("a", "c", 1), ("ab", "", 1)]}) == 4


def test_text_bytes_are_counted_as_utf8() -> None:
    assert [utf8_bytes(text) for text in ("", "abc", "ä", "漢", "🙂")] == [0, 3, 2, 3, 4]
