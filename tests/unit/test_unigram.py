"""If this fails, a unigram tokenizer differs from run to run, loses text, or a special token has another id than was stated."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.build import build
from data_pipeline.config import DataConfig, TokenizerConfig, load_data_config
from data_pipeline.errors import ConfigError
from data_pipeline.notebook import open_dataset
from data_pipeline.schema import validate
from data_pipeline.tokenizer.byte_level import EOD_TOKEN
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.tokenizer.facts import facts_of
from data_pipeline.tokenizer.fertility import measure, report
from data_pipeline.tokenizer.special import arranged
from data_pipeline.tokenizer.train import train_bpe, train_unigram
from data_pipeline.tokenizer.unigram import _digamma, _Model, learn_pieces
from data_pipeline.tokenizer.unigram_kernels import count_best, expect
from data_pipeline.verify import verify_dataset
from tests.data_fixtures import tiny_dataset, tiny_texts
from tests.paths import ROOT, corpora

WORDS = Counter({b"low": 5, b"lower": 2, b"newest": 6, b"widest": 3, b"xyxyxy": 4})


def config_of(**keys: Any) -> TokenizerConfig:
    return validate(TokenizerConfig, {"type": "unigram", "vocab_size": 400, **keys})


def cuts(word: bytes) -> list[list[bytes]]:
    """Every way to cut a word."""
    out = []
    for marks in product((False, True), repeat=len(word) - 1):
        places = [0, *(n + 1 for n, mark in enumerate(marks) if mark), len(word)]
        out.append([word[a:b] for a, b in zip(places, places[1:])])  # noqa: RUF007
    return out


def test_expectations_and_best_cuts_are_those_of_trying_every_cut() -> None:
    model = _Model(WORDS, num_seeds=1000)
    model.fit()
    score = {model._text[a : a + n].tobytes(): s for a, n, s in zip(model._place, model._length, model.logp)}
    number = {piece: n for n, piece in enumerate(score)}
    expected, frequency = np.zeros(len(score)), np.zeros(len(score))
    for word, count in WORDS.items():
        known = [cut for cut in cuts(word) if all(piece in score for piece in cut)]
        weights = [math.exp(sum(score[piece] for piece in cut)) for cut in known]
        for cut, weight in zip(known, weights):
            for piece in cut:
                expected[number[piece]] += count * weight / sum(weights)
        for piece in known[int(np.argmax(weights))]:
            frequency[number[piece]] += count
    got_expected, got_frequency = np.zeros(len(score)), np.zeros(len(score))
    expect(model._starts, model._counts, model._ids, model.logp, got_expected)
    count_best(model._starts, model._counts, model._ids, model.logp, got_frequency)
    np.testing.assert_allclose(got_expected, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(got_frequency, frequency)


def test_pieces_are_the_frequent_ones_and_all_bytes() -> None:
    pieces = learn_pieces(WORDS, 262)
    assert {piece for piece, _ in pieces} == {*WORDS, *(bytes([byte]) for byte in range(256))}  # one word each explains them best
    assert [score for _, score in pieces] == sorted((score for _, score in pieces), reverse=True)
    assert len(learn_pieces(Counter({b"a": 3}), 300)) == 256
    np.testing.assert_allclose(_digamma(np.array([0.5, 1.0, 10.0])), [-1.9635100260214235, -0.5772156649015329, 2.2517525890667211])


def test_b003_the_same_corpus_gives_the_same_pieces_whatever_its_order_or_the_threads(tmp_path: Path) -> None:
    """The library's own unigram training does not: its scores differ from run to run."""
    texts = tiny_texts(60, seed=5)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    code = (
        "import json, random, sys, hashlib; from data_pipeline.config import TokenizerConfig; from data_pipeline.tokenizer.train import train_unigram; "
        f"texts = json.load(open({str(tmp_path / 'texts.json')!r})); random.Random(int(sys.argv[1])).shuffle(texts); "
        "print(hashlib.sha256(train_unigram(iter(texts), TokenizerConfig(type='unigram', vocab_size=400)).encode()).hexdigest())"
    )
    digests = {hashlib.sha256(train_unigram(iter(texts), config_of()).encode()).hexdigest()}
    for shuffle, threads in (("1", "1"), ("2", "4")):
        environment = {**os.environ, "PYTHONHASHSEED": shuffle, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        done = subprocess.run([sys.executable, "-c", code, shuffle], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    assert len(digests) == 1


@pytest.mark.parametrize("type", ["bpe", "unigram"])
def test_special_tokens_have_the_stated_ids_and_are_never_made_from_text(type: str) -> None:
    """B009 for more than one special token; an id past the last learned token leaves tokens between that nothing makes."""
    specials = {"<|bos|>": 3, EOD_TOKEN: 299, "PAD": 0}
    config = config_of(type=type, vocab_size=300, special_tokens=specials, bos_token="<|bos|>")
    train = train_bpe if type == "bpe" else train_unigram
    texts = ["PAD PAD PAD <|bos|> x " * 20, *tiny_texts(20)]
    text = train(iter(texts), config)
    facts = facts_of(text, type=type, eod_token=EOD_TOKEN, bos_token="<|bos|>")
    assert (facts.vocabulary.eod_id, facts.vocabulary.bos_id, facts.vocabulary.size) == (299, 3, 300)
    assert [facts.token_bytes[id] for id in specials.values()] == [0, 0, 0]
    encoder = Encoder(text)
    for sample in [*texts, f"a{EOD_TOKEN}b<|bos|>PAD", "PAD", "<|unused_7|>"]:
        ids = encoder.encode(sample).tolist()
        assert not set(ids) & set(specials.values()) and encoder.decode(ids) == sample
        assert facts.token_bytes[ids].sum() == len(sample.encode())
    assert arranged({"e": 5, "b": 1}, ["x", "y"]) == ["x", "b", "y", "<|unused_3|>", "<|unused_4|>", "e"]


def test_special_tokens_that_cannot_be_are_refused() -> None:
    for keys, why in (
        ({"special_tokens": {"a": 1, "b": 1}}, "an id of its own"),
        ({"special_tokens": {"a": 400}}, "from 0 to 399"),
        ({"special_tokens": {"a": -1}}, "from 0 to 399"),
        ({"eod_token": "</s>"}, "eod_token among special_tokens"),
        ({"special_tokens": {"a": 1}, "bos_token": "b"}, "bos_token among special_tokens"),
        ({"type": "bytes", "special_tokens": {"a": 1}}, "special_tokens for a tokenizer of type bytes|remove it"),
    ):
        with pytest.raises(ConfigError, match=why):
            validate(TokenizerConfig, {"vocab_size": 400, "type": "unigram", **keys} if "type" not in keys else keys)


def test_it_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = train_unigram(
        iter(tiny_texts(30)), config_of(special_tokens={"</s>": 2, "<s>": 1, "<pad>": 0}, eod_token="</s>", bos_token="<s>")
    )
    facts = facts_of(text, type="unigram", eod_token="</s>", bos_token="<s>")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(facts.config_json(), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for sample in [*tiny_texts(5), "Grüße 漢字\n\t x"]:
        assert theirs.encode(sample, add_special_tokens=False) == Encoder(text).encode(sample).tolist()
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.convert_tokens_to_ids("<pad>")) == (2, 1, 0)


def test_it_needs_no_more_tokens_than_the_librarys_own_training() -> None:
    """Same corpus, words and size: fewer tokens than theirs, and within a tenth of BPE's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = (corpora("tinyshakespeare") / "input.txt").read_text(encoding="utf-8")[:300_000]
    parts = text.split("\n\n")
    config = config_of(vocab_size=1500)
    ours = Encoder(train_unigram(iter(parts), config)).encode(text).size
    bpe = Encoder(train_bpe(iter(parts), config_of(type="bpe", vocab_size=1500))).encode(text).size
    theirs = Tokenizer(models.Unigram())
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    theirs.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.UnigramTrainer(vocab_size=1500, special_tokens=[EOD_TOKEN], initial_alphabet=alphabet, show_progress=False)
    theirs.train_from_iterator(parts, trainer=trainer)
    assert ours <= len(theirs.encode(text).ids) and ours <= 1.1 * bpe


def test_a_config_without_special_tokens_is_the_config_that_it_was(tmp_path: Path) -> None:
    (tmp_path / "d.yaml").write_text("output: x\nsources: [{name: a, files: a.txt}]\n")
    assert "special_tokens" not in load_data_config(tmp_path / "d.yaml").content()["tokenizer"]


def test_fertility_counts_what_is_there(tmp_path: Path) -> None:
    """Against counting by hand; a tokenizer that loses text is found out."""
    text = train_bpe(iter(tiny_texts(30)), config_of(type="bpe"))
    texts = ["the of and", "", "Grüße, the 漢字!"]
    encoder, facts = Encoder(text), facts_of(text, type="bpe")
    ids = [id for each in texts for id in encoder.encode(each).tolist()]
    found = measure(encoder, facts.token_bytes, texts)
    assert (found.documents, found.returned, found.words, found.bytes) == (3, 3, 6, sum(len(each.encode()) for each in texts))
    assert (found.tokens, found.single_bytes) == (len(ids), sum(facts.token_bytes[id] == 1 for id in ids))
    assert set(np.flatnonzero(found.used).tolist()) == set(ids)
    assert found.row("web", "own")[4:6] == (f"{len(ids) / 6:.3f}", f"{found.bytes / len(ids):.3f}")
    tree = json.loads(text)
    tree["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "lower.json").write_text(json.dumps(tree))
    dataset = tiny_dataset(tmp_path / "d", {"web": ["The Of", "the of", "x" * 50], "wiki": ["AB ab"]}, num_validation=0)
    lines = report(dataset.path, [str(tmp_path / "lower.json")], max_bytes=10**6).splitlines()
    assert len(lines) == 6 and [line.split()[-3:] for line in lines[2:]] == [
        ["3", "of", "3"],
        ["2", "of", "3"],
        ["1", "of", "1"],
        ["0", "of", "1"],
    ]
    assert measure(Encoder(json.dumps(tree)), facts.token_bytes, ["The"]).lost == ["The"]


def test_a_build_with_it_says_what_it_was_trained_on(tmp_path: Path) -> None:
    """The same sample, and its hash, whatever the order of the files; every text comes back from the shards."""
    folders = []
    texts = tiny_texts(200, seed=3)
    for name, order in (("one", texts), ("two", texts[::-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "raw.txt").write_text("\n".join(order), encoding="utf-8")
        tree = {
            "output": str(tmp_path / name / "d"),
            "sources": [{"name": "web", "files": str(tmp_path / name / "raw.txt"), "txt_documents": "line"}],
            "tokenizer": {
                "type": "unigram",
                "vocab_size": 320,
                "max_train_bytes": 20_000,
                "special_tokens": {"<s>": 7},
                "bos_token": "<s>",
            },
            "validation": {"fraction": 0},
            "workers": 1,
        }
        folders.append(build(validate(DataConfig, tree), quiet=True).path)
    one, two = (open_dataset(folder) for folder in folders)
    about = one.dataset.manifest.tokenizer["trained_on"]
    assert about == two.dataset.manifest.tokenizer["trained_on"] and about["documents"] < 200 and len(about["sha256"]) == 64
    assert one.dataset.tokenizer_hash == two.dataset.tokenizer_hash
    assert (one.dataset.bos_id, one.dataset.eod_id) == (7, 0)
    assert sorted(document.text for document in one.documents) == sorted(texts)
    verify_dataset(one.dataset.path, quiet=True)
    assert f"sample of {about['documents']:,} documents" in report(one.dataset.path, [], max_bytes=10**6)
