"""If this fails, dedup deletes text that is no duplicate, keeps copies, or decides by chance."""

import random
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from data_pipeline.dedup.config import DedupConfig, MinHashConfig
from data_pipeline.dedup.minhash import band_keys, signatures
from data_pipeline.dedup.run import DocRecord, Removal, Removals, find_duplicates
from data_pipeline.dedup.verify import Verifier
from data_pipeline.document import content_key, utf8_bytes
from data_pipeline.errors import DataError
from tests.unit.test_minhash import true_jaccard


def dedup(records: Iterable[DocRecord], config: DedupConfig | None = None, *, workers: int = 1) -> Removals:
    records = list(records)
    texts = {record.id: record.text for record in records}
    return find_duplicates(records, config or DedupConfig(), fetch=lambda ids: [texts[name] for name in ids], workers=workers)


def numbered(texts: Sequence[str], *, priority: int = 0, name: str = "d") -> list[DocRecord]:
    return [DocRecord(f"{name}{number:03}", text, priority) for number, text in enumerate(texts)]


def sentence(generator: random.Random, num_words: int) -> list[str]:
    return [f"w{generator.randrange(50_000)}" for _ in range(num_words)]


def corpus_with_clusters(seed: int, num_clusters: int = 20) -> list[DocRecord]:
    """Clusters of edited copies at all degrees of similarity, exact copies, short texts, and texts of their own."""
    generator = random.Random(seed)
    texts: list[str] = ["", "hi", "hi", "two words"]
    for _ in range(num_clusters):
        base = sentence(generator, 120)
        for _ in range(generator.randrange(2, 8)):
            edited = list(base)
            for _ in range(generator.choice([0, 0, 1, 2, 4, 6, 12])):
                edited[generator.randrange(len(edited))] = f"edit{generator.randrange(10**6)}"
            texts.append(" ".join(edited))
    texts += [" ".join(sentence(generator, 80)) for _ in range(30)]
    return numbered(texts)


def naive(records: Sequence[DocRecord], config: DedupConfig) -> dict[str, Removal]:
    """The rule as it reads: every pair that shares a band, sets of words, no sketches, no buckets, no cache."""
    order = sorted(records, key=lambda record: (record.source_priority, -utf8_bytes(record.text), content_key(record.text), record.id))
    removed: dict[str, Removal] = {}
    exact: dict[str, str] = {}
    if config.exact:
        for record in order:
            if (first := exact.setdefault(record.text, record.id)) != record.id:
                removed[record.id] = Removal(first, "exact", 1.0)
    if config.minhash is not None:
        left = [record for record in order if record.id not in removed]
        signature, has_signature = signatures([record.text for record in left], config.minhash)
        keys = band_keys(signature, config.minhash)
        kept: list[int] = []
        for number, record in enumerate(left):
            for other in kept if has_signature[number] else ():
                if has_signature[other] and np.any(keys[number] == keys[other]):
                    similarity = true_jaccard(record.text, left[other].text, config.minhash.ngram)
                    if similarity >= config.minhash.threshold:
                        removed[record.id] = Removal(left[other].id, "near", similarity)
                        break
            else:
                kept.append(number)
    for name, removal in removed.items():
        if removal.reason == "exact" and (star := removed.get(removal.kept_id)) is not None:
            removed[name] = Removal(star.kept_id, "exact", star.jaccard)
    return removed


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(
    "config",
    [
        DedupConfig(),
        DedupConfig(exact=False),
        DedupConfig(minhash=None),
        DedupConfig(minhash=MinHashConfig(ngram=2, num_bands=30, rows_per_band=2, threshold=0.5)),
        DedupConfig(minhash=MinHashConfig(threshold=1.0)),
    ],
    ids=["default", "near only", "exact only", "loose", "equal sets"],
)
def test_the_result_is_that_of_the_plain_rule(seed: int, config: DedupConfig) -> None:
    records = corpus_with_clusters(seed)
    result = dedup(records, config)
    assert result.removed == naive(records, config)
    assert not any(removal.kept_id in result for removal in result.removed.values())


def test_short_documents_are_compared_as_a_whole() -> None:
    """B013: fewer words than an n-gram: no crash, 'hi' and 'bye' stay apart, the two 'hi' become one."""
    result = dedup(numbered(["", "hi", "hi", "bye", "two words"]))
    assert result.removed == {"d002": Removal("d001", "exact", 1.0)}
    assert result.stats["without_signature"] == 5
    assert dedup([]).removed == {}


def test_the_chance_of_a_catch_is_reported() -> None:
    """B015: the number that would show swapped bands and rows."""
    assert dedup(numbered(["x"])).stats["catch_probability_at_threshold"] == pytest.approx(0.9235, abs=1e-4)


def test_the_match_in_a_reference_is_named() -> None:
    """B017: a reference of lower priority number stays, its copy goes, and the report says which one it matched."""
    generator = random.Random(1)
    reference = [" ".join(sentence(generator, 30)) for _ in range(3)]
    new = [" ".join(sentence(generator, 30)), reference[1], " ".join(sentence(generator, 30))]
    longer_near_copy = reference[2] + " more"
    records = numbered(reference, priority=0, name="R") + numbered([*new, longer_near_copy], priority=1, name="A")
    result = dedup(records)
    assert result.removed["A001"] == Removal("R001", "exact", 1.0)
    assert result.removed["A003"].kept_id == "R002"  # priority before length
    assert len(result) == 2


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_same_documents_survive_whatever_the_order_and_the_workers(workers: int) -> None:
    """B020: twenty near-duplicate clusters, shuffled, twice each."""
    records = corpus_with_clusters(7)
    expected = dedup(records).removed
    assert len(expected) > 20
    for seed in (1, 2):
        shuffled = random.Random(seed).sample(records, len(records))
        assert dedup(shuffled, workers=workers).removed == expected


def test_the_surviving_texts_do_not_depend_on_how_the_corpus_is_cut_into_files() -> None:
    """Ids follow from files; with other ids the same texts stay."""
    records = corpus_with_clusters(8)
    survivors = set()
    for seed in range(4):
        names = random.Random(seed).sample(range(len(records)), len(records))
        renamed = [DocRecord(f"n{name:04}", record.text) for name, record in zip(names, records)]
        result = dedup(renamed)
        survivors.add(tuple(sorted(record.text for record in renamed if record.id not in result)))
    assert len(survivors) == 1


def test_every_member_of_a_group_is_recorded() -> None:
    """B021: five equal documents and two other pairs: three stay, six go, all six are listed."""
    generator = random.Random(2)
    a, b, c = (" ".join(sentence(generator, 20)) for _ in range(3))
    records = numbered([a, b, a, c, a, b, a, c, a])
    result = dedup(records)
    assert sorted(result.removed) == ["d002", "d004", "d005", "d006", "d007", "d008"]
    assert {removal.kept_id for removal in result.removed.values()} == {"d000", "d001", "d003"}


def test_chains_do_not_merge() -> None:
    """a is near b and b near c, but a is not near c: c stays."""
    generator = random.Random(4)
    text = sentence(generator, 230)
    chain = [" ".join(text[start : start + 200]) for start in (0, 15, 30)]
    chain[0] += " the longest of the three"
    chain[1] += " shorter"
    config = DedupConfig(minhash=MinHashConfig(num_bands=40, rows_per_band=3))
    assert true_jaccard(chain[0], chain[1], 5) > 0.8 < true_jaccard(chain[1], chain[2], 5)
    assert true_jaccard(chain[0], chain[2], 5) < 0.8
    assert list(dedup(numbered(chain), config).removed) == ["d001"]


def test_exact_copies_of_a_near_duplicate_name_the_document_that_stays() -> None:
    generator = random.Random(5)
    long = " ".join(sentence(generator, 100))
    short = long.rpartition(" ")[0]
    result = dedup(numbered([short, long, short]))
    assert {name: (removal.kept_id, removal.reason) for name, removal in result.removed.items()} == {
        "d000": ("d001", "near"),
        "d002": ("d001", "exact"),
    }
    assert result.removed["d002"].jaccard == true_jaccard(short, long, 5)


def test_the_threshold_itself_is_similar_enough() -> None:
    generator = random.Random(6)
    shared = sentence(generator, 84)
    pair = [" ".join(shared + sentence(generator, 10)) for _ in range(2)]
    assert true_jaccard(*pair, 5) == 0.8
    loose = MinHashConfig(num_bands=100, rows_per_band=1)
    assert len(dedup(numbered(pair), DedupConfig(minhash=loose))) == 1
    assert len(dedup(numbered(pair), DedupConfig(minhash=loose.model_copy(update={"threshold": 0.801})))) == 0


def test_unique_documents_all_stay() -> None:
    generator = random.Random(9)
    result = dedup(numbered([" ".join(sentence(generator, 60)) for _ in range(500)]))
    assert result.removed == {}
    assert result.stats["compared_pairs"] == 0


def test_two_documents_with_one_id_are_refused() -> None:
    with pytest.raises(DataError, match="two documents have the id 'd'"):
        dedup([DocRecord("d", "a"), DocRecord("d", "b")])


def test_a_large_bucket_costs_no_square() -> None:
    """20,000 near copies of one page among other documents: all but one go, one comparison each."""
    generator = random.Random(10)
    base = sentence(generator, 60)
    texts = [" ".join([*base, f"visitor{number}"]) for number in range(20_000)]
    began = time.process_time()
    result = dedup(numbered(texts))
    assert len(result) == 19_999
    assert result.stats["compared_pairs"] == 19_999
    assert time.process_time() - began < 20


def test_a_large_bucket_of_documents_that_stay_loses_no_pair() -> None:
    """Filled-in forms that are half alike: no cap hides the true pair in their midst, and sketches spare most comparisons."""
    generator = random.Random(11)
    form = sentence(generator, 300)
    texts = [" ".join(form + sentence(generator, 150)) for _ in range(800)]
    texts.append(texts[700].rpartition(" ")[0])
    config = DedupConfig(minhash=MinHashConfig(num_bands=56, rows_per_band=2))
    result = dedup(numbered(texts), config)
    assert list(result.removed) == ["d800"]
    assert result.removed["d800"].kept_id == "d700"
    assert result.stats["candidate_pairs"] > 800 * 799 / 2 * 0.99
    assert result.stats["compared_pairs"] < result.stats["candidate_pairs"] * 0.1


def test_texts_are_read_again_only_for_candidates() -> None:
    generator = random.Random(12)
    texts = [" ".join(sentence(generator, 60)) for _ in range(100)]
    records = numbered([*texts, texts[3] + " more"])
    fetched: list[str] = []

    def fetch(ids: Sequence[str]) -> list[str]:
        fetched.extend(ids)
        return [{record.id: record.text for record in records}[name] for name in ids]

    result = find_duplicates(iter(records), DedupConfig(), fetch=fetch)
    assert list(result.removed) == ["d003"]
    assert sorted(fetched) == ["d003", "d100"]


def test_a_small_cache_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    records = corpus_with_clusters(13)
    expected = dedup(records).removed
    monkeypatch.setattr("data_pipeline.dedup.verify.CACHE_BYTES", 1000)
    monkeypatch.setattr("data_pipeline.dedup.cluster.LOOK_AHEAD_BYTES", 1000)
    monkeypatch.setattr("data_pipeline.dedup.columns.BATCH_BYTES", 1000)
    assert dedup(records, workers=2).removed == expected


def test_what_is_read_ahead_is_still_held_when_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets of 4 MB of text, 11 MB, beside those that they are compared with: each text is read once."""
    monkeypatch.setattr("data_pipeline.dedup.verify.shingle_set", lambda text, _: int(text) * 2**17 + np.arange(2**17, dtype=np.uint64))
    read: list[int] = []

    def fetch(numbers: Sequence[int]) -> list[str]:
        read.extend(numbers)
        return [str(number) for number in numbers]

    with ThreadPoolExecutor(1) as executor:
        verifier = Verifier(fetch, ngram=5, executor=executor)
        verifier.load(range(11))
        for number in range(11):
            assert verifier.first_match(number, [100 + number], 0.8) == (None, 0.0, 1)
    assert sorted(read) == [*range(11), *range(100, 111)]
