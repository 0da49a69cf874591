"""What decontamination may be asked to do. Imports nothing heavy: reading a data config reads it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from data_pipeline.schema import Section


class EvaluationConfig(Section):
    """An evaluation set as jsonl, an item a line: a question with choices and the right answer, or a text. A record's usual names are
    known (question, query, context, text, ...; choices, options; answer, gold, label, continuation, ...): name the fields where yours
    are others, or where only some should count."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")  # names it in reports and among the reasons of drops
    files: str | list[str]  # paths, folders, globs, URLs; plain, .gz or .zst
    question_fields: list[str] | None = None  # what a document must not hold; null: all of the usual names that a record has
    choices_field: str | None = None  # null: the first of the usual names
    answer_field: str | None = None  # a text, several, or the number or letter of a choice; null: all of the usual names


class DecontaminateConfig(Section):
    """Find items of evaluations in the text by word n-grams, whatever the case, white space and punctuation, and take them out. What
    was found, in which document and where, is written to contamination.jsonl."""

    evaluations: list[EvaluationConfig] = Field(min_length=1)
    action: Literal["document", "span"] = "document"  # what goes: the document, or what was found with margin_chars around it
    ngram: int = Field(13, ge=8, le=100)  # words in a row that a text must share with an item (GPT-3: 13)
    min_words: int = Field(8, ge=4)  # an item shorter than ngram is looked for as a whole from this length on
    answer_window: int = Field(50, ge=0)  # words around a question within which its answer is looked for
    require_answer: bool = False  # true: a question without its answer nearby is left, however much of it is there
    max_items_per_ngram: int = Field(50, ge=1)  # words that stand in more items of one evaluation are its template: they don't count
    stop_texts: str | list[str] = []  # text files with what may stand anywhere (licences, famous quotations): its n-grams don't count
    margin_chars: int = Field(200, ge=0)  # span: removed on either side as well (GPT-3: 200)
    min_piece_chars: int = Field(200, ge=0)  # span: a shorter rest between two cuts, or at an end, goes too (GPT-3: 200)
    max_cuts: int = Field(10, ge=1)  # span: a document with more is dropped (GPT-3: 10)

    @field_validator("evaluations")
    @classmethod
    def _names_differ(cls, value: list[EvaluationConfig]) -> list[EvaluationConfig]:
        names = [evaluation.name for evaluation in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"a name of its own for each evaluation | {', '.join(twice)} is given twice")
        return value
