"""Aligned pairs: two files with a sentence a line, or two fields of a record, to one document a pair.

The text of a pair is its source side, a line end, its target side; `meta["target_at"]` is the character where the target begins. So a
pair is dropped, compared and held out as a whole. Whatever can't become a pair costs itself alone, with the side that it failed on in
front of the kind: source_empty, target_invalid_utf8.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

from data_pipeline.document import Document, document_id, utf8_bytes
from data_pipeline.errors import DataError
from data_pipeline.read import Fielded, ReadOptions, json_object, read_parquet, without_surrogates
from data_pipeline.read_huggingface import DatasetSplit
from data_pipeline.records import Rejected, Text, lines

SIDES = ("source", "target")
_DAMAGE = ("truncated", "corrupt")


def read_lines(
    path: str, target_path: str, options: ReadOptions, *, source: str, name: str, target_name: str
) -> Iterator[Document | Rejected]:
    """Line n of one file with line n of the other. Only b"\\n" ends a line; a carriage return before it goes.

    Raises DataError naming both counts where the files don't have as many lines, and the damage of one that is cut off: what stands
    after it would be paired with something else.
    """
    files = f"{name} + {target_name}"
    sides = lines(path, options.notes), lines(target_path, options.notes)
    for one, other in itertools.zip_longest(*sides):
        _check_aligned((path, one), (target_path, other), sides)
        number = one[0]
        raw = [
            line if isinstance(line, Rejected) else options.decode(line.removesuffix(b"\r"), f"{where}:{number}")
            for where, line in ((path, one[1]), (target_path, other[1]))
        ]
        num_bytes = 1 + sum(line.bytes if isinstance(line, Rejected) else len(line) for line in (one[1], other[1]))
        wheres = (f"{path}:{number}", f"{target_path}:{number}")
        yield _pair(raw, source, files, name, number, wheres=wheres, num_bytes=num_bytes, notes=options.notes, blank="blank_line")


def _check_aligned(one: tuple[str, Any], other: tuple[str, Any], sides: tuple[Iterator[Any], Iterator[Any]]) -> None:
    """Of each file: its path and the line that it had next, None at its end."""
    _check_whole(one, other[0])
    _check_whole(other, one[0])
    if one[1] is not None and other[1] is not None:
        return
    (longer, line), rest = (one, sides[0]) if one[1] is not None else (other, sides[1])
    last = line
    for last in rest:
        _check_whole((longer, last), one[0] if longer == other[0] else other[0])
    counts = {longer: last[0], (other[0] if longer == one[0] else one[0]): line[0] - 1}
    raise DataError(
        f"{one[0]} has {counts[one[0]]:,} lines and {other[0]} has {counts[other[0]]:,} lines: they are no aligned pair of files, or one is cut off. "
        "Give files of which line n of one belongs to line n of the other."
    )


def _check_whole(one: tuple[str, Any], other: str) -> None:
    path, line = one
    if line is not None and isinstance(line[1], Rejected) and line[1].kind in _DAMAGE:
        raise DataError(
            f"{path}: is {line[1].kind} at line {line[0]}, so the lines after it have no partner in {other}. "
            "Restore it from a copy, or cut both files there."
        )


def read_fields(path: str, pair_fields: tuple[str, str], options: ReadOptions, *, source: str, name: str) -> Iterator[Document | Rejected]:
    """Two fields of each record of a jsonl or parquet file; of jsonl, `a.b` is the field b of the object in a. Raises DataError for other
    formats, and for a parquet file that lacks a column."""
    format = options.format_of(path)
    if format == "txt":
        raise DataError(f"{path}: a text file has no fields. Give the other side as target_files, or a jsonl or parquet file.")
    records = (_of_jsonl if format == "jsonl" else _of_parquet)(path, pair_fields, options)
    return _pairs(records, path, options, source=source, name=name)


def read_dataset_fields(
    dataset: DatasetSplit, pair_fields: tuple[str, str], options: ReadOptions, *, source: str
) -> Iterator[Document | Rejected]:
    """Two fields of each record of a Hugging Face dataset, such as `translation.en`."""
    return _pairs(_of_dataset(dataset, pair_fields), dataset.name, options, source=source, name=dataset.name)


Sides = Sequence[Text]
Records = Iterator[tuple[int, Sides | Rejected, dict[str, Any], int]]  # number, both sides or neither, the record, its bytes


def _pairs(records: Records, place: str, options: ReadOptions, *, source: str, name: str) -> Iterator[Document | Rejected]:
    """`place`: where the records are, for messages."""
    for number, found, beside, num_bytes in records:
        if isinstance(found, Rejected):
            yield found
            continue
        wheres = (f"{place}:{number}", f"{place}:{number}")
        fields = {field: beside.get(field) for field in options.fields}
        yield _pair(
            found, source, name, name, number, wheres=wheres, num_bytes=num_bytes, notes=options.notes, blank="empty", fields=fields
        )


def _of_jsonl(path: str, fields: tuple[str, str], options: ReadOptions) -> Records:
    for number, line in lines(path, options.notes):
        where = f"{path}:{number}"
        found = line if isinstance(line, Rejected) else json_object(line, where, options)
        if isinstance(found, Rejected) or isinstance(line, Rejected):
            yield number, cast(Rejected, found), {}, 0
        else:
            yield number, [_value(found, field, where) for field in fields], found, len(line)


def _value(record: dict[str, Any], field: str, where: str) -> Text:
    value: Any = record
    for key in [field] if field in record else field.split("."):
        if not isinstance(value, dict) or key not in value:
            return Rejected("no_field", where, 0)
        value = value[key]
    return value if isinstance(value, str) else Rejected("not_string", where, 0)


def _of_dataset(dataset: DatasetSplit, fields: tuple[str, str]) -> Records:
    name = dataset.name
    for number, record in enumerate(dataset.records(), start=1):
        found = [_value(record, field, f"{name}:{number}") for field in fields]
        yield number, found, record, 1 + sum(utf8_bytes(value) for value in found if isinstance(value, str))


def _of_parquet(path: str, fields: tuple[str, str], options: ReadOptions) -> Records:
    columns = replace(options, text_field=fields[0], fields=[fields[1], *options.fields], raw_field=fields[1])
    for number, found in read_parquet(path, columns):
        where = f"{path}:{number}"
        if isinstance(found, Rejected) and found.kind in ("truncated", "corrupt"):
            yield number, found, {}, 0
            continue
        beside = found.fields if isinstance(found, Fielded) else {}
        one: Text = found.text if isinstance(found, Fielded) else found
        if isinstance(one, Rejected) and one.kind == "text_not_string":
            one = Rejected("not_string", where, 0)
        value = beside.get(fields[1])
        other: Text = options.decode(value, where) if isinstance(value, bytes) else Rejected("not_string", where, 0)
        beside = {**beside, fields[1]: other if isinstance(other, str) else None}  # as other formats have it: text
        yield number, [one, other], beside, 1 + sum(side.bytes if isinstance(side, Rejected) else utf8_bytes(side) for side in (one, other))


def _pair(
    sides: Sides,
    source: str,
    files: str,
    name: str,
    number: int,
    *,
    wheres: tuple[str, str],
    num_bytes: int,
    notes: Counter[str],
    blank: str,
    fields: dict[str, Any] | None = None,
) -> Document | Rejected:
    empty = [isinstance(side, str) and (not side or side.isspace()) for side in sides]
    if all(empty):
        return Rejected(blank, wheres[0], num_bytes)
    for which, side, is_empty, where in zip(SIDES, sides, empty, wheres):
        if isinstance(side, Rejected) or is_empty:
            kind = side.kind if isinstance(side, Rejected) else "empty"
            return Rejected(f"{which}_{kind}", where, num_bytes)
    one, other = (without_surrogates(side, notes) for side in sides if isinstance(side, str))
    meta: dict[str, Any] = {"file": files, "record": number, "target_at": len(one) + 1}
    if fields:
        meta["fields"] = fields
    return Document(document_id(source, name, number), f"{one}\n{other}", source, meta)
