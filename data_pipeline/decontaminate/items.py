"""Evaluation sets as plain jsonl to items: whatever the record calls its question, its choices and its answer."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from data_pipeline.decontaminate.config import EvaluationConfig
from data_pipeline.errors import DataError
from data_pipeline.records import Rejected, lines
from data_pipeline.storage import named_files

QUESTION_FIELDS = (
    "question",
    "query",
    "context",
    "context_options",
    "ctx",
    "passage",
    "premise",
    "prompt",
    "problem",
    "goal",
    "sentence",
    "text",
)
CHOICES_FIELDS = ("choices", "options", "endings")
ANSWER_FIELDS = ("answer", "answers", "gold", "answerKey", "label", "target", "continuation", "solution")
_LABEL = re.compile(r"^\s*(?:question|query|passage|context|problem|prompt|q)\s*[:.]\s+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Item:
    """`name` is file:line. `questions`: the texts that must not be found, each by its field; `answers`: the right ones."""

    evaluation: str
    name: str
    questions: tuple[tuple[str, str], ...]
    choices: tuple[str, ...]
    answers: tuple[str, ...]


def read_items(config: EvaluationConfig) -> Iterator[Item]:
    """All items of an evaluation, files by name. Blank lines are skipped; raises DataError for a line that is no item, since an item
    that is left out would never be looked for, and where there is none at all."""
    found = 0
    for path, name in named_files(config.files):
        for number, line in lines(path, Counter()):
            where = f"{path}:{number}"
            if isinstance(line, Rejected):
                raise DataError(f"evaluation {config.name}: {where} can't be read: {line.kind.replace('_', ' ')}")
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"evaluation {config.name}: {where} is not JSON ({error})") from None
            if not isinstance(record, dict):
                raise DataError(
                    f"evaluation {config.name}: {where} is a {type(record).__name__}, wanted an object with a question or a text"
                )
            found += 1
            yield to_item(record, config, name=f"{name}:{number}", where=where)
    if not found:
        raise DataError(f"evaluation {config.name}: {config.files} has no items")


def to_item(record: Mapping[str, Any], config: EvaluationConfig, *, name: str, where: str) -> Item:
    """Raises DataError where there is nothing to look for, or the answer is no choice."""
    fields = QUESTION_FIELDS if config.question_fields is None else config.question_fields
    questions = [(field, text) for field in fields for text in texts(record.get(field)) if text.strip()]
    if not questions:
        wanted = ", ".join(fields)
        raise DataError(
            f"evaluation {config.name}: {where} has no text in {wanted}, only {', '.join(record) or 'nothing'}: set question_fields"
        )
    choices_fields = CHOICES_FIELDS if config.choices_field is None else (config.choices_field,)
    given = next((record[field] for field in choices_fields if record.get(field) is not None), None)
    choices = texts(given)
    labels = texts(given.get("label")) if isinstance(given, dict) else []
    answer_fields = ANSWER_FIELDS if config.answer_field is None else (config.answer_field,)
    answers: list[str] = []
    for field in answer_fields:
        try:
            answers += _answers(record.get(field), choices, labels)
        except IndexError:
            raise DataError(
                f"evaluation {config.name}: {where}: {field} is {record[field]!r}, but there are {len(choices)} choices"
            ) from None
    return Item(config.name, name, tuple(dict.fromkeys(questions)), tuple(choices), tuple(dict.fromkeys(answers)))


def texts(value: Any) -> list[str]:
    """The texts in a field: one, a list of them, or the way in which ARC and SQuAD have them: {"text": [...]}, [{"text": ...}]."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return texts(value.get("text"))
    if isinstance(value, Sequence):
        return [text for part in value for text in texts(part)]
    return []


def without_label(text: str) -> str:
    """Without the Question: that prompts have and documents may not have."""
    return _LABEL.sub("", text)


def _answers(value: Any, choices: Sequence[str], labels: Sequence[str]) -> list[str]:
    """What a field of the right answer means: the text, or the choice that it numbers. IndexError where there is no such choice."""
    if value is None or isinstance(value, (bool, float)):
        return []
    if isinstance(value, int):
        return [_choice(choices, value)] if choices else []
    if isinstance(value, str):
        return [_spelled(value, choices, labels)] if value.strip() else []
    if isinstance(value, Sequence):
        return [answer for part in value for answer in _answers(part, choices, labels)]
    return texts(value)


def _spelled(value: str, choices: Sequence[str], labels: Sequence[str]) -> str:
    if not choices or value in choices:
        return value
    if value in labels:
        return _choice(choices, labels.index(value))
    short = value.strip().strip("().")
    if len(short) == 1 and short.isascii() and short.isalpha():
        return _choice(choices, ord(short.upper()) - ord("A"))
    if short.isascii() and short.isdecimal():
        return _choice(choices, int(short))
    return value


def _choice(choices: Sequence[str], number: int) -> str:
    if not 0 <= number < len(choices):
        raise IndexError(number)
    return choices[number]
