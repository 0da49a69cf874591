"""If these fail, the report of a dataset hides a loss or shows what was not measured, or nobody can say what became of a line of the input."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.build import build
from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset
from data_pipeline.dedup.audit import audit
from data_pipeline.dedup.config import DedupConfig, MinHashConfig
from data_pipeline.dedup.stage import deduplicate
from data_pipeline.document import Document
from data_pipeline.errors import DataError
from data_pipeline.pool import Workers
from data_pipeline.progress import Progress
from data_pipeline.report import page
from data_pipeline.schema import validate
from data_pipeline.show import show_rows
from data_pipeline.step import Ledger
from data_pipeline.store import DocumentStore, Part, write_part
from data_pipeline.trace_input import trace_input
from tests.corpus_fixtures import config, jsonl, long_texts, write_corpus


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """With everything that a report can show: losses, duplicates of both kinds, an evaluation that was found, a source that lost most."""
    folder = tmp_path_factory.mktemp("report")
    raw = write_corpus(folder / "raw", size=12)
    leaked = (raw / "books/0.txt").read_text()[:300]
    (folder / "exam.jsonl").write_text(json.dumps({"question": leaked}) + "\n")
    filters = {"gopher_quality": {"min_words": 100, "stop_words": ["the"], "min_stop_words": 0}, "write_dropped": True}
    evaluations = [{"name": "exam", "files": str(folder / "exam.jsonl")}]
    (raw / "notes.jsonl").write_bytes(jsonl(["too short", "and this"]))
    made = config(raw, folder / "data", filters=filters, decontaminate={"evaluations": evaluations})
    sources = [*(source.model_dump(exclude_unset=True) for source in made.sources), {"name": "notes", "files": str(raw / "notes.jsonl")}]
    return build(validate(DataConfig, {**made.model_dump(exclude_unset=True), "sources": sources}), quiet=True)


def test_the_page_is_drawn_from_the_json_and_fetches_nothing(dataset: Dataset) -> None:
    facts = json.loads((dataset.path / "report.json").read_text(encoding="utf-8"))
    drawn = (dataset.path / "report.html").read_text(encoding="utf-8")
    assert page(facts) == drawn
    assert not re.search(r"<(script|link|img|iframe)|\s(src|href)=|url\(|@import", drawn)
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    assert [step["documents"] for step in facts["funnel"]] == [
        ledger.total("read").read.documents,
        *(ledger.total(stage).written.documents for stage in ledger.stages),
    ]
    lost = sum(row["documents"] for row in facts["lost"])
    assert facts["funnel"][0]["documents"] - lost == facts["funnel"][-1]["documents"] and lost > 10
    for row in facts["lost"]:
        assert row["reason"].replace("_", " ") in drawn and sum(row["by_source"].values()) == row["documents"]
    for source in facts["sources"]:
        bins = source["lengths"]
        assert sum(each["documents"] for each in bins) == source["documents"] and sum(each["tokens"] for each in bins) == source["tokens"]
    alarms = [each["source"] for each in facts["source_loss"]["sources"] if each["alarm"]]
    assert alarms and f"{alarms[0]} lost" in drawn.split("From files to tokens")[0]
    assert facts["contamination"]["found"] == [{"evaluation": "exam", "items": 1, "documents": 1}] and "Evaluations found" in drawn
    clusters = facts["duplicates"]["largest_clusters"]
    near = [copy for cluster in clusters for copy in cluster["examples"] if copy["reason"] == "near"]
    assert sum(cluster["removed"] for cluster in clusters) == len((dataset.path / "duplicates.jsonl").read_text().splitlines()) == 4
    assert near and near[0]["in_kept"] != near[0]["text"] and near[0]["in_kept"][:20] == near[0]["text"][:20]


def _store(folder: Path, texts: list[str]) -> DocumentStore:
    with write_part(folder / "x.documents") as part:
        for number, text in enumerate(texts, start=1):
            part.add(Document(f"{number:032x}", text, "s", {"file": "f", "record": number}))
    return DocumentStore([("s", Part(folder / "x.documents"))])


@pytest.mark.parametrize("bands", [14, 1])
def test_the_audit_counts_what_comparing_every_pair_of_sets_counts(tmp_path: Path, bands: int) -> None:
    """One band misses pairs: the measured recall must say so, and name them."""
    rng = np.random.default_rng(5)
    texts = long_texts(30, seed=3)
    for text in texts[:12]:
        words = text.split()
        words[int(rng.integers(len(words)))] = "changed"
        texts += [" ".join(words), " ".join(words[: int(0.9 * len(words))])]
    texts += ["too short for it", texts[0]]
    store, settings = _store(tmp_path, texts), MinHashConfig(num_bands=bands, threshold=0.7)
    duplicates = deduplicate(
        store, DedupConfig(minhash=settings), priorities=["s"], path=tmp_path / "d", workers=Workers(1), progress=Progress(quiet=True)
    )
    found = audit(store, duplicates, settings)
    assert found is not None
    sets = [{tuple(words[n : n + 5]) for n in range(len(words) - 4)} for words in (text.lower().split() for text in texts[:-2])]
    pairs = {(i, j): len(a & b) / len(a | b) for i, a in enumerate(sets) for j, b in enumerate(sets[i + 1 :], start=i + 1)}
    similar = {pair for pair, jaccard in pairs.items() if jaccard >= 0.7}
    gone = set(duplicates.removals["removed"].tolist())
    assert found.pairs == len(pairs) and found.documents == len(texts) - 2 and found.similar == len(similar) > 20
    assert found.left == sum(not {i, j} & gone for i, j in similar) and found.removed_wrongly == 0 and found.precision == 1
    assert found.found + found.missed == found.similar and found.looked_at >= found.found
    if bands == 14:
        assert found.missed <= 2 and found.recall is not None and found.recall > 0.9
    else:
        assert found.missed > 0 and found.left > 0
        first, second = (int(each["record"]) - 1 for each in found.missed_examples[0]["documents"])
        assert (first, second) in similar
    again = audit(store, duplicates, settings.model_copy(update={"audit_documents": 10}))
    assert again is not None and again.pairs == 45 and again.of_documents == len(texts) - 1
    assert audit(store, duplicates, settings.model_copy(update={"audit_documents": 0})) is None
    assert "audit_documents" not in DedupConfig().model_dump(mode="json")["minhash"]  # older datasets keep their keys


def test_every_line_of_a_file_is_traced_to_what_became_of_it(dataset: Dataset, tmp_path: Path) -> None:
    lines = (dataset.path.parent / "raw/web/a.jsonl").read_text().splitlines()
    outcomes: Counter[str] = Counter()
    for number, line in enumerate(lines, start=1):
        (found,) = trace_input([dataset], str(dataset.path.parent / "raw/web/a.jsonl"), number)
        outcomes[found["outcome"]] += 1
        assert (found["source"], found["record"], found["file"]) == ("web", number, "a.jsonl")
        if found["outcome"] == "dropped":
            assert json.loads(line)["text"].startswith(found["text"]) and found["reason"] == "quality_few_words"
    assert set(outcomes) == {"stored", "duplicate", "dropped"} and sum(outcomes.values()) == len(lines) == 16
    with pytest.raises(DataError, match=r"nothing is known of a\.jsonl:17"):
        trace_input([dataset], "a.jsonl", 17)


def test_rows_are_shown_with_where_their_pieces_begin(dataset: Dataset, capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(dataset.path, number=3, sequence_length=64, packing="best_fit", seed=1, tokens=False)
    out = capsys.readouterr().out
    assert out.count("=== sample") == 3 and "--- 0 to " in out and re.search(r"tokens [\d,]+ to [\d,]+ of [\d,]+", out)
