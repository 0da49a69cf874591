"""What points to a person, replaced by a fixed text: e-mail addresses, public IP addresses, phone numbers.

A pure function of the text: what stands in one document never depends on another, as replacements drawn in turn would.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter

from data_pipeline.document import Document
from data_pipeline.filters.config import PiiConfig
from data_pipeline.step import Drop, Ledger, Step

# Each begins where a run of its characters begins, so that a long run is looked at once, not once for each of its characters; what
# may not stand before is asked after the first character, since `re` finds candidates fastest by a class that begins the pattern.
_EMAIL = re.compile(r"(?<![\w.+%-])[\w.+%-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_]{2,24}(?![\w-])")
_IPV4 = re.compile(r"\d(?<![\w.]\d)\d{0,2}\.(?:\d{1,3}\.){2}\d{1,3}(?![\w]|\.\w)")
_IPV6 = re.compile(r"(?<![\w:.])[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7}(?![\w:])")
_TWO_COLONS = re.compile(r":[0-9a-fA-F]{0,4}:")
_IPV6_GLOBAL = ipaddress.ip_network("2000::/3")
_VERSION_BEFORE = re.compile(r"(?:\bversion|\bver\.?|\brelease|\bv)\s*$", re.IGNORECASE)
_SEPARATOR = r"[ .\-\u2010\u2011\u00a0]"
_PHONE = re.compile(
    rf"[+(1-9](?:(?<=\+)(?<![\w+]\+)[1-9]\d{{0,2}}(?:{_SEPARATOR}?\(0\))?(?:{_SEPARATOR}?\(?\d{{1,5}}\)?){{2,6}}(?!\w)"  # +49 30 1234567
    r"|(?<=[(1-9])(?<![\w.+\-(][(1-9])"  # (202) 555-0100, 202-555-0100, 1-202-555-0100
    rf"(?:(?<=1){_SEPARATOR}(?:\([2-9]\d\d\){_SEPARATOR}?|[2-9]\d\d[.\- ])|(?<=\()[2-9]\d\d\){_SEPARATOR}?|(?<=[2-9])\d\d[.\- ])"
    r"[2-9]\d\d[.\- ]\d{4}(?!\w|[.\-]\d))"
)


def mask(text: str, config: PiiConfig) -> tuple[str, Counter[str]]:
    """The text with replacements, and how many there were of each kind: emails, ips, phones."""
    counts: Counter[str] = Counter()

    def replaced(kind: str, replacement: str, found: re.Match[str]) -> str:
        if found.group() == replacement:
            return replacement
        counts[kind] += 1
        return replacement

    if (email := config.email) is not None and "@" in text:
        text = _EMAIL.sub(lambda found: replaced("emails", email, found), text)
    if (ip := config.ip) is not None:
        for pattern in [_IPV4, *([_IPV6] if _TWO_COLONS.search(text) else [])]:
            text = pattern.sub(lambda found: replaced("ips", ip, found) if _is_public(found) else found.group(), text)
    if (phone := config.phone) is not None:
        text = _PHONE.sub(lambda found: replaced("phones", phone, found) if _is_phone(found.group()) else found.group(), text)
    return text, counts


def _is_public(found: re.Match[str]) -> bool:
    """A valid address of a global network that isn't the number of a version."""
    try:
        address = ipaddress.ip_address(found.group())
    except ValueError:
        return False
    if address.version == 6 and address not in _IPV6_GLOBAL:  # nothing else is assigned yet, and a::b is C++
        return False
    before = found.string[max(0, found.start() - 12) : found.start()]
    return address.is_global and not address.is_multicast and not _VERSION_BEFORE.search(before)


def _is_phone(found: str) -> bool:
    """By the number of digits of E.164."""
    return 8 <= sum(map(str.isdigit, found)) <= 15


class Pii(Step):
    """Edits documents, drops none; notes what it masked."""

    name = "pii"

    def __init__(self, config: PiiConfig, ledger: Ledger | None = None) -> None:
        super().__init__(ledger)
        self.config = config

    def apply(self, document: Document) -> Document | Drop:
        document.text, counts = mask(document.text, self.config)
        for kind, number in counts.items():
            self.ledger.tally(self.name, document.source).note(f"{kind}_masked", number)
        return document
