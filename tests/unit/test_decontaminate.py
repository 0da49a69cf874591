"""If this fails, a model is trained on what it is tested with, or good text is thrown away as if it were."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.decontaminate.config import DecontaminateConfig, EvaluationConfig
from data_pipeline.decontaminate.evidence import EvidenceWriter
from data_pipeline.decontaminate.find import Overlap, find_overlaps
from data_pipeline.decontaminate.index import make_index
from data_pipeline.decontaminate.items import Item, read_items
from data_pipeline.decontaminate.stage import Decontaminate, char_spans, cut, words_of
from data_pipeline.document import Document
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.schema import validate
from data_pipeline.step import Drop, Ledger
from tests.cleaning_texts import FILLER, QUESTION, filler
from tests.data_fixtures import WORDS


def settings(**more: Any) -> DecontaminateConfig:
    return validate(DecontaminateConfig, {"evaluations": [{"name": "exam", "files": "unused"}], **more})


def item(question: str, *, choices: tuple[str, ...] = (), answers: tuple[str, ...] = (), name: str = "exam:1") -> Item:
    return Item("exam", name, (("question", question),), choices, answers)


def overlaps(text: str, *items: Item, stop_texts: tuple[str, ...] = (), **more: Any) -> list[Overlap]:
    config = settings(**more)
    return find_overlaps(words_of(text), make_index(items, config, stop_texts=stop_texts), config)


# ------------------------------------------------------------------------------------------------- what is found

CHOICES = ("the oldest", "the youngest", "the miller's friend", "none of them")
CHANGED = {
    "verbatim": lambda text: text,
    "upper case": str.upper,
    "title case": str.title,
    "spaces": lambda text: text.replace(" ", "   \t"),
    "lines": lambda text: text.replace(" ", "\n"),
    "no punctuation": lambda text: "".join(character for character in text if character.isalnum() or character.isspace()),
    "more punctuation": lambda text: text.replace(" ", ", ") + "!!",
    "typographic": lambda text: text.replace("'", "\u2019").replace("-", "\u2010"),
    "emphasis": lambda text: text.replace("brothers", "_brothers_").replace("village", "**village**"),
    "quoted": lambda text: "> " + text.replace(" the ", " the\n> "),
}


@pytest.mark.parametrize("change", CHANGED)
def test_case_white_space_and_punctuation_hide_nothing(change: str) -> None:
    rng = random.Random(1)
    text = f"{filler(rng, 40)} {CHANGED[change](QUESTION)} {filler(rng, 40)}"
    found = overlaps(text, item(QUESTION, choices=CHOICES, answers=(CHOICES[2],)))
    assert [overlap.item for overlap in found] == [0]
    (begin, end), *_ = char_spans(text, words_of(text), found)
    assert CHANGED[change](QUESTION).strip(" >?!") in text[begin:end] and end - begin <= len(CHANGED[change](QUESTION))


def test_thirteen_words_of_any_part_are_enough_and_twelve_are_not() -> None:
    rng = random.Random(2)
    words = QUESTION.split()
    for length, wanted in ((13, 1), (12, 0)):
        for first in range(len(words) - length + 1):
            text = f"{filler(rng, 9)} {' '.join(words[first : first + length])} {filler(rng, 9)}"
            assert len(overlaps(text, item(QUESTION.replace("well-known", "known").replace("didn't", "did")))) == 0
            found = overlaps(
                text.replace("well-known", "known").replace("didn't", "did"),
                item(QUESTION.replace("well-known", "known").replace("didn't", "did")),
            )
            assert len(found) == wanted and all(overlap.shared == length for overlap in found)


def plainly(text: str, items: list[list[str]], ngram: int) -> set[int]:
    """Items that share a run of words with the text, by comparing all runs."""
    words = text.lower().split()
    runs = {tuple(words[first : first + ngram]) for first in range(len(words) - ngram + 1)}
    return {
        number
        for number, its in enumerate(items)
        if any(tuple(its[first : first + ngram]) in runs for first in range(len(its) - ngram + 1))
    }


def test_what_is_found_is_what_comparing_all_runs_finds() -> None:
    rng = random.Random(3)
    texts = [[rng.choice(WORDS[:8]) for _ in range(rng.randint(13, 60))] for _ in range(60)]
    items = [item(" ".join(words), name=f"exam:{number}") for number, words in enumerate(texts)]
    config = settings(max_items_per_ngram=1000)
    index = make_index(items, config)
    some = 0
    for _ in range(60):
        piece = rng.choice(texts)
        first, length = rng.randrange(len(piece)), rng.randint(8, 30)
        text = " ".join([*rng.choices(WORDS[:8], k=30), *piece[first : first + length], *rng.choices(WORDS[:8], k=30)])
        found = {overlap.item for overlap in find_overlaps(words_of(text), index, config)}
        assert found == plainly(text, texts, 13)
        some += len(found)
    assert some > 10


def test_a_short_question_counts_beside_its_answer() -> None:
    short = item("What keeps mold spores out of the lungs?", choices=("lead apron", "breathing mask"), answers=("breathing mask",))
    question = "What keeps mold spores out of the lungs?"
    rng = random.Random(4)
    assert overlaps(f"{filler(rng, 20)} {question} {filler(rng, 20)}", short) == []
    assert overlaps(f"{filler(rng, 20)} {question} A lead apron? {filler(rng, 20)}", short) == []
    (found,) = overlaps(f"{filler(rng, 20)} {question.upper()} A lead apron, or a\nBreathing Mask? {filler(rng, 20)}", short)
    assert found.answer and found.shared == found.of == 8
    assert overlaps(f"{question} {filler(rng, 60)} breathing mask", short) == []
    assert len(overlaps(f"{question} {filler(rng, 60)} breathing mask", short, answer_window=70)) == 1
    assert len(overlaps("Was breathing mask right? " + question, short)) == 1  # it may stand before


def test_question_and_answer_together_count_from_eight_words() -> None:
    short = item("The woman retired, therefore", answers=("she received her pension.",))
    assert len(overlaps("... the woman retired; therefore she received her pension, and ...", short)) == 1
    assert overlaps("... the woman retired, therefore she was happy.", short) == []
    none = item("Predators eat", answers=("bunnies",))
    assert [each.name for each in make_index([short, none], settings()).too_short] == ["exam:1"]
    assert overlaps("Predators eat bunnies", none) == []


def test_an_answer_can_be_required() -> None:
    long = item(QUESTION, choices=CHOICES, answers=(CHOICES[1],))
    (found,) = overlaps(QUESTION, long)
    assert found.answer is False
    assert overlaps(QUESTION, long, require_answer=True) == []
    (found,) = overlaps(f"{QUESTION} It was the youngest.", long, require_answer=True)
    assert found.answer is True
    assert len(overlaps(QUESTION, item(QUESTION), require_answer=True)) == 1  # it hasn't got one
    inside = item(QUESTION, answers=("snow",))
    assert overlaps(QUESTION, inside, require_answer=True) == []  # a word of the question is no answer


def test_a_field_with_answer_in_its_name_is_no_answer() -> None:
    """Nor is a passage the answer of every item that has it, nor no one's because another item has it as its question."""
    named = Item("exam", "exam:1", (("answer_context", QUESTION),), (), ("the oldest",))
    (found,) = overlaps(QUESTION, named)
    assert found.answer is False
    assert overlaps(QUESTION, named, require_answer=True) == []
    asks, answers = item(QUESTION, answers=("the oldest",)), item("What was asked?", answers=(QUESTION,), name="exam:2")
    for order in ((asks, answers), (answers, asks)):
        found_of = {order[overlap.item].name: overlap.answer for overlap in overlaps(QUESTION, *order)}
        assert found_of == {"exam:1": False, "exam:2": True}


def test_templates_and_stop_texts_do_not_count() -> None:
    template = "Read the following passage with care and then choose the one answer that fits it best: "
    rng = random.Random(5)
    items = [item(template + filler(rng, 20), name=f"exam:{number}") for number in range(60)]
    index = make_index(items, settings())
    assert index.stopped == 4  # 16 words
    assert overlaps(template, *items) == [] and len(overlaps(template, *items, max_items_per_ngram=60)) == 60
    assert len(overlaps("and so " + items[3].questions[0][1], *items)) == 1
    licence = item("Permission is hereby granted, free of charge, to any person obtaining a copy of this software and files")
    text = "... PERMISSION IS HEREBY GRANTED, FREE OF CHARGE, TO ANY PERSON OBTAINING A COPY of this software"
    assert len(overlaps(text, licence)) == 1
    assert overlaps(text, licence, stop_texts=(licence.questions[0][1] + " and more",)) == []
    short = item("It was a dark and stormy night indeed")
    assert len(overlaps("it was a dark and stormy night indeed", short)) == 1
    assert overlaps("it was a dark and stormy night indeed", short, stop_texts=("It was a dark and stormy night indeed; the rain",)) == []


def test_a_text_with_many_questions_is_no_template() -> None:
    passage = " ".join(random.Random(6).choices(FILLER, k=60))
    items = [
        Item("exam", f"exam:{number}", (("context", passage), ("question", f"Which one was it, number {number}?")), (), ())
        for number in range(80)
    ]
    found = overlaps(f"As they say, {passage}.", *items)
    assert len(found) == 80 and {overlap.field for overlap in found} == {"context"}


def test_spans_are_characters_of_the_text_where_lower_case_is_longer() -> None:
    text = "\u0130\u0130\u0130 so: \u0130stanbul " + QUESTION + " \u0130"
    found = overlaps(text, item(QUESTION))
    ((begin, end),) = char_spans(text, words_of(text), found)
    assert text[begin:end] == QUESTION[:-1]


# ------------------------------------------------------------------------------------------------- records


def read(tmp_path: Path, *records: dict[str, Any], **more: Any) -> list[Item]:
    path = tmp_path / "exam.jsonl"
    path.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return list(read_items(EvaluationConfig(name="exam", files=str(path), **more)))


@pytest.mark.parametrize(
    ("record", "answers"),
    [
        ({"question": "q", "choices": ["a", "b"], "answer": 1}, ("b",)),
        ({"query": "q", "choices": ["a", "b"], "gold": 0}, ("a",)),
        ({"question": "q", "choices": ["a", "b"], "answer": "B"}, ("b",)),
        ({"question": "q", "choices": ["x", "y"], "answer": "(b)"}, ("y",)),
        ({"question": "q", "choices": ["x", "y"], "answer": "y"}, ("y",)),
        ({"question": "q", "choices": ["x", "y"], "answer": "1"}, ("y",)),
        ({"question": "q", "choices": {"text": ["x", "y"], "label": ["1", "2"]}, "answerKey": "1"}, ("x",)),
        ({"question": "q", "choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answerKey": "B"}, ("y",)),
        ({"question": "q", "answer": "forty"}, ("forty",)),
        ({"context": "c", "question": "q", "answers": {"text": ["one", "two", "one"]}}, ("one", "two")),
        ({"question": "q", "answer": True}, ()),
        ({"context_options": ["so Sarah", "so Maria"], "continuation": "left.", "gold": 1}, ("left.",)),
        ({"text": "q"}, ()),
    ],
)
def test_records_as_people_have_them(tmp_path: Path, record: dict[str, Any], answers: tuple[str, ...]) -> None:
    (found,) = read(tmp_path, record)
    assert found.answers == answers and found.name == "exam.jsonl:1" and found.questions


def test_fields_of_other_names_and_records_that_are_no_items(tmp_path: Path) -> None:
    (found,) = read(
        tmp_path, {"frage": "q", "wahl": ["a", "b"], "richtig": 1}, question_fields=["frage"], choices_field="wahl", answer_field="richtig"
    )
    assert (found.questions, found.choices, found.answers) == ((("frage", "q"),), ("a", "b"), ("b",))
    with pytest.raises(DataError, match=r"exam\.jsonl:2 has no text in .*only frage: set question_fields"):
        read(tmp_path, {"text": "t"}, {"frage": "q"})
    with pytest.raises(DataError, match=r"answer is 2, but there are 2 choices"):
        read(tmp_path, {"question": "q", "choices": ["a", "b"], "answer": 2})
    for content, wanted in ((b"{oops\n", "is not JSON"), (b"[1]\n", "is a list"), (b"\n", "has no items")):
        (tmp_path / "bad.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=wanted):
            list(read_items(EvaluationConfig(name="exam", files=str(tmp_path / "bad.jsonl"))))


# ------------------------------------------------------------------------------------------------- what goes


def test_a_span_is_cut_with_its_margins_and_short_rests() -> None:
    words = [f"w{number}" for number in range(1000)]
    text = " ".join(words)
    config = settings(action="span", margin_chars=50, min_piece_chars=100)
    begin = text.index("w500")
    pieces, cuts = cut(text, [(begin, begin + 100)], config)
    assert cuts == 1 and len(pieces) == 2
    assert set(" ".join(pieces).split()) < set(words)  # whole words
    assert 50 <= begin - len(pieces[0]) <= 60 and 50 <= len(text) - len(pieces[1]) - (begin + 100) <= 60
    pieces, cuts = cut(text, [(begin, begin + 100), (begin + 250, begin + 300)], config)
    assert cuts == 2 and len(pieces) == 2  # 50 characters were left between the two margins
    assert cut(text, [(0, len(text))], config) == ([], 1)


def test_the_step_counts_and_keeps_the_books(tmp_path: Path) -> None:
    items = [item(QUESTION, name="exam:1"), item(QUESTION.replace("brothers", "sisters"), name="exam:2")]
    rng = random.Random(7)
    long = f"{filler(rng, 200)} {QUESTION} {filler(rng, 200)}"
    many = " ".join(f"{filler(rng, 100)} {QUESTION}" for _ in range(12))
    texts = [filler(rng, 100), long, QUESTION, many]
    outcomes = {}
    for action in ("document", "span"):
        config, ledger = settings(action=action), Ledger()
        with EvidenceWriter(tmp_path / "found.jsonl") as evidence:
            step = Decontaminate(config, make_index(items, config), ledger, evidence=evidence)
            documents = [Document(f"{number:032x}", text, "web", {"file": "f", "record": number}) for number, text in enumerate(texts)]
            outcomes[action] = [document.meta["record"] for document in step.run(iter(documents))]
        ledger.balance()
        lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
        first = next(line for line in lines if line["document"]["record"] == 1 and line["item"] == "exam:1")
        assert long[first["begin"] : first["end"]] == QUESTION[:-1] == first["text"]
        assert {key: first[key] for key in ("evaluation", "field", "words", "of", "answer")} == {
            "evaluation": "exam",
            "field": "question",
            "words": 23,  # didn, t; well, known
            "of": 23,
            "answer": None,
        }
    assert outcomes == {"document": [0], "span": [0, 1]}
    assert {reason: count.documents for reason, count in ledger.total("decontaminate").dropped.items()} == {"contaminated_exam": 2}
    assert ledger.total("decontaminate").notes == {"spans_cut": 1}
    alone = Decontaminate(settings(), make_index(items, settings()))
    assert isinstance(alone.apply(Document("0" * 32, QUESTION, "web", {})), Drop)


def test_faults_of_the_section_are_named() -> None:
    with pytest.raises(ConfigError, match=r"evaluations.*a name of its own"):
        settings(evaluations=[{"name": "a", "files": "x"}, {"name": "a", "files": "y"}])
    with pytest.raises(ConfigError, match="ngram"):
        settings(ngram=3)


def test_planted_items_are_all_found_and_nothing_in_clean_text_is() -> None:
    """200 items, each changed in its own way, of 13 words or more."""
    rng = random.Random(9)
    items, plants = [], []
    for number, change in zip(range(200), itertools.cycle(CHANGED.values())):
        words = rng.choices(WORDS, k=rng.randint(13, 80))
        length = rng.randint(13, len(words))
        first = rng.randrange(len(words) - length + 1)
        items.append(item(" ".join(words) + "?", name=f"exam:{number}"))
        plants.append(f"{filler(rng, 100)} {change(' '.join(words[first : first + length]))} {filler(rng, 100)}")
    config = settings(max_items_per_ngram=1000)
    index = make_index(items, config)
    found = [{overlap.item for overlap in find_overlaps(words_of(text), index, config)} for text in plants]
    assert all(number in its for number, its in enumerate(found))
    clean = [filler(rng, 300) for _ in range(200)]
    assert not any(find_overlaps(words_of(text), index, config) for text in clean)


# ------------------------------------------------------------------------------------------------- later
