"""If this fails, repeats between documents stay, or text that stands nowhere else is cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.dedup import external
from data_pipeline.dedup.config import LinesConfig, SubstringConfig
from data_pipeline.dedup.external import PAIR, ranges, repeated, write_runs
from data_pipeline.dedup.repeats import ScanJob, cut_out, find_cuts, line_spans, scan
from data_pipeline.document import Document
from data_pipeline.notebook import open_dataset
from data_pipeline.step import Ledger
from data_pipeline.store import write_part
from data_pipeline.words import words
from tests.corpus_fixtures import config as corpus_config
from tests.corpus_fixtures import digests, jsonl


def cleaned(folder: Path, texts: list[str], config: LinesConfig | SubstringConfig) -> list[str]:
    """The texts without repeats; the earlier a text the better."""
    with write_part(folder / "part") as part:
        for number, text in enumerate(texts):
            part.add(Document(f"{number:032x}", text, "s", {"file": "f", "record": number}))
    job = ScanJob(folder / "part", np.arange(len(texts)), config, folder / "runs")
    (folder / "runs").unlink(missing_ok=True)
    scan(job, lambda _: None)
    cuts = find_cuts([folder / "runs"], config)
    return [cut_out(text, cuts[cuts["rank"] == number], config) if number in cuts["rank"] else text for number, text in enumerate(texts)]


def plainly(texts: list[list[str]], length: int) -> list[list[str]]:
    """The same by a suffix array of the whole corpus: suffixes in order, neighbours with `length` words in common are one group."""
    ends = [(number, place) for number, its in enumerate(texts) for place in range(len(its) - length + 1)]
    suffixes = sorted(ends, key=lambda at: (texts[at[0]][at[1] : at[1] + length], at))
    later, firsts = set(), set()
    group: list[tuple[int, int]] = []
    for at in [*suffixes, None]:
        if at is None or (group and texts[at[0]][at[1] : at[1] + length] != texts[group[0][0]][group[0][1] : group[0][1] + length]):
            if len(group) > 1:
                firsts |= {(group[0][0], group[0][1] + word) for word in range(length)}
                later |= {(number, place + word) for number, place in group[1:] for word in range(length)}
            group = []
        if at is not None:
            group.append(at)
    return [[word for place, word in enumerate(its) if (number, place) not in later - firsts] for number, its in enumerate(texts)]


def test_it_cuts_what_a_suffix_array_finds(tmp_path: Path) -> None:
    rng = random.Random(0)
    cut = 0
    for _ in range(40):
        texts = [[rng.choice("abc") for _ in range(rng.randint(0, 60))] for _ in range(rng.randint(1, 6))]
        for text in texts:
            source = rng.choice(texts)
            place, first = rng.randint(0, len(text)), rng.randint(0, len(source))
            text[place:place] = source[first : first + 25]
        expected = plainly(texts, 10)
        found = [text.split() for text in cleaned(tmp_path, [" ".join(text) for text in texts], SubstringConfig(min_words=10))]
        assert found == expected
        cut += sum(map(len, texts)) - sum(map(len, found))
    assert cut > 100


def test_every_planted_repeat_of_fifty_words_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 of them, 50 to 120 words long, in other words; runs and ranges so small that there are many of each."""
    monkeypatch.setattr(external, "RUN_RECORDS", 5000)
    monkeypatch.setattr(external, "BUDGET_BYTES", 16 * 3000)
    rng = random.Random(1)
    vocabulary = [f"w{number}" for number in range(5000)]
    texts = [" ".join(rng.choices(vocabulary, k=300)) for _ in range(200)]
    planted = []
    for number in range(200):
        source = texts[rng.randrange(200)].split()
        length = rng.randint(50, 120)
        first = rng.randrange(300 - length)
        repeat = source[first : first + length]
        planted.append(repeat)
        way = [str.upper, str.title, lambda text: text.replace(" ", ",\n")][number % 3]
        texts.append(" ".join([*rng.choices(vocabulary, k=100), way(" ".join(repeat)), *rng.choices(vocabulary, k=100)]))
    after = cleaned(tmp_path, texts, SubstringConfig())
    assert after[:200] == texts[:200]
    for repeat, text in zip(planted, after[200:]):
        assert 200 <= len(words(text)) <= 202 and " ".join(repeat[2:-2]) not in " ".join(words(text))  # a neighbour may be equal by chance
    unique = [" ".join(rng.choices(vocabulary, k=400)) for _ in range(100)]
    assert cleaned(tmp_path, unique, SubstringConfig()) == unique
    just_below = [" ".join(vocabulary[:100]), " ".join(["x", *vocabulary[20:69], "y"])]
    assert cleaned(tmp_path, just_below, SubstringConfig()) == just_below


def test_a_text_that_repeats_itself_keeps_one_turn(tmp_path: Path) -> None:
    turn = [f"w{number}" for number in range(60)]
    (text,) = cleaned(tmp_path, [" ".join(turn * 5)], SubstringConfig())
    assert set(text.split()) == set(turn) and len(text.split()) < 2 * len(turn)
    (text,) = cleaned(tmp_path, ["na " * 500 + "end"], SubstringConfig())
    assert text.split() == ["na"] * 50 + ["end"]


def test_words_are_cut_whole_with_what_follows_them(tmp_path: Path) -> None:
    shared = ", ".join(f"w{number}" for number in range(50))
    texts = [f"\u0130 first: {shared}.", f"\u0130\u0130 Before! {shared.upper()}... (After) it."]
    assert cleaned(tmp_path, texts, SubstringConfig())[1] == "\u0130\u0130 Before! After) it."
    assert cleaned(tmp_path, [shared, shared.title() + " ..."], SubstringConfig())[1] == ""


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_spans_of_lines_and_paragraphs_are_the_text(unit: str) -> None:
    for text in ("", "a", "a\n", "\n\na\n\n\nb\n", "a\nb\n \nc", "\r\n\n\nx\n\n"):
        spans = line_spans(text, unit)
        assert "".join(text[begin:end] for begin, end in spans) == text


def test_lines_that_stand_elsewhere_go(tmp_path: Path) -> None:
    long, other = "This line stands in every page of the whole site.", "This one does so too, but it is another one."
    texts = [f"{long}\nfirst\n{other}\n", f"second\n  {long} \nshort\n{other}", f"third\nshort\n{long}\nshort", long]
    assert cleaned(tmp_path, texts, LinesConfig()) == [texts[0], "second\nshort\n", "third\nshort\nshort", ""]
    assert cleaned(tmp_path, texts, LinesConfig(max_copies=2)) == [texts[0], texts[1], "third\nshort\nshort", ""]
    assert cleaned(tmp_path, texts, LinesConfig(min_chars=3))[1:3] == ["second\nshort\n", "third\n"]
    paragraphs = [f"one\n{long}\n\n{other}\n\nend", f"one\n{long}\n\nnew\n\n{other}\n \n\nrest"]
    assert cleaned(tmp_path, paragraphs, LinesConfig(unit="paragraph")) == [paragraphs[0], "new\n\nrest"]


def test_ranges_bring_equal_keys_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external, "RUN_RECORDS", 1000)
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 1 << 63, 3000, dtype=np.uint64)[rng.integers(0, 3000, 20_000)] * np.uint64(2)
    for number in range(3):
        with write_runs(tmp_path / str(number)) as runs:
            for first in range(number * 7000, min(number * 7000 + 7000, 20_000), 700):
                runs.add(keys[first : first + 700], np.arange(first, min(first + 700, 20_000), dtype=np.uint64))
    with write_runs(tmp_path / "empty"):
        pass
    paths = [tmp_path / name for name in ("0", "empty", "1", "2")]
    for budget in (1, 16 * 500, 1 << 30):
        found = list(ranges(paths, budget_bytes=budget))
        assert len(found) == 1 if budget > 1 << 20 else len(found) > 10
        together = np.concatenate(found)
        assert (
            together.dtype == PAIR
            and (np.sort(together["where"]) == np.arange(20_000)).all()
            and (keys[together["where"]] == together["key"]).all()
        )
        assert sum(len(set(each["key"].tolist())) for each in found) == len(set(keys.tolist()))
        for keep in (1, 3):
            later = np.sort(np.concatenate([repeated(each, keep=keep)[0] for each in found]))
            seen: dict[int, int] = {}
            expected = []
            for place, key in enumerate(keys.tolist()):
                seen[key] = seen.get(key, 0) + 1
                if seen[key] > keep:
                    expected.append(place)
            assert later.tolist() == expected


# ------------------------------------------------------------------------------------------------- in a build


def repeats_config(tmp_path: Path, dedup: dict[str, Any], **more: Any) -> DataConfig:
    output = more.pop("output", tmp_path / "out")
    rng = random.Random(2)
    vocabulary = [f"w{number}" for number in range(2000)]
    passage = " ".join(rng.choices(vocabulary, k=80))
    line = "A line that every page of this site has at its end, for good reasons."
    texts = [
        f"{' '.join(rng.choices(vocabulary, k=150))}\n{f'{n} {passage} {n}' if n % 4 == 1 else ''}\n{line}\nEnd {n}." for n in range(40)
    ]
    texts[7] = passage.upper()  # nothing is left of it
    for part in range(4):
        (tmp_path / f"raw{part}.jsonl").write_bytes(jsonl(texts[10 * part : 10 * part + 10]))
    sources = [
        {"name": "web", "files": [str(tmp_path / f"raw{part}.jsonl") for part in (2, 3)]},
        {"name": "old", "files": [str(tmp_path / f"raw{part}.jsonl") for part in (0, 1)]},
    ]
    tree = {"sources": sources, "tokenizer": {"type": "bytes"}, "validation": {"fraction": 0.3}, "packing": [], "dedup": dedup, **more}
    return corpus_config(tmp_path, output, **tree)


def texts_of(dataset: Dataset) -> list[str]:
    opened = open_dataset(dataset.path)
    return [document.text for documents in (opened.documents, opened.heldout) for document in documents]


BOTH = {"lines": {}, "substring": {}}


def test_a_build_cuts_repeats_and_its_books_balance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.inputs.TASK_BYTES", 1)
    dataset = build(repeats_config(tmp_path, BOTH), quiet=True)
    texts = texts_of(dataset)
    assert len(texts) == 39 and sum("A line that every page" in text for text in texts) == 1
    opened = open_dataset(dataset.path)
    assert sum(text.count("\nEnd") for text in texts) == 39
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    ledger.balance(chain=["read", "normalise", "dedup", "lines", "substring", "encode"])
    assert ledger.total("lines").notes == {"cuts": 38, "documents_cut": 38} and ledger.total("lines").dropped == {}
    assert ledger.total("substring").dropped["repeated"].documents == 1
    assert ledger.total("substring").notes == {"cuts": 9, "documents_cut": 9}
    assert {document.source for document in opened.documents} == {"web", "old"}
    before = digests(dataset.path)
    again = build(repeats_config(tmp_path, BOTH, workers=2, output=tmp_path / "again"), quiet=True)
    assert without_report(digests(again.path)) == without_report(before)


def without_report(found: dict[str, str]) -> dict[str, str]:
    """It is titled by the folder's name."""
    return {name: digest for name, digest in found.items() if name not in ("report.html", "report.json")}


def test_killed_or_changed_the_build_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = digests(build(repeats_config(tmp_path, BOTH, output=tmp_path / "whole"), quiet=True).path)

    def fails(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    config = repeats_config(tmp_path, BOTH)
    for place in ("data_pipeline.dedup.edit.find_cuts", "data_pipeline.dedup.edit.cut_out", "data_pipeline.stages.make_tokenizer"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(place, fails)
            build(config, quiet=True)
    dataset = build(config, quiet=True)
    assert without_report(digests(dataset.path)) == without_report(expected)
    work = tmp_path / "out.work" / "edited"
    assert sorted({path.suffix for path in work.iterdir()}) == [".cuts", ".documents"]
    build(repeats_config(tmp_path, {}), quiet=True, replace=True)
    assert list(work.iterdir()) == []


def test_without_the_new_keys_the_config_is_as_it_was(tmp_path: Path) -> None:
    assert set(repeats_config(tmp_path, {}).content()["dedup"]) == {"exact", "minhash"}
