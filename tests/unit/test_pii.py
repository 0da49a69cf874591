"""If this fails, addresses and phone numbers of people stay in the text, or numbers that are none are destroyed."""

from __future__ import annotations

import time

import pytest

from data_pipeline.document import Document
from data_pipeline.filters.config import PiiConfig
from data_pipeline.pii import Pii, mask
from data_pipeline.step import Ledger

MARKS = PiiConfig(email="<E>", ip="<I>", phone="<P>")


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to jane.doe+x@mail.example.co.uk.", "Write to <E>."),
        ("<a_b@c-d.org>, (Jörg@müller.de)", "<<E>>, (<E>)"),
        ("mailto:x@y.io?subject=a", "mailto:<E>?subject=a"),
        ("a@b, @handle, x@localhost, me@3com, a @ b.com, git@github", "a@b, @handle, x@localhost, me@3com, a @ b.com, git@github"),
        ("DNS 8.8.8.8 and 8.8.4.4.", "DNS <I> and <I>."),
        (
            "10.0.0.1 192.168.1.2 127.0.0.1 169.254.1.1 172.16.9.9 255.255.255.255 224.0.0.1 100.64.0.1",
            "10.0.0.1 192.168.1.2 127.0.0.1 169.254.1.1 172.16.9.9 255.255.255.255 224.0.0.1 100.64.0.1",
        ),
        (
            "section 1.2.3.4.5, 999.8.8.8, v1.2.3.4, version 8.8.8.8, 8.8.8, x8.8.8.8, 08.8.8.8",
            "section 1.2.3.4.5, 999.8.8.8, v1.2.3.4, version 8.8.8.8, 8.8.8, x8.8.8.8, 08.8.8.8",
        ),
        ("ssh 2606:4700:4700::1111, [2001:4860:4860:0:0:0:0:8888]:53", "ssh <I>, [<I>]:53"),
        (
            "::1 fe80::1 fd00::2 2001:db8::1 12:30:45 std::vector a::b 1:2:3:4",
            "::1 fe80::1 fd00::2 2001:db8::1 12:30:45 std::vector a::b 1:2:3:4",
        ),
        ("Call (202) 456-1111 or 202-456-1414, 202.456.1414, 1-202-456-1414.", "Call <P> or <P>, <P>, <P>."),
        ("+49 30 1234567; +44 (0)20 7946 0018; +33612345678; +1 (202) 456-1111", "<P>; <P>; <P>; <P>"),
        (
            "2024-01-31, 1234567890, 555-1234, 3.14159265, 100-200-3000, 123-456-7890, +5 to +10, 1+22 333 444, 978-3-16-148410-0",
            "2024-01-31, 1234567890, 555-1234, 3.14159265, 100-200-3000, 123-456-7890, +5 to +10, 1+22 333 444, 978-3-16-148410-0",
        ),
        ("Nothing here.", "Nothing here."),
    ],
)
def test_what_is_masked_and_what_is_not(text: str, masked: str) -> None:
    assert mask(text, MARKS)[0] == masked


def test_masking_is_a_function_of_the_text_and_is_done_once() -> None:
    """Replacements drawn in turn would depend on the documents before; and what stands in their place is no one's."""
    text = "a@b.com 8.8.8.8 +49 30 1234567 a@b.com"
    once, counts = mask(text, PiiConfig())
    assert once == "email@example.com 192.0.2.1 +1 202-555-0100 email@example.com"
    assert counts == {"emails": 2, "ips": 1, "phones": 1}
    assert mask(once, PiiConfig()) == (once, {})
    assert mask(text, PiiConfig(email=None, ip=None, phone=None)) == (text, {})


def test_the_books_say_what_was_masked() -> None:
    ledger = Ledger()
    documents = [Document("0" * 32, text, "s") for text in ("x@y.com z@y.com", "plain")]
    assert [document.text for document in Pii(MARKS, ledger).run(iter(documents))] == ["<E> <E>", "plain"]
    tally = ledger.tally("pii", "s")
    assert tally.notes == {"emails_masked": 2}
    assert (tally.read.bytes, tally.written.bytes) == (20, 12)


@pytest.mark.parametrize(
    "run", ["a", "a.", "1", "1.", "12.", "+1 ", "1-", "(", "@", "a@", "a@a.", ":", "1:", "+", "202-456-", "a:", "\u00e9"]
)
def test_no_text_takes_more_than_linear_time(run: str) -> None:
    """2 MB of one run, with an @ so that nothing is skipped: seconds, not hours."""
    text = run * (2_000_000 // len(run)) + "@"
    began = time.perf_counter()
    mask(text, MARKS)
    assert time.perf_counter() - began < 20
