"""Every byte of a dataset checked against what was written when it was built."""

from __future__ import annotations

from pathlib import Path

from data_pipeline.blockfile import BlockFile
from data_pipeline.dataset import Dataset
from data_pipeline.errors import DataError
from data_pipeline.manifest import source_hash
from data_pipeline.progress import Progress
from data_pipeline.step import Ledger
from data_pipeline.storage import sha256_file


def verify_dataset(folder: Path, *, quiet: bool = False) -> None:
    """Raises DataError that names everything that is wrong; nothing is repaired."""
    progress = Progress(quiet=quiet)
    dataset = Dataset.open(folder)
    faults: list[str] = []
    _try(faults, lambda: _tokenizer(dataset))
    entries = [(source, entry) for source in [*dataset.sources, *dataset.validation] for entry in source.entry.shards]
    paths = [folder / entry.file for _, entry in entries]
    with progress.stage("verify", sum(path.stat().st_size for path in paths if path.exists())) as advance:
        for path, (_, entry) in zip(paths, entries):
            _try(faults, lambda path=path, wanted=entry.hash: _file(path, wanted))  # type: ignore[misc]
            advance(path.stat().st_size if path.exists() else 0)
    for source in [*dataset.sources, *dataset.validation]:
        _try(faults, lambda source=source: [shard.verify() for shard in source.shards])  # type: ignore[misc]
        if source.hash != source_hash(source.name, source.split, source.entry.shards, tokenizer_hash=dataset.tokenizer_hash):
            faults.append(f"manifest.json: the hash of source {source.name} ({source.split}) is not that of its shards")
    for path in sorted((folder / "packing").glob("*.plan")):
        _try(faults, lambda path=path: BlockFile(path, kind="plan").verify())  # type: ignore[misc]
    _books(dataset, faults)
    if faults:
        raise DataError(
            f"{folder}: {len(faults)} thing{'s' if len(faults) != 1 else ''} wrong\n"
            + "\n".join(f"  {fault}" for fault in dict.fromkeys(faults))
        )
    documents = sum(source.num_documents for source, _ in {id(source): (source, 0) for source, _ in entries}.values())
    progress.say(f"{folder}: {len(entries)} shards, {documents:,} documents, every byte is what was written")


def _try(faults: list[str], check: object) -> None:
    assert callable(check)
    try:
        check()
    except DataError as error:
        faults.append(str(error))


def _file(path: Path, wanted: str) -> None:
    if not path.exists():
        raise DataError(f"{path}: is missing. Restore it from a copy, or build the dataset again.")
    BlockFile(path, kind="shard").verify()  # names the block; the hash of the whole names only the file
    if sha256_file(path) != wanted:
        raise DataError(
            f"{path}: is a sound shard, but not the one that the manifest names. Restore it from a copy, or build the dataset again."
        )


def _tokenizer(dataset: Dataset) -> None:
    _ = dataset.tokenizer_path, dataset.token_bytes


def _books(dataset: Dataset, faults: list[str]) -> None:
    ledger = Ledger.from_dict(dataset.manifest.ledger)
    try:
        ledger.balance(chain=list(ledger.stages))
    except AssertionError as error:
        faults.append(f"manifest.json: the ledger does not balance: {error}")
    if "encode" not in ledger.stages:
        return
    for name in sorted({source.name for source in dataset.sources}):
        stored = sum(source.num_documents for source in [*dataset.sources, *dataset.validation] if source.name == name)
        if stored != ledger.tally("encode", name).written.documents:
            faults.append(
                f"manifest.json: {stored} documents of {name} are stored, the ledger says {ledger.tally('encode', name).written.documents}"
            )
