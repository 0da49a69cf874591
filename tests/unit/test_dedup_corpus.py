"""If this fails, dedup on real texts misses known duplicates, or removes what is none."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.dedup.config import DedupConfig, MinHashConfig
from data_pipeline.dedup.minhash import band_keys, signatures
from data_pipeline.dedup.run import DocRecord, find_duplicates
from data_pipeline.document import Document
from data_pipeline.normalise import Normalise, NormaliseConfig
from data_pipeline.read import count_read, read_file
from data_pipeline.step import Ledger
from data_pipeline.storage import named_files
from tests.paths import corpora
from tests.unit.test_minhash import true_ngrams

pytestmark = pytest.mark.corpora


@pytest.fixture(scope="module")
def licences() -> list[Document]:
    ledger = Ledger()
    folder = corpora("spdx_licenses")
    documents = [
        document
        for path, name in named_files(str(folder / "*.txt"))
        for document in count_read(read_file(path, source="spdx", name=name), ledger, source="spdx")
    ]
    ledger.balance()
    assert len(documents) == 819
    return documents


def removed_files(documents: list[Document], config: DedupConfig, *, workers: int = 1) -> dict[str, str]:
    """removed file -> reason."""
    by_id = {document.id: document for document in documents}
    records = (DocRecord(document.id, document.text) for document in documents)
    result = find_duplicates(records, config, fetch=lambda ids: [by_id[name].text for name in ids], workers=workers)
    return {by_id[name].meta["file"]: removal.reason for name, removal in result.removed.items()}


def test_39_byte_exact_copies_go_and_40_after_normalisation(licences: list[Document]) -> None:
    exact = DedupConfig(minhash=None)
    assert len(removed_files(licences, exact)) == 39
    fresh = [Document(document.id, document.text, document.source, document.meta) for document in licences]
    normalised = list(Normalise(NormaliseConfig()).run(iter(fresh)))
    assert len(removed_files(normalised, exact)) == 40


def test_known_pairs_are_found_and_no_other_survives_verification(licences: list[Document]) -> None:
    """Recall of the pairs with Jaccard >= 0.8, mean of five seeds; each found pair's similarity is the known one."""
    known = {frozenset((a, b)): similarity for a, b, similarity in json.loads(corpora("spdx_licenses_pairs.json").read_text())}
    wanted = {pair for pair, similarity in known.items() if similarity >= 0.8}
    assert len(wanted) == 396
    texts = [document.text for document in licences]
    ngrams = [set(true_ngrams(text, 5)) for text in texts]
    names = [document.meta["file"] for document in licences]
    similarities: dict[tuple[int, int], float] = {}
    recalls = []
    for seed in range(1, 6):
        config = MinHashConfig(seed=seed)
        keys = band_keys(signatures(texts, config)[0], config)
        candidates = np.argwhere(np.triu(np.any(keys[:, None, :] == keys[None, :, :], axis=2), k=1))
        found = set()
        for a, b in candidates.tolist():
            if (a, b) not in similarities:
                similarities[a, b] = len(ngrams[a] & ngrams[b]) / len(ngrams[a] | ngrams[b])
            if similarities[a, b] >= 0.8:
                pair = frozenset((names[a], names[b]))
                assert known[pair] == pytest.approx(similarities[a, b], abs=1e-4)
                found.add(pair)
        assert found <= wanted
        recalls.append(len(found) / len(wanted))
    print("recall by seed:", recalls)
    assert np.mean(recalls) >= 0.98, recalls


def test_the_result_does_not_depend_on_shards_workers_or_file_order(licences: list[Document], tmp_path: Path) -> None:
    by_id = {document.id: document for document in licences}
    outcomes = []
    for num_shards, workers in ((1, 1), (2, 2), (7, 3), (7, 1)):
        shuffled = random.Random(num_shards * 10 + workers).sample(licences, len(licences))
        documents = []
        for shard in range(num_shards):
            path = tmp_path / f"{num_shards}-{workers}-{shard}.jsonl"
            path.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in shuffled[shard::num_shards]))
            documents += [item for item in read_file(str(path), source="spdx") if isinstance(item, Document)]
        assert len(documents) == len(by_id)
        texts = {document.id: document.text for document in documents}
        result = find_duplicates(
            (DocRecord(document.id, document.text) for document in documents),
            DedupConfig(),
            fetch=lambda ids, texts=texts: [texts[name] for name in ids],  # type: ignore[misc]
            workers=workers,
        )
        outcomes.append(sorted(text for name, text in texts.items() if name not in result))
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert 600 < len(outcomes[0]) < 700


def test_survivors_are_unlike_each_other_but_for_what_the_bands_miss(licences: list[Document]) -> None:
    removed = removed_files(licences, DedupConfig())
    pairs = json.loads(corpora("spdx_licenses_pairs.json").read_text())
    left = [(a, b) for a, b, similarity in pairs if similarity >= 0.8 and a not in removed and b not in removed]
    assert len(left) <= 396 * 0.02
