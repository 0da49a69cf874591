"""Other people's token files to a dataset folder: the same ids, cut into documents, with our index and checksums.

Every document of ours ends in the end-of-document id. Where a document of theirs has none, it is added, counted, and the
document noted in the manifest, so that an export leaves it out again and the ids come back as they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from data_pipeline.dataset import Dataset
from data_pipeline.document import document_id
from data_pipeline.errors import ConfigError, DataError, Fault
from data_pipeline.interchange.megatron import MegatronFile
from data_pipeline.interchange.streams import looks_like_llmc, open_stream, split_at_ends
from data_pipeline.manifest import Manifest, ShardEntry, SourceEntry, source_hash, write_manifest
from data_pipeline.progress import Progress
from data_pipeline.report import write_report
from data_pipeline.shards import Encoded, Shard, token_dtype, write_shard
from data_pipeline.split import held_out
from data_pipeline.step import Ledger
from data_pipeline.storage import atomic_folder, named_files, sha256_file
from data_pipeline.summary import summary_lines
from data_pipeline.tokenizer.facts import TokenizerFacts, facts_of, prepared, read_pretrained

Format = Literal["megatron", "nanogpt", "llmc", "npy"]
FORMATS: tuple[Format, ...] = ("megatron", "nanogpt", "llmc", "npy")
SHARD_TOKENS = 1 << 26


@dataclass(frozen=True)
class Source:
    """Files to import under one name. `validation`: more files, all of them held out; or a share of `files`, by hash."""

    name: str
    files: str | Sequence[str]
    validation: str | Sequence[str] = ()
    validation_fraction: float = 0.0


@dataclass(frozen=True)
class _Input:
    path: str
    name: str
    format: Format


@dataclass(frozen=True)
class _Found:
    """A document as it lies in a file: `tokens` without its end; `ended`: whether it has one there."""

    file: str
    record: int
    tokens: np.ndarray
    ended: bool


def import_tokens(
    sources: Sequence[Source],
    output: str | Path,
    *,
    tokenizer: str,
    format: str = "auto",
    eod_token: str | None = None,
    bos_token: str | None = None,
    dtype: str | None = None,
    seed: int = 1234,
    shard_tokens: int = SHARD_TOKENS,
    quiet: bool = False,
) -> Dataset:
    """Write a dataset folder of token files, atomically, and open it. `tokenizer`: the tokenizer.json that made the ids, or
    its folder.

    Raises DataError naming file and place where ids or tables are wrong, ConfigError where something must be told.
    """
    output, progress = Path(output), Progress(quiet=quiet)
    if output.exists() and any(output.iterdir()):
        raise ConfigError([Fault("--output", str(output), "a folder that doesn't exist yet", "choose another, or move this one away")])
    raw, named = read_pretrained(tokenizer)
    eod, bos = eod_token or named.get("eos_token"), bos_token or named.get("bos_token")
    facts = facts_of(prepared(raw, where=tokenizer), type="pretrained", eod_token=eod, bos_token=bos, where=tokenizer)
    ledger, entries, facts_of_import = Ledger(), cast(list[SourceEntry], []), cast(dict[str, Any], {})
    if output.exists():
        output.rmdir()
    with atomic_folder(output) as folder:
        for source in sources:
            writer = _SourceWriter(folder, source.name, facts, ledger, shard_tokens=shard_tokens, progress=progress)
            for split, inputs, chosen in _splits(source, format, facts, dtype=dtype, seed=seed):
                entry, about = writer.write(split, inputs, chosen, dtype=dtype)
                entries += [entry] if entry.shards else []
                facts_of_import.setdefault(source.name, {})[split] = about
        (folder / "tokenizer.json").write_text(facts.json_text, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(facts.config_json(), encoding="utf-8")
        np.save(folder / "token_bytes.npy", facts.token_bytes)
        manifest = Manifest(
            vocabulary=facts.vocabulary,
            tokenizer=facts.to_manifest(),
            dtype=token_dtype(facts.vocabulary.size - 1).str,
            sources=tuple(entries),
            ledger=ledger.to_dict(),
            config={"imported": facts_of_import},
        )
        write_manifest(folder, manifest)
        lines = summary_lines(Dataset.open(folder), [], asked_vocab=None)
        write_report(folder, Dataset.open(folder), lines, title=output.name)
    for line in lines:
        progress.say(line)
    return Dataset.open(output)


class _SourceWriter:
    """Writes the shards of one source."""

    def __init__(self, folder: Path, name: str, facts: TokenizerFacts, ledger: Ledger, *, shard_tokens: int, progress: Progress) -> None:
        self._folder, self._name, self._facts = folder, name, facts
        self._tally, self._shard_tokens, self._progress = ledger.tally("import", name), shard_tokens, progress

    def write(
        self, split: str, inputs: Sequence[_Input], chosen: Callable[[int], bool], *, dtype: str | None
    ) -> tuple[SourceEntry, dict[str, Any]]:
        """The shards of the documents whose number is `chosen`, and what the manifest says about the import."""
        vocabulary = self._facts.vocabulary
        found = (document for n, document in enumerate(_documents(inputs, self._facts, dtype=dtype)) if chosen(n))
        shards: list[ShardEntry] = []
        added: list[int] = []
        number = 0
        with self._progress.stage(f"import {self._name}", sum(Path(item.path).stat().st_size for item in inputs)) as advance:
            document = next(found, None)
            while document is not None:
                file = f"shards/{self._name}{'' if split == 'train' else '.' + split}-{len(shards):05d}.bin"
                first, tokens, text_bytes = number, 0, 0
                with write_shard(self._folder / file, source=self._name, split=split, vocabulary=vocabulary) as shard:
                    while document is not None and (number == first or tokens < self._shard_tokens):
                        num_bytes = int(self._facts.token_bytes[document.tokens].sum(dtype=np.int64))
                        id = document_id(self._name, document.file, document.record)
                        shard.add(Encoded(id=id, tokens=document.tokens, text_bytes=num_bytes, file=document.file, record=document.record))
                        self._tally.keep(num_bytes)
                        if not document.ended:
                            added.append(number)
                            self._tally.note("end_added")
                        number, tokens, text_bytes = number + 1, tokens + document.tokens.size + 1, text_bytes + num_bytes
                        advance(document.tokens.nbytes)
                        document = next(found, None)
                path = self._folder / file
                entry = ShardEntry(file, number - first, tokens, text_bytes, hash=sha256_file(path), checksums=Shard(path).digest)
                shards.append(entry)
        if not number and split == "train":
            raise DataError(
                f"{', '.join(item.path for item in inputs)}: no tokens. An empty file is what a tokeniser leaves that found no text."
            )
        digest = source_hash(self._name, split, tuple(shards), tokenizer_hash=vocabulary.tokenizer_hash)
        about = {
            "files": [{"name": item.name, "format": item.format, "sha256": sha256_file(item.path)} for item in inputs],
            "ends_added": "all" if len(added) == number else added,
        }
        return SourceEntry(name=self._name, split=split, shards=tuple(shards), hash=digest), about


def _splits(
    source: Source, format: str, facts: TokenizerFacts, *, dtype: str | None, seed: int
) -> Iterator[tuple[str, list[_Input], Callable[[int], bool]]]:
    """(split, files, which of their documents) for each split of a source."""
    inputs = find_inputs(source.files, format)
    if source.validation:
        if source.validation_fraction:
            raise ConfigError(
                [Fault("--validation-fraction", source.validation_fraction, "either files or a fraction held out", "leave one out")]
            )
        yield "train", inputs, lambda _: True
        yield "validation", find_inputs(source.validation, format), lambda _: True
    elif source.validation_fraction:
        keys = np.array(
            [
                np.frombuffer(hashlib.sha256(document.tokens.astype("<u4").tobytes()).digest()[:16], dtype=np.uint8)
                for document in _documents(inputs, facts, dtype=dtype)
            ]
        ).reshape(-1, 16)
        chosen = held_out(keys, np.ones(len(keys), dtype=bool), fraction=source.validation_fraction, seed=seed)
        yield "train", inputs, lambda n: not chosen[n]
        yield "validation", inputs, lambda n: bool(chosen[n])
    else:
        yield "train", inputs, lambda _: True


def find_inputs(files: str | Sequence[str], format: str) -> list[_Input]:
    """The token files that the patterns name, each with its format; .idx and .bin of Megatron are one."""
    if format != "auto" and format not in FORMATS:
        raise ConfigError([Fault("--format", format, f"auto or one of {', '.join(FORMATS)}")])
    patterns = [files] if isinstance(files, str) else list(files)
    patterns = [f"{pattern}.idx" if Path(f"{pattern}.idx").is_file() else pattern for pattern in patterns]  # Megatron's prefixes
    inputs: dict[str, _Input] = {}
    for path, name in named_files(patterns):
        suffix = Path(path).suffix
        if suffix not in (".bin", ".idx", ".npy") and format == "auto":
            continue  # a folder may hold a README, a tokenizer or a meta.pkl
        if format == "megatron" or (format == "auto" and suffix != ".npy" and Path(path).with_suffix(".idx").is_file()):
            key = str(Path(path).with_suffix(""))
            inputs.setdefault(key, _Input(key + ".idx", str(Path(name).with_suffix("")), "megatron"))
            continue
        chosen = format if format != "auto" else "npy" if suffix == ".npy" else "llmc" if looks_like_llmc(path) else "nanogpt"
        inputs[path] = _Input(path, name, cast(Format, chosen))
    if not inputs:
        raise DataError(f"{', '.join(patterns)}: no .bin, .idx or .npy among the files. Name the files, or give --format")
    return list(inputs.values())


def _documents(inputs: Sequence[_Input], facts: TokenizerFacts, *, dtype: str | None) -> Iterator[_Found]:
    """Every document of the files in order, its ids checked."""
    eod, size = facts.vocabulary.eod_id, facts.vocabulary.size
    carried: list[np.ndarray] = []  # of a document that runs on into the next file
    for place, item in enumerate(inputs):
        if item.format == "megatron":
            pieces: Iterator[np.ndarray] = (part for tokens in MegatronFile(item.path).documents() for part in _parts(tokens, eod))
        else:
            pieces = split_at_ends(open_stream(item.path, format=item.format, dtype=dtype, vocab_size=size), eod)
        runs_on = item.format == "llmc" and place + 1 < len(inputs) and inputs[place + 1].format == "llmc"
        record = 0
        for tokens in pieces:
            _check_ids(tokens, size, path=item.path, record=record + 1)
            ended = bool(tokens.size) and int(tokens[-1]) == eod
            if not ended and runs_on:
                carried.append(tokens)
                continue
            if carried:
                tokens, carried = np.concatenate([*carried, tokens]), []
            record += 1
            yield _Found(file=item.name, record=record, tokens=tokens[:-1] if ended else tokens, ended=ended)
    if carried:
        yield _Found(file=inputs[-1].name, record=1, tokens=np.concatenate(carried), ended=False)


def _parts(tokens: np.ndarray, eod: int) -> list[np.ndarray]:
    """A document of Megatron; several where an end stands inside, as it does when a text spelled the end token out."""
    return list(split_at_ends(tokens, eod)) if tokens.size else [tokens]


def _check_ids(tokens: np.ndarray, size: int, *, path: str, record: int) -> None:
    if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) >= size):
        wrong = int(np.flatnonzero((tokens < 0) | (tokens >= size))[0])
        raise DataError(
            f"{path}: document {record} has id {tokens[wrong]} at place {wrong}, but the tokenizer has ids 0 to {size - 1}. "
            "The ids were made with another tokenizer, or the file has another dtype than it was read with."
        )
