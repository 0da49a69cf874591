"""Text to ids and back. The one place where text meets a tokenizer.

Ids never include special tokens: `<|endoftext|>` in a text is encoded as the characters that it is, and nobody adds a
beginning or an end here. The end of a document is added where shards are written, and only there.
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.shards import token_dtype
from data_pipeline.tokenizer.byte_level import byte_alphabet
from data_pipeline.tokenizer.pieces import pieces

_ENOUGH = 8  # ids: no decoder looks further back for what is to be a space
_LONG = 64  # ids
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")


class Encoder:
    """A `tokenizer.json`, loaded. `is_bytes`: ids 0 to 255 are bytes, and the library isn't needed to encode."""

    def __init__(self, json_text: str, *, is_bytes: bool = False, can_cut: bool = True) -> None:
        self._json_text, self._is_bytes = json_text, is_bytes
        self._can_cut = can_cut  # only our own pre-tokenisers are known to have safe places

    @classmethod
    def open(cls, path: str | Path) -> Encoder:
        """Raises DataError if the file can't be read."""
        try:
            return cls(Path(path).read_text(encoding="utf-8"), can_cut=False)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: can't be read ({error}). Restore it from a copy, or build the dataset again.") from None

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_str(self._json_text)
        except Exception as error:  # the library raises bare Exception
            raise DataError(
                f"the tokenizer can't be loaded: {error}. Use a tokenizer.json that the installed `tokenizers` can read."
            ) from None
        tokenizer.encode_special_tokens = True
        return tokenizer

    @cached_property
    def _dtype(self) -> np.dtype[Any]:
        return token_dtype(max(self._tokenizer.get_vocab(with_added_tokens=True).values()))

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint16 or uint32. One thread: run several processes for speed."""
        if self._is_bytes:
            return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        cut = [list(pieces(text)) if self._can_cut else [text] for text in texts]
        encoded = self._tokenizer.encode_batch_fast([piece for parts in cut for piece in parts], add_special_tokens=False)
        ids = iter([np.array(piece.ids, dtype=self._dtype) for piece in encoded])
        return [next(ids) if len(parts) == 1 else np.concatenate([next(ids) for _ in parts]) for parts in cut]

    def decode(self, ids: Iterable[int], *, after: Sequence[int] = ()) -> str:
        """The text of ids, special tokens spelled out; bytes that are no UTF-8 become U+FFFD. What ids go on from, `after`, matters to
        tokenizers that take the space off the first token of a text."""
        before = self._tail(after)
        text: str = self._tokenizer.decode([*before, *ids], skip_special_tokens=False)
        return text[len(self.decode(before)) :] if before else text

    def texts(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> list[str]:
        """Of each id alone, as it stands behind those before it."""
        before = [int(id) for id in after][-_ENOUGH:]
        found = []
        for id in ids:
            found.append(self.decode([id], after=before))
            before = [*before, id][-_ENOUGH:]
        return found

    def _tail(self, ids: Sequence[int]) -> list[int]:
        """So many of the last of ids that what follows is decoded as it is behind all of them. Single bytes are left out: they would
        become one character with bytes that follow."""
        if not len(ids) or self._bytes_of_id is not None:
            return []
        last = [int(id) for id in ids[-_ENOUGH:]]
        return [id for id in last if not _BYTE.fullmatch(self._tokenizer.id_to_token(id) or "")] or self.encode("a").tolist()

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ids, exactly where the tokenizer is byte-level."""
        table = self._bytes_of_id
        return self.decode(ids).encode() if table is None else b"".join(table[id] for id in ids)

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id that has text."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def _bytes_of_id(self) -> list[bytes] | None:
        """The bytes of each id, None where the tokenizer isn't byte-level."""
        if '"ByteLevel"' not in self._json_text:
            return None
        byte_of = {character: byte for byte, character in enumerate(byte_alphabet())}
        added = self._tokenizer.get_added_tokens_decoder()
        table = [b""] * self.num_ids
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            plain = number in added or any(character not in byte_of for character in token)
            table[number] = token.encode() if plain else bytes(byte_of[character] for character in token)
        return table

    def stream(self, *, after: Sequence[int] = ()) -> TextStream:
        """Decodes ids that come one at a time, behind those that they go on from."""
        return TextStream(self, after)


class TextStream:
    """`feed` gives the text that an id completes, perhaps none; `finish` what is left. Together they are the full decode:
    a character whose bytes lie in several tokens comes out whole, bytes that are no UTF-8 as U+FFFD."""

    def __init__(self, encoder: Encoder, after: Sequence[int] = ()) -> None:
        self._encoder = encoder
        self._table = encoder._bytes_of_id
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._ids = encoder._tail(after)
        self._shown = encoder.decode(self._ids)

    def feed(self, id: int) -> str:
        if self._table is not None:
            return self._decoder.decode(self._table[id])
        self._ids.append(id)  # not byte-level: decode all of it, hold back what may still change
        text = self._encoder.decode(self._ids)
        if text.endswith("\ufffd"):
            return ""
        new, self._shown = text[len(self._shown) :], text
        if len(self._ids) > _LONG:  # what was shown stays as it is: its end is enough to go on from
            self._ids = self._encoder._tail(self._ids)
            self._shown = self._encoder.decode(self._ids)
        return new

    def finish(self) -> str:
        if self._table is not None:
            return self._decoder.decode(b"", final=True)
        return self._encoder.decode(self._ids)[len(self._shown) :]
