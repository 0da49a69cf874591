"""If this fails, near-duplicates are missed, or the speed is paid for with another definition of similarity."""

import itertools
import random
import re
import sys
from collections.abc import Sequence

import numpy as np
import pytest

from data_pipeline import words as words_module
from data_pipeline.dedup import shingles as module
from data_pipeline.dedup.config import DedupConfig, MinHashConfig
from data_pipeline.dedup.minhash import MISS_PROBABILITY, band_keys, catch_probability, least_agreement, signatures, sketches
from data_pipeline.dedup.shingles import jaccard, shingle_set, shingles
from data_pipeline.errors import ConfigError
from data_pipeline.schema import validate
from data_pipeline.words import word_table, words

HOSTILE = [
    "",
    " \n\t ",
    "one",
    "a b c d",
    "a b c d e",
    "The quick, brown fox; the QUICK brown fox. the quick brown fox!",
    "snake_case x1 2y don't e.g. ... --- a-b",
    "Straße STRASSE ΣΊΣΥΦΟΣ İstanbul naïve e\u0301le\u0300ve ﬁn ⅷ ② ² ١٢٣",
    "漢字かな交じり文 한국어 띄어쓰기 ไทย हिन्दी में",
    "emoji 🙂 between 🙂 words \U0001d518\U0001d52b\U0001d526 \U00020000\U0002a6d6",
    "nul\0inside line\u2028sep and\u00a0nbsp \ud800 lone",
    "end without stop x",
]


def true_ngrams(text: str, ngram: int) -> list[tuple[str, ...]]:
    found = words(text)
    return [tuple(found[first : first + ngram]) for first in range(len(found) - ngram + 1)]


def true_jaccard(a: str, b: str, ngram: int) -> float:
    first, second = set(true_ngrams(a, ngram)), set(true_ngrams(b, ngram))
    return len(first & second) / len(first | second) if first | second else 0.0


def test_the_word_table_is_the_regular_expression() -> None:
    table = word_table()
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    inside = np.zeros(len(every), dtype=np.bool_)
    for match in re.finditer(r"\w+", every):
        inside[match.start() : match.end()] = True
    assert np.array_equal(table, inside)


@pytest.mark.parametrize("ngram", [1, 2, 5])
def test_shingles_are_the_word_ngrams(ngram: int) -> None:
    """Equal n-grams, equal numbers; different n-grams, different numbers; in order; over all texts together."""
    numbers: dict[tuple[str, ...], int] = {}
    for text in HOSTILE:
        expected, got = true_ngrams(text, ngram), shingles(text, ngram)
        assert len(got) == len(expected), text
        for gram, number in zip(expected, got.tolist()):
            assert numbers.setdefault(gram, number) == number
    assert len(set(numbers.values())) == len(numbers) > 20


@pytest.mark.parametrize("piece", [1, 2, 7, 64])
def test_shingles_do_not_depend_on_how_a_text_is_cut_to_be_hashed(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts longer than PIECE, and single words longer than it, give the numbers that they would give whole."""
    texts = [*HOSTILE, "x" * 500, " ".join("ab" * size for size in range(60)) + " "]
    whole = [shingles(text, 2) for text in texts]
    monkeypatch.setattr(words_module, "PIECE", piece)
    for text, wanted in zip(texts, whole):
        assert np.array_equal(shingles(text, 2), wanted), text


def test_words_that_differ_little_get_different_numbers() -> None:
    """All words of four letters of a small alphabet, long words with two letters swapped, and words that begin with NUL-like
    low code points: no two share a hash."""
    found = ["".join(letters) for letters in itertools.product("abcdef01", repeat=4)]
    found += ["a" * 40 + "b" + "a" * place + "c" for place in range(400)]
    assert len(np.unique(shingles(" ".join(found), 1))) == len(set(found))


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_minima_do_not_depend_on_the_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = [shingles(text, 1) for text in HOSTILE]
    multipliers, offsets = np.array([3, 5], dtype=np.uint64), np.array([7, 2**63], dtype=np.uint64)
    monkeypatch.setattr(module, "CHUNK", chunk)
    got = module.min_of_permutations(sets, multipliers, offsets)
    plain = [
        [min(((int(a) * x + int(b)) % 2**64 for x in numbers.tolist()), default=2**64 - 1) for a, b in zip(multipliers, offsets)]
        for numbers in sets
    ]
    assert got.tolist() == plain


def test_jaccard_is_that_of_the_sets() -> None:
    generator = random.Random(5)
    texts = HOSTILE + [" ".join(generator.choices("abc", k=generator.randrange(60))) for _ in range(40)]
    for a in texts:
        for b in texts[::3]:
            assert jaccard(shingle_set(a, 3), shingle_set(b, 3)) == true_jaccard(a, b, 3)


def test_signatures_are_minima_of_the_stated_functions() -> None:
    """Golden values: stored signatures of one version must be comparable with those of the next."""
    config = MinHashConfig(num_bands=2, rows_per_band=2)
    signature, has_signature = signatures(["The quick brown fox jumps over the lazy dog", "four words only here"], config)
    assert has_signature.tolist() == [True, False]
    assert signature[0].tolist() == GOLDEN
    grams = [" ".join(gram) for gram in true_ngrams("The quick brown fox jumps over the lazy dog", 5)]
    assert np.array_equal(signature[0], signatures(grams, config)[0].min(axis=0))  # a set's minimum is its members' least


GOLDEN = [39664651580754704, 2181904689396626445, 5063990212678660314, 2695637129360358922]


def test_a_signature_does_not_depend_on_its_batch() -> None:
    config = MinHashConfig()
    together, _ = signatures(HOSTILE, config)
    alone = np.concatenate([signatures([text], config)[0] for text in HOSTILE])
    assert np.array_equal(together, alone)
    assert not np.array_equal(together[5], signatures([HOSTILE[5]], MinHashConfig(seed=2))[0][0])


@pytest.mark.parametrize(
    ("num_bands", "rows_per_band", "jaccard_", "expected"),
    [(14, 8, 0.5, 0.053), (14, 8, 0.7, 0.565), (14, 8, 0.8, 0.924), (20, 13, 0.8, 0.677), (20, 5, 0.6, 0.802)],
)
def test_the_catch_probability_follows_the_formula(num_bands: int, rows_per_band: int, jaccard_: float, expected: float) -> None:
    """Values of the published S-curves: FineWeb 14 x 8, NeMo Curator 20 x 13, duplodocus 20 x 5."""
    assert catch_probability(jaccard_, num_bands=num_bands, rows_per_band=rows_per_band) == pytest.approx(expected, abs=0.001)


def pairs_of_similarity_0_8(count: int) -> Sequence[tuple[str, str]]:
    """80 shared 5-grams, 10 more on either side."""
    generator = random.Random(3)

    def fresh(number: int) -> list[str]:
        return [f"w{generator.getrandbits(60):x}" for _ in range(number)]

    pairs = []
    for _ in range(count):
        shared = fresh(84)
        pairs.append((" ".join(shared + fresh(10)), " ".join(shared + fresh(10))))
    return pairs


@pytest.mark.parametrize(("num_bands", "rows_per_band"), [(14, 8), (8, 14), (112, 1)])
def test_bands_and_rows_are_not_swapped(num_bands: int, rows_per_band: int) -> None:
    """B015: the measured catch rate at Jaccard 0.8 is the formula's, for 14 x 8 and for its swap."""
    pairs = pairs_of_similarity_0_8(2000)
    assert true_jaccard(*pairs[0], 5) == 0.8
    config = MinHashConfig(num_bands=num_bands, rows_per_band=rows_per_band)
    first, second = (signatures([pair[side] for pair in pairs], config)[0] for side in (0, 1))
    agreement = np.mean(first == second)
    assert agreement == pytest.approx(0.8, abs=0.005)
    caught = np.mean(np.any(band_keys(first, config) == band_keys(second, config), axis=1))
    assert caught == pytest.approx(catch_probability(0.8, num_bands=num_bands, rows_per_band=rows_per_band), abs=0.03)


def test_sketches_lose_no_true_pair() -> None:
    config = MinHashConfig()
    pairs = pairs_of_similarity_0_8(2000)
    first, second = (sketches(signatures([pair[side] for pair in pairs], config)[0]) for side in (0, 1))
    agreeing = np.count_nonzero(first == second, axis=1)
    least = least_agreement(config)
    assert agreeing.min() > least
    assert 40 < least < 70
    assert least_agreement(MinHashConfig(threshold=1.0)) == 112
    assert MISS_PROBABILITY <= 1e-6


def test_faulty_settings_are_refused_with_the_rule() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(DedupConfig, {"minhash": {"ngram": 0, "threshold": 80, "bands": 14}}, prefix="dedup")
    message = str(caught.value)
    assert "dedup.minhash.ngram: got 0, wanted a number from 1 to 1000" in message
    assert "dedup.minhash.threshold: got 80, wanted a Jaccard similarity" in message or "dedup.minhash.threshold" in message
    assert "minhash.num_bands" in message
    assert validate(DedupConfig, {"minhash": None}).minhash is None
    assert validate(DedupConfig, {}).minhash == MinHashConfig(ngram=5, num_bands=14, rows_per_band=8, threshold=0.8, seed=1)
