"""If this fails, fill in the middle loses text, depends on workers or shards, or touches documents that it shouldn't."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.build import build
from data_pipeline.cache_key import cache_key
from data_pipeline.config import DataConfig
from data_pipeline.decontaminate.check import check_dataset, config_for
from data_pipeline.earlier import Earlier
from data_pipeline.errors import ConfigError
from data_pipeline.fim import Fim, FimConfig, fim_of, text_order
from data_pipeline.notebook import OpenDataset, open_dataset
from data_pipeline.pool import Workers
from data_pipeline.progress import Progress
from data_pipeline.schema import validate
from data_pipeline.show import show_dataset, show_document
from data_pipeline.tokenizer.byte_level import bytes_tokenizer_json
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.tokenizer.fertility import HEAD, compare
from data_pipeline.trace import trace
from data_pipeline.verify import verify_dataset
from data_pipeline.words import words
from tests.data_fixtures import tiny_texts

SPECIALS = {"<|endoftext|>": 0, "<|fim_prefix|>": 1, "<|fim_suffix|>": 2, "<|fim_middle|>": 3}
FIM = Fim(rate=1.0, spm_rate=0.5, seed=1234, prefix_id=1, suffix_id=2, middle_id=3)
TEXTS = [*tiny_texts(200, seed=8, max_words=30), "", "x", "漢字 Grüße"]


def built(folder: Path, *, workers: int = 1, files: int = 1, **more: Any) -> OpenDataset:
    (folder / "raw").mkdir(parents=True)
    for number in range(files):
        (folder / "raw" / f"{number}.txt").write_text("\n\n".join(TEXTS), encoding="utf-8")
    tree = {
        "output": str(folder / "d"),
        "sources": [{"name": f"web{n}", "files": str(folder / f"raw/{n}.txt"), "txt_documents": "paragraph"} for n in range(files)],
        "tokenizer": {"type": "bpe", "vocab_size": 320, "special_tokens": SPECIALS},
        "validation": {"fraction": 0.1},
        "dedup": None,
        "workers": workers,
        **more,
    }
    return open_dataset(build(validate(DataConfig, tree), quiet=True).path)


def test_every_character_is_there_once_in_either_order() -> None:
    encoder = Encoder(bytes_tokenizer_json(), is_bytes=True)
    modes = set()
    for spm_rate in (0.0, 0.5, 1.0):
        fim = Fim(rate=0.7, spm_rate=spm_rate, seed=3, prefix_id=300, suffix_id=301, middle_id=302)
        ids = [f"{number:032x}" for number in range(len(TEXTS))]
        for text, id, tokens in zip(TEXTS, ids, fim.encode_batch(encoder, TEXTS, ids)):
            order = text_order(tokens, fim)
            cut = fim.cut(id, len(text))
            if cut is None:
                assert order is None and bytes(tokens.tolist()).decode() == text
                modes.add("plain")
                continue
            first, last, suffix_first = cut
            parts = {"pre": text[:first], "mid": text[first:last], "suf": text[last:]}
            spelled = [300, 301, *parts["suf"].encode(), 302, *parts["pre"].encode(), *parts["mid"].encode()]
            if not suffix_first:
                spelled = [300, *parts["pre"].encode(), 301, *parts["suf"].encode(), 302, *parts["mid"].encode()]
            assert order is not None and bytes(tokens[order].tolist()).decode() == text
            if first or suffix_first:
                assert tokens.tolist() == spelled
            modes.add("spm" if suffix_first else "psm")
    assert modes == {"plain", "spm", "psm"}


def test_rates_are_kept_and_cuts_are_spread() -> None:
    fim = Fim(rate=0.3, spm_rate=0.25, seed=1, prefix_id=1, suffix_id=2, middle_id=3)
    cuts = [fim.cut(f"{number:032x}", 1000) for number in range(20_000)]
    some = [cut for cut in cuts if cut is not None]
    assert abs(len(some) / len(cuts) - 0.3) < 0.02 and abs(np.mean([cut[2] for cut in some]) - 0.25) < 0.03
    assert abs(np.mean([cut[1] - cut[0] for cut in some]) - 1000 / 3) < 15  # of two uniform places
    other = Fim(rate=0.3, spm_rate=0.25, seed=2, prefix_id=1, suffix_id=2, middle_id=3)
    assert [other.cut(f"{number:032x}", 1000) for number in range(50)] != cuts[:50]


def test_in_a_build_by_source_and_only_for_training(tmp_path: Path) -> None:
    """Nothing of the held-out documents changes, nor of other sources; the same with two workers."""
    off = built(tmp_path / "off", files=2)
    on = built(tmp_path / "on", files=2, fim={"rate": 0.6, "sources": ["web1"]})
    again = built(tmp_path / "again", files=2, workers=2, fim={"rate": 0.6, "sources": ["web1"]})
    assert on.dataset.identity == again.dataset.identity != off.dataset.identity
    verify_dataset(on.dataset.path, quiet=True)
    fim = fim_of(FimConfig(rate=0.6), tokenizer_json=on.dataset.tokenizer_path.read_text(), seed=1234)
    assert fim is not None
    for one, two in zip(off.heldout, on.heldout, strict=True):
        np.testing.assert_array_equal(one.tokens, two.tokens)
    changed = 0
    for one, two in zip(off.documents, on.documents, strict=True):
        order = text_order(two.tokens[:-1], fim)
        if order is None:
            np.testing.assert_array_equal(one.tokens, two.tokens)
        else:
            assert two.source == "web1" and on.decode(two.tokens[order]) == one.text
            changed += 1
    assert 0.4 < changed / len(on.documents.of("web1")) < 0.8
    assert "fim" not in off.dataset.manifest.config and on.dataset.manifest.config["fim"]["rate"] == 0.6


def test_a_token_is_traced_to_its_place_in_the_text(tmp_path: Path) -> None:
    """Not to its place among the rearranged tokens."""
    data = built(tmp_path / "d", fim={"rate": 1.0})
    texts = {document.id: data.decode(document.tokens[text_order(document.tokens[:-1], FIM)]) for document in data.documents}
    rows = data.rows(64).source
    checked = 0
    for sample in range(0, len(rows), 5):
        for position in range(0, rows[sample].num_targets, 7):
            origin = trace(rows, sample, position)
            if origin.token_id < 4:
                assert origin.first_byte is None and origin.first_character is None
                continue
            text = texts[origin.document].encode()
            assert origin.first_byte is not None and origin.last_byte is not None and origin.first_character is not None
            assert text[origin.first_byte : origin.last_byte + 1].decode("utf-8", "replace") == origin.token
            assert texts[origin.document][: origin.first_character] == text[: origin.first_byte].decode("utf-8", "ignore")
            checked += 1
    assert checked > 50


# ------------------------------------------------------------------------------------------------- readers of a finished dataset


@pytest.fixture(scope="module")
def rearranged(tmp_path_factory: pytest.TempPathFactory) -> OpenDataset:
    """Every training document rearranged."""
    return built(tmp_path_factory.mktemp("rearranged"), fim={"rate": 1.0})


def kept_texts(*datasets: OpenDataset) -> list[str]:
    """From the stored tokens alone, in the order of the shards."""
    found = []
    for data in datasets:
        for document in [*data.documents, *data.heldout]:
            tokens = document.tokens[:-1]
            order = text_order(tokens, FIM)
            found.append(data.decode(tokens if order is None else tokens[order]))
    return found


def test_in_a_notebook_a_document_has_its_own_text(rearranged: OpenDataset) -> None:
    documents = [*rearranged.documents, *rearranged.heldout]
    assert sorted(document.text for document in documents) == sorted(text for text in TEXTS if text)
    assert sum(int(document.tokens[0] == FIM.prefix_id) for document in documents) == len(rearranged.documents)
    first = rearranged.documents[0]
    assert rearranged.documents[first.id].text == first.text
    assert {piece.document.text for row in rearranged.rows(64) for piece in row.pieces} == {each.text for each in rearranged.documents}


def test_copies_of_what_an_earlier_dataset_rearranged_are_found(rearranged: OpenDataset, tmp_path: Path) -> None:
    """And an index in which its tokens were read as they lie isn't taken for one of its texts."""
    new = "A text that was not there before and is like none of them."
    (tmp_path / "raw.txt").write_text("\n\n".join([*TEXTS, new]), encoding="utf-8")
    tree = {
        "output": str(tmp_path / "d"),
        "sources": [{"name": "web", "files": str(tmp_path / "raw.txt"), "txt_documents": "paragraph"}],
        "tokenizer": {"type": "bytes"},
        "validation": {"fraction": 0.0},
        "dedup": {"earlier": [str(rearranged.dataset.path)], "minhash": None},
    }
    grown = build(validate(DataConfig, tree), quiet=True)
    assert [document.text for document in open_dataset(grown.path).documents] == [new]
    plain = open_dataset(build(validate(DataConfig, {**tree, "output": str(tmp_path / "plain"), "dedup": None}), quiet=True).path)
    for data, as_before in ((rearranged, False), (plain, True)):
        index = Earlier(str(data.dataset.path), 0).index(None, folder=tmp_path / "i", workers=Workers(1), progress=Progress(quiet=True))
        assert (index.stem == cache_key("dedup", "index", data.dataset.identity, None)) == as_before


def test_evaluations_are_looked_for_in_the_text(rearranged: OpenDataset, tmp_path: Path) -> None:
    longest = max(range(len(rearranged.documents)), key=lambda number: len(rearranged.documents[number].tokens))
    text = kept_texts(rearranged)[longest]
    (tmp_path / "exam.jsonl").write_text(json.dumps({"question": text}) + "\n")
    check_dataset(rearranged.dataset.path, config_for([str(tmp_path / "exam.jsonl")]), output=tmp_path / "found.jsonl", quiet=True)
    lines = [json.loads(line) for line in (tmp_path / "found.jsonl").read_text().splitlines()]
    (found,) = [line for line in lines if line["document"]["id"] == rearranged.documents[longest].id]
    assert found["words"] == found["of"] == len(words(text)) >= 13


def test_tokenizers_are_measured_and_samples_shown_by_the_text(rearranged: OpenDataset, capsys: pytest.CaptureFixture[str]) -> None:
    texts = kept_texts(rearranged)
    training = texts[: len(rearranged.documents)]
    (row,) = compare(rearranged.dataset, (), max_bytes=1 << 20)
    assert dict(zip(HEAD, row))["bytes"] == f"{sum(len(text.encode()) for text in training):,}"
    report = (rearranged.dataset.path / "report.html").read_text(encoding="utf-8")
    for number in (0, len(training) // 2, len(training) - 1):
        assert f"<pre>{html.escape(training[number])}</pre>" in report
    show_document(rearranged.dataset.path, rearranged.documents[0].id, tokens=False)
    assert capsys.readouterr().out.endswith(f"tokens\n{training[0]}\n")
    show_dataset(rearranged.dataset.path, number=2, tokens=False)
    out = capsys.readouterr().out
    assert f"\n{training[0]}\n" in out and f"\n{training[-1]}\n" in out
    show_document(rearranged.dataset.path, rearranged.documents[0].id, tokens=True)
    assert "1:'<|fim_prefix|>'" in capsys.readouterr().out  # as they are stored


def test_tokens_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fim\.prefix_token: got '<\|fim_prefix\|>', wanted a special token.*it has <\|endoftext\|>"):
        built(tmp_path / "a", tokenizer={"type": "bpe", "vocab_size": 300}, fim={})
    with pytest.raises(ConfigError, match="names of sources"):
        built(tmp_path / "b", fim={"sources": ["nowhere"]})
