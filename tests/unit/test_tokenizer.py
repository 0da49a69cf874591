"""If this fails, text does not come back from its tokens, or the same text gives other tokens elsewhere."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.config import TokenizerConfig
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.tokenizer.byte_level import EOD_TOKEN, byte_alphabet, bytes_tokenizer_json
from data_pipeline.tokenizer.encode import Encoder
from data_pipeline.tokenizer.facts import facts_of, prepared, read_pretrained
from data_pipeline.tokenizer.pieces import MAX_RUN, pieces, training_pieces
from data_pipeline.tokenizer.train import train_bpe, train_unigram
from tests.data_fixtures import tiny_texts
from tests.paths import ROOT

TEXTS = [
    *tiny_texts(60, seed=5),
    "def f(x):\n    return x + 1\n\n\n" * 30,
    "Straße, naïve café: 1234567 €5.\r\n" * 20,
    "I'll we'LL don't " * 30,
]
HARD = [
    *("a" + " " * n + "b" for n in range(65)),
    *(" " * n + "x" for n in range(65)),
    "\t\tif x:\n\t\t\ty\r\n\r\n\n\n  \n z ",
    "1 234,5 000123456",
    "e\u0301 \u00e9 \u1e9b\u0323",
    "👩‍👩‍👧‍👦 🏳️‍🌈 漢字 עברית",
    "\u00a0x\u2028y\u3000z\ufeff",
    "nul\0bell\a del\x7f",
    "trailing newline\n",
    "",
    " ",
]


@pytest.fixture(scope="module", params=["gpt2", "llama3", "unigram", "bytes"])
def encoder(request: pytest.FixtureRequest) -> Encoder:
    if request.param == "bytes":
        return Encoder(bytes_tokenizer_json(), is_bytes=True)
    if request.param == "unigram":
        return Encoder(train_unigram(iter(TEXTS), TokenizerConfig(type="unigram", vocab_size=600, pretokenizer="llama3")))
    return Encoder(trained(request.param))


def trained(pretokenizer: str, vocab_size: int = 700, texts: list[str] | None = None) -> str:
    config = TokenizerConfig(type="bpe", vocab_size=vocab_size, pretokenizer=pretokenizer)  # type: ignore[arg-type]
    return train_bpe(iter(TEXTS if texts is None else texts), config)


def test_b001_every_text_comes_back(encoder: Encoder) -> None:
    for text in HARD:
        assert encoder.decode(encoder.encode(text).tolist()) == text
        assert encoder.decode_bytes(encoder.encode(text).tolist()) == text.encode()


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_b001_any_text_comes_back(encoder: Encoder, text: str) -> None:
    assert encoder.decode_bytes(encoder.encode(text).tolist()) == text.encode()


def test_b002_bytes_never_seen_in_training_are_not_lost() -> None:
    text = trained("gpt2", 300, ["aaa bbb " * 20])
    facts, encoder = facts_of(text, type="bpe"), Encoder(text)
    for word in ("zß漢🙂" + chr(7), "".join(map(chr, range(0x180)))):
        ids = encoder.encode(word)
        assert encoder.decode(ids.tolist()) == word
        assert ids.max() < facts.vocabulary.size
    assert set(byte_alphabet()) <= set(json.loads(text)["model"]["vocab"])
    assert facts.vocabulary.size < 300  # no more pairs to merge than the text has


def test_b003_the_same_corpus_gives_the_same_vocabulary_whatever_its_order_or_the_threads(tmp_path: Path) -> None:
    texts = [*TEXTS, "bbbaaaddddcccc"]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    code = (
        "import json, random, sys, hashlib; from data_pipeline.config import TokenizerConfig; from data_pipeline.tokenizer.train import train_bpe; "
        f"texts = json.load(open({str(tmp_path / 'texts.json')!r})); random.Random(int(sys.argv[1])).shuffle(texts); "
        "print(hashlib.sha256(train_bpe(iter(texts), TokenizerConfig(type='bpe', vocab_size=700)).encode()).hexdigest())"
    )
    digests = set()
    for shuffle, hash_seed, threads in (("0", "0", "1"), ("1", "1", "4"), ("2", "2", "2"), ("3", "random", "4")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "true"}
        done = subprocess.run([sys.executable, "-c", code, shuffle], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120)
        assert done.returncode == 0, done.stderr
        digests.add(done.stdout.strip())
    digests.add(hashlib.sha256(trained("gpt2", 700, texts).encode()).hexdigest())
    assert len(digests) == 1


def test_ties_merge_by_the_smaller_ids() -> None:
    """The rule that is written down: highest count first, then the pair with the smaller ids."""
    tree = json.loads(trained("gpt2", 260, ["xy ab " * 10]))
    merges = [tuple(merge) for merge in tree["model"]["merges"]]
    assert merges[:2] == [("a", "b"), ("x", "y")]  # the second may be (Ġ, ab) only if it were more frequent


def test_trained_vocabulary_is_the_golden_one() -> None:
    """Made by this code with tokenizers 0.23; another hash means that the library's training changed."""
    texts = [" ".join(f"w{i * j % 97}" for j in range(50)) for i in range(40)]
    model = json.loads(trained("gpt2", 400, texts))["model"]
    assert hashlib.sha256(json.dumps([model["vocab"], model["merges"]]).encode()).hexdigest() == GOLDEN


GOLDEN = "8bda3ebc0c9c20a0df93ab3abf4cc3d011847dcc4916b18fbff6ca6a74f200c9"


def test_b006_streamed_text_is_the_full_decode(encoder: Encoder) -> None:
    ids = [*encoder.encode("é🙂漢 and ascii").tolist(), *(random.Random(0).randrange(256) for _ in range(300))]
    stream = encoder.stream()
    got = "".join(stream.feed(id) for id in ids) + stream.finish()
    assert got == encoder.decode_bytes(ids).decode("utf-8", "replace")
    alone = encoder.stream()
    first = next(id for id in range(300) if encoder.decode_bytes([id]) == b"\xc3")
    assert alone.feed(first) == "" and alone.finish() == "\ufffd"


def test_b007_a_reloaded_tokenizer_is_the_same(tmp_path: Path, encoder: Encoder) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(encoder._json_text, encoding="utf-8")
    again = Encoder.open(path)
    for text in [*HARD, *TEXTS]:
        assert again.encode(text).tolist() == encoder.encode(text).tolist()


def test_b008_dropout_truncation_and_padding_of_a_file_never_reach_the_data() -> None:
    tree = json.loads(trained("gpt2"))
    tree["model"]["dropout"] = 0.5
    tree["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    tree["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    text = prepared(json.dumps(tree), where="x")
    cleaned = json.loads(text)
    assert cleaned["model"]["dropout"] is None and cleaned["truncation"] is None and cleaned["padding"] is None
    first = Encoder(text).encode("what all were but not had one by or have " * 5)
    assert all((Encoder(text).encode("what all were but not had one by or have " * 5) == first).all() for _ in range(5))
    assert prepared(trained("gpt2"), where="x") == trained("gpt2")  # nothing to take away: not a byte changes


def test_b009_special_tokens_are_never_made_from_text_nor_added(encoder: Encoder) -> None:
    facts = facts_of(encoder._json_text, type="bpe")
    for text in (EOD_TOKEN, f"a{EOD_TOKEN}b", f" {EOD_TOKEN} {EOD_TOKEN}"):
        ids = encoder.encode(text)
        assert facts.vocabulary.eod_id not in ids.tolist()
        assert encoder.decode(ids.tolist()) == text
    assert encoder.encode("").size == 0
    assert encoder.decode([facts.vocabulary.eod_id]) == EOD_TOKEN


def test_a_post_processor_that_adds_tokens_is_not_used() -> None:
    tree = json.loads(trained("gpt2"))
    piece = {"SpecialToken": {"id": EOD_TOKEN, "type_id": 0}}
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [piece, {"Sequence": {"id": "A", "type_id": 0}}, piece],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {EOD_TOKEN: {"id": EOD_TOKEN, "ids": [0], "tokens": [EOD_TOKEN]}},
    }
    assert Encoder(json.dumps(tree)).encode("the and").tolist() == Encoder(trained("gpt2")).encode("the and").tolist()


def test_bytes_are_what_the_library_makes_of_the_same_file() -> None:
    encoder = Encoder(bytes_tokenizer_json(), is_bytes=True)
    library = Encoder(bytes_tokenizer_json())
    for text in [*HARD, *TEXTS, f"x{EOD_TOKEN}y"]:
        assert encoder.encode(text).tolist() == library.encode(text).tolist() == list(text.encode())


@pytest.mark.parametrize("pretokenizer", ["gpt2", "llama3"])
def test_long_texts_are_cut_where_no_token_changes(pretokenizer: str) -> None:
    encoder = Encoder(trained(pretokenizer))
    text = "".join(TEXTS) + "x\n\ny 'll z's it's\n 'tis. \nend.\nnext\t\tab  cd" * 20
    whole = encoder._tokenizer.encode(text, add_special_tokens=False).ids
    for limit in (60, 61, 97, 250, 1000, 4001):
        parts = list(pieces(text, limit=limit))
        assert "".join(parts) == text and all(len(part) <= limit for part in parts) and len(parts) > 1
        joined = [id for part in parts for id in encoder._tokenizer.encode(part, add_special_tokens=False).ids]
        assert joined == whole or limit < 100  # below, a stretch without a safe place may be cut
    assert encoder.encode(text).tolist() == whole


@pytest.mark.parametrize("unit", ["x", " ", "=", "\n", "é", "漢"])
def test_unbroken_runs_take_linear_time_and_come_back(encoder: Encoder, unit: str) -> None:
    """Four times the run must not take twelve times as long (sixteen is quadratic), in the best of three; quadratic libraries took hours
    for 16 MB."""
    assert any(_growth(encoder, unit) < 12 for _ in range(3))


def _growth(encoder: Encoder, unit: str) -> float:
    times = []
    for length in (150_000, 600_000):
        run = unit * length
        start = time.process_time()
        ids = encoder.encode(run)
        times.append(time.process_time() - start)
        assert encoder.decode_bytes(ids.tolist()) == run.encode()
    return times[1] / max(times[0], 0.05)


def test_training_on_a_monstrous_run_is_quick() -> None:
    start = time.process_time()
    trained("gpt2", 600, ["x" * 1_000_000, " " * 1_000_000, "the and " * 50])
    assert time.process_time() - start < 20
    run = "ab" * MAX_RUN
    assert list(training_pieces("x " + run + " y")) == ["x ", run[:MAX_RUN], run[MAX_RUN : 2 * MAX_RUN] + " y"]
    for text in (*HARD, "a" * 5000, " " * 5000 + "b" * 2000 + "c d"):
        assert "".join(training_pieces(text)) == text


def test_token_bytes_count_what_a_text_has(encoder: Encoder) -> None:
    facts = facts_of(encoder._json_text, type="bpe")
    for text in [*HARD, *TEXTS]:
        assert facts.token_bytes[encoder.encode(text).astype(np.int64)].sum() == len(text.encode())
    assert facts.token_bytes[facts.vocabulary.eod_id] == 0


def sentencepiece_like() -> str:
    """A tokenizer.json as Llama 2 has it: metaspace, byte fallback, BOS and EOS."""
    special = [
        {"id": i, "content": t, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i, t in enumerate(["<unk>", "<s>", "</s>"])
    ]
    vocab = {
        "<unk>": 0,
        "<s>": 1,
        "</s>": 2,
        **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)},
        "\u2581": 259,
        "a": 260,
        "\u2581a": 261,
        "é": 262,
    }
    tree = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": None, "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": True,
                  "byte_fallback": True, "ignore_merges": False, "vocab": vocab, "merges": [["\u2581", "a"]]},
    }  # fmt: skip
    return json.dumps(tree)


def test_a_pretrained_tokenizer_of_another_kind(tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "tokenizer.json").write_text(sentencepiece_like(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>"}))
    text, named = read_pretrained(str(folder))
    assert named == {"eos_token": "</s>", "bos_token": "<s>"}
    facts = facts_of(text, type="pretrained", eod_token=named["eos_token"], bos_token=named["bos_token"])
    assert (facts.vocabulary.eod_id, facts.vocabulary.bos_id, facts.vocabulary.begin_id, facts.vocabulary.size) == (2, 1, 1, 263)
    encoder = Encoder(text, can_cut=False)
    for sample in (" a aé\n漢", "</s> a"):
        ids = encoder.encode(sample)
        assert 2 not in ids.tolist() and encoder.decode(ids.tolist()) == sample
        assert facts.token_bytes[ids.astype(np.int64)].sum() == len(sample.encode())
    stream = encoder.stream()
    ids_ = encoder.encode(" a漢é").tolist()
    assert "".join(stream.feed(id) for id in ids_) + stream.finish() == " a漢é"


STRIPPED = {"type": "Strip", "content": " ", "start": 1, "stop": 0}  # as Llama 2 has it
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}  # as T5 has it


@pytest.mark.parametrize("kind", ["strip", "metaspace"])
def test_what_follows_a_text_keeps_its_space(kind: str) -> None:
    """Tokenizers that take the space off a text's first token: behind a text it stays, in whole answers, streams and single tokens."""
    tree = json.loads(sentencepiece_like())
    decoders = tree["decoder"]["decoders"]
    if kind == "strip":
        decoders.append(STRIPPED)
    else:
        tree["decoder"] = {"type": "Sequence", "decoders": [METASPACE, *decoders[1:]]}
    encoder, (space, a, word, unlike) = Encoder(json.dumps(tree), can_cut=False), range(259, 263)
    kanji = [3 + byte for byte in "漢".encode()]
    assert (encoder.decode([word, a]), encoder.decode([word, a], after=[word])) == ("aa", " aa")
    assert (encoder.texts([word, word, space, a]), encoder.texts([word, space], after=[a])) == (["a", " a", " ", "a"], [" a", " "])
    draw = random.Random(0)
    for _ in range(60):
        before, ids = (
            [token for _ in range(draw.choice([*range(1, 12), 150])) for token in draw.choice([[space], [a], [word], kanji])] for _ in "12"
        )
        want = encoder.decode([*before, *ids])[len(encoder.decode(before)) :]
        stream = encoder.stream(after=before)
        assert want == encoder.decode(ids, after=before) == "".join(map(stream.feed, ids)) + stream.finish()
    assert encoder.stream(after=kanji).feed(unlike) == "é" and encoder.texts(kanji[:1], after=kanji) == ["\ufffd"]
    assert encoder.decode([word], after=kanji) == " a"  # though of bytes alone nothing was kept


def test_a_begin_that_is_the_end_counts_as_none() -> None:
    """GPT-2 names the same token for both; a document's end then stands before the next."""
    facts = facts_of(trained("gpt2"), type="pretrained", eod_token=EOD_TOKEN, bos_token=EOD_TOKEN)
    assert facts.vocabulary.bos_id is None and facts.vocabulary.begin_id == facts.vocabulary.eod_id


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        facts_of("{}", type="pretrained")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        prepared("[1, 2", where="x")
    with pytest.raises(ConfigError, match=r"tokenizer\.name_or_path.*hf download"):
        read_pretrained(str(tmp_path))
    with pytest.raises(ConfigError, match=r"eod_token.*a token of"):
        facts_of(trained("gpt2"), type="pretrained", eod_token="</none>")
    tree = json.loads(trained("gpt2"))
    tree["added_tokens"] = []
    del tree["model"]["vocab"][EOD_TOKEN]
    with pytest.raises(ConfigError, match="the token of x that ends a document"):
        facts_of(json.dumps(tree), type="pretrained", where="x")
    with pytest.raises(DataError, match="no text is left"):
        train_bpe(iter([]), TokenizerConfig())


def test_vocabularies_with_added_tokens_count_them() -> None:
    """A library's `vocab_size` leaves them out; an end id past it would wrap in a narrow dtype."""
    tree = json.loads(trained("gpt2"))
    tree["added_tokens"].append({**tree["added_tokens"][0], "id": 70_000, "content": "<|late|>"})
    facts = facts_of(json.dumps(tree), type="pretrained", eod_token="<|late|>")
    assert facts.vocabulary.size == 70_001 and facts.token_bytes.size == 70_001


def test_the_file_loads_in_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    text = trained("gpt2")
    facts = facts_of(text, type="bpe")
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(facts.config_json(), encoding="utf-8")
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for sample in TEXTS:
        assert theirs.encode(sample, add_special_tokens=False) == Encoder(text).encode(sample).tolist()
    assert theirs.eos_token_id == facts.vocabulary.eod_id
