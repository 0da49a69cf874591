"""Files to documents: one function a format, in a table.

Whatever can't become a document costs itself alone: it comes out as `Rejected`, with a kind and a place, never as a
missing document. Records are decoded from bytes one by one and split at b"\\n" only.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from data_pipeline.document import Document, document_id, utf8_bytes
from data_pipeline.errors import DataError
from data_pipeline.records import Held, Rejected, Text, chunks, decode, lines, seekable, without_bom
from data_pipeline.step import Ledger
from data_pipeline.streams import DamagedStream, open_bytes

TxtDocuments = Literal["file", "paragraph", "line"]
InvalidUtf8 = Literal["drop", "replace"]
BLANK_KINDS = ("blank_line", "empty")  # nothing to lose: counted as dropped, never an error
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Fielded:
    """A text with the record's other fields that were asked for, None where it hasn't got one."""

    text: str
    fields: dict[str, Any]


@dataclass(slots=True)
class ReadOptions:
    """How to take documents out of a file. `format` is a key of FORMATS, or auto: by the file's name. `notes` counts what was repaired
    in documents that were kept: bom_stripped, surrogates_replaced, and with `invalid_utf8` "replace" invalid_utf8_replaced. `fields` of
    a record go into the document's meta, under `fields`, None where it hasn't got them. `raw_field`: of parquet, the one of `fields`
    that must be there and comes as bytes, before anyone decodes it."""

    text_field: str = "text"
    txt_documents: TxtDocuments = "file"
    notes: Counter[str] = field(default_factory=Counter)
    fields: Sequence[str] = ()
    invalid_utf8: InvalidUtf8 = "drop"
    raw_field: str | None = None
    format: str = "auto"

    def format_of(self, path: str) -> str:
        return format_of(path) if self.format == "auto" else self.format

    def decode(self, data: bytes, where: str) -> Text:
        return decode(data, where, replace=self.invalid_utf8 == "replace", notes=self.notes)


Records = Iterator[tuple[int, Text | Fielded]]  # record number from 1, and the text or why there is none


def read_file(path: str, options: ReadOptions | None = None, *, source: str, name: str | None = None) -> Iterator[Document | Rejected]:
    """Documents of one file, in order, with the records that are none.

    `name` is the file's name relative to its root (default: its last part); ids are made of it.
    Raises DataError when the format can't be told or a parquet file has no such column.
    """
    name = Path(path).name if name is None else name
    options = ReadOptions() if options is None else options
    format = options.format_of(path)
    if format not in FORMATS:
        raise DataError(f"{path}: no reader for format {format!r}; there are auto, {', '.join(FORMATS)}")
    read = FORMATS[format]
    for number, text in read(path, options):
        if isinstance(text, Rejected):
            yield text
        else:
            yield document_of(text, source, name, number, where=f"{path}:{number}", notes=options.notes)


def count_read(
    items: Iterable[Document | Rejected],
    ledger: Ledger,
    *,
    source: str,
    stage: str = "read",
    strict: bool = False,
    notes: Counter[str] | None = None,
) -> Iterator[Document]:
    """Pass the documents on and write everything into the ledger, `notes` too once the items are through.

    With `strict`, the first error raises DataError naming file and record.
    """
    tally = ledger.tally(stage, source)
    for item in items:
        if isinstance(item, Document):
            tally.keep(utf8_bytes(item.text))
            yield item
        elif item.kind in BLANK_KINDS:
            tally.drop(item.kind, item.bytes)
        elif strict:
            raise DataError(
                f"{item.where}: {item.kind.replace('_', ' ')} ({item.bytes:,} bytes); mend it, or read without strict to count and skip it"
            )
        else:
            tally.error(item.kind, item.bytes, where=item.where)
    for kind, count in (notes or {}).items():
        tally.note(kind, count)


def format_of(path: str) -> str:
    """The key of FORMATS that the name tells, whatever the compression; names that tell nothing are txt.

    Raises DataError for formats that hold text but aren't read here, so that they don't pass as text.
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    while suffixes and suffixes[-1] in (".gz", ".zst", ".zstd"):
        suffixes.pop()
    last = suffixes[-1] if suffixes else ""
    if last in _NOT_READ:
        raise DataError(
            f"{path}: {last} files are not read; convert it to .jsonl, .parquet or .txt, or say its format where the name is wrong"
        )
    return _BY_SUFFIX.get(last, "txt")


_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".pq": "parquet"}
# fmt: off
_NOT_READ = {
    ".csv", ".tsv", ".arrow", ".feather", ".avro", ".orc", ".warc", ".wet", ".bin", ".idx", ".npy", ".npz", ".pkl", ".pt", ".safetensors",
    ".zip", ".tar", ".tgz", ".bz2", ".xz", ".lz4", ".7z", ".rar", ".pdf", ".doc", ".docx", ".odt", ".epub", ".png", ".jpg", ".jpeg",
}
# fmt: on


def document_of(text: str | Fielded, source: str, name: str, number: int, *, where: str, notes: Counter[str]) -> Document | Rejected:
    fields: dict[str, Any] = {}
    if isinstance(text, Fielded):
        fields = text.fields
        text = text.text
    if not text or text.isspace():
        return Rejected("empty", where, utf8_bytes(text))
    text = without_surrogates(text, notes)
    meta: dict[str, Any] = {"file": name, "record": number}
    if fields:
        meta["fields"] = fields
    return Document(document_id(source, name, number), text, source, meta)


def without_surrogates(text: str, notes: Counter[str]) -> str:
    """JSON can spell lone surrogates; UTF-8 and tokenizers can't."""
    if text.isascii():
        return text
    text, replaced = _SURROGATE.subn("\ufffd", text)
    if replaced:
        notes["surrogates_replaced"] += replaced
    return text


# ------------------------------------------------------------------------------------------------- formats


def _read_txt(path: str, options: ReadOptions) -> Records:
    """The file is one document, or each of its paragraphs (between blank lines) or lines is. A damaged file that is one
    document is rejected whole, since half a document is none; of others the last, cut one is."""
    if options.txt_documents == "paragraph":
        yield from _paragraphs(path, options)
        return
    if options.txt_documents == "line":
        for number, line in lines(path, options.notes):
            yield number, line if isinstance(line, Rejected) else options.decode(line.removesuffix(b"\r"), f"{path}:{number}")
        return
    held = Held()
    try:
        with open_bytes(path) as file:
            for chunk in chunks(file):
                held.add(chunk)
    except DamagedStream as damage:
        yield 1, Rejected(damage.kind, f"{path}:1", held.num_bytes)
        return
    data = held.take(path, 1)
    yield 1, data if isinstance(data, Rejected) else options.decode(without_bom(data, options.notes), f"{path}:1")


def _paragraphs(path: str, options: ReadOptions) -> Records:
    """Numbered by their first line. Joined by b"\n", so that a paragraph is the same with either kind of line end."""
    first, held = 0, Held()  # first: 0 between paragraphs
    ended: tuple[int, bytes | Rejected] = (0, b"")  # a blank line after the last
    for number, line in itertools.chain(lines(path, options.notes), [ended]):
        if isinstance(line, Rejected) and line.kind != "too_long":
            yield first or number, Rejected(line.kind, line.where, line.bytes + held.num_bytes)
            return
        if isinstance(line, Rejected) or line.strip():
            if first:
                held.add(b"\n")
            else:
                first = number
            if isinstance(line, Rejected):
                held.skip(line.bytes)
            else:
                held.add(line.removesuffix(b"\r"))
        elif first:
            paragraph = held.take(path, first)
            yield first, paragraph if isinstance(paragraph, Rejected) else options.decode(paragraph, f"{path}:{first}")
            first = 0


def _read_jsonl(path: str, options: ReadOptions) -> Records:
    for number, line in lines(path, options.notes):
        yield number, line if isinstance(line, Rejected) else _json_text(line, f"{path}:{number}", options)


def _json_text(line: bytes, where: str, options: ReadOptions) -> Text | Fielded:
    record = json_object(line, where, options)
    if isinstance(record, Rejected):
        return record
    if options.text_field not in record:
        return Rejected("no_text_field", where, len(line))
    text = record[options.text_field]
    if not isinstance(text, str):
        return Rejected("text_not_string", where, len(line))
    return Fielded(text, {name: record.get(name) for name in options.fields}) if options.fields else text


def json_object(line: bytes, where: str, options: ReadOptions) -> dict[str, Any] | Rejected:
    if not line.strip():
        return Rejected("blank_line", where, len(line))
    decoded = options.decode(line, where)
    if isinstance(decoded, Rejected):
        return decoded
    try:
        record = json.loads(decoded)
    except (ValueError, RecursionError):  # the second from [[[[...
        return Rejected("invalid_json", where, len(line))
    return record if isinstance(record, dict) else Rejected("not_an_object", where, len(line))


def read_parquet(path: str, options: ReadOptions) -> Records:
    """Rows of one column, 1,024 at a time. A file that pyarrow can't go on with is one error; its rows before that are kept."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with seekable(path) as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            columns = parquet.schema_arrow.names
            for key, column in (("text_field", options.text_field), ("target_field", options.raw_field)):
                if column is not None and column not in columns:
                    key = "source_field" if options.raw_field is not None and key == "text_field" else key
                    raise DataError(f"{path} has no column {column!r}; set {key} to one of: {', '.join(columns)}")
            others = [name for name in options.fields if name in columns]
            for batch in parquet.iter_batches(batch_size=1024, columns=list(dict.fromkeys([options.text_field, *others]))):
                beside: dict[str, list[Any]] = {
                    name: list(_raw_strings(batch.column(name))) if name == options.raw_field else batch.column(name).to_pylist()
                    for name in others
                }
                for row, value in enumerate(_raw_strings(batch.column(options.text_field))):
                    number += 1
                    where = f"{path}:{number}"
                    text = options.decode(value, where) if isinstance(value, bytes) else Rejected("text_not_string", where, 0)
                    if options.fields and isinstance(text, str):
                        yield number, Fielded(text, {name: beside[name][row] if name in beside else None for name in options.fields})
                    else:
                        yield number, text
    except DamagedStream as damage:
        yield number + 1, Rejected(damage.kind, f"{path}:{number + 1}", 0)
    except (pyarrow.ArrowException, OSError):
        yield number + 1, Rejected("corrupt", f"{path}:{number + 1}", 0)


def _raw_strings(array: Any) -> list[bytes | None]:
    """The column's values before anyone decodes them: pyarrow would give up on the batch at the first bad byte."""
    import pyarrow

    kinds = pyarrow.types
    if kinds.is_dictionary(array.type):
        array = array.dictionary_decode()
    if kinds.is_string(array.type) or kinds.is_large_string(array.type):
        array = array.cast(pyarrow.large_binary())
    is_bytes = kinds.is_binary(array.type) or kinds.is_large_binary(array.type)
    values: list[bytes | None] = array.to_pylist() if is_bytes else [None] * len(array)
    return values


FORMATS: dict[str, Callable[[str, ReadOptions], Records]] = {"txt": _read_txt, "jsonl": _read_jsonl, "parquet": read_parquet}
