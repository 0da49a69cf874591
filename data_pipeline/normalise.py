"""One spelling for what means the same: Unicode form and line ends."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from data_pipeline.document import Document
from data_pipeline.schema import Section
from data_pipeline.step import Drop, Ledger, Step

_CR = re.compile("\r\n?")


class NormaliseConfig(Section):
    """One spelling for what means the same."""

    unicode: Literal["nfc", "nfkc", "none"] = "nfc"  # the normal form
    newlines: Literal["lf", "keep"] = "lf"  # lf: \r\n and \r become \n


class Normalise(Step):
    """Edits every document, drops none; notes how many it changed."""

    name = "normalise"

    def __init__(self, config: NormaliseConfig, ledger: Ledger | None = None) -> None:
        super().__init__(ledger)
        self.config = config

    def apply(self, document: Document) -> Document | Drop:
        text = normalise(document.text, self.config)
        if text != document.text:
            self.ledger.tally(self.name, document.source).note("changed")
            document.text = text
        return document


def normalise(text: str, config: NormaliseConfig) -> str:
    """CRLF and CR become LF; then the Unicode form (Unicode Standard Annex 15)."""
    if config.newlines == "lf" and "\r" in text:
        text = _CR.sub("\n", text)
    if config.unicode == "none" or text.isascii():
        return text
    return unicodedata.normalize("NFC" if config.unicode == "nfc" else "NFKC", text)
