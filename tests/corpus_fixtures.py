"""A small corpus of raw files with everything that real ones have: formats, compression, duplicates, damage."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from data_pipeline.config import DataConfig
from data_pipeline.dataset import Dataset, TokenSource
from data_pipeline.schema import validate
from data_pipeline.tokenizer.encode import Encoder
from tests.data_fixtures import WORDS


def long_texts(num_documents: int, *, seed: int, words: int = 150) -> list[str]:
    """Documents that are not near each other: words of a made-up language, by seed."""
    rng = np.random.default_rng(seed)
    stems = ["".join(rng.choice(list("abcdefghilmnoprstu"), size=5)) for _ in range(400)]
    return [" ".join(rng.choice([*stems, *WORDS], size=int(rng.integers(20, 2 * words)))) + f" {seed}-{n}\n" for n in range(num_documents)]


def jsonl(texts: list[str], **more: Any) -> bytes:
    return b"".join(json.dumps({"text": text, **more}).encode() + b"\n" for text in texts)


def write_corpus(folder: Path, *, size: int = 60, seed: int = 0) -> Path:
    """`folder` with web/ (jsonl, plain, gz, zst, one with damage), books/ (txt files) and table.parquet."""
    import pyarrow
    import pyarrow.parquet

    web, books = folder / "web", folder / "books"
    web.mkdir(parents=True)
    books.mkdir()
    texts = long_texts(4 * size, seed=seed)
    near = texts[1][:-10] + " changed at the end\n"
    (web / "a.jsonl").write_bytes(jsonl(texts[:size]) + jsonl(texts[:3]) + jsonl([near]))
    (web / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(texts[size : 2 * size]), mtime=0))
    (web / "c.jsonl.zst").write_bytes(zstandard.compress(jsonl(texts[2 * size : 3 * size])))
    hostile = [
        b"\xef\xbb\xbf" + jsonl(["first, after a byte order mark"]).rstrip(),
        b'{"text": "lone \\ud800 surrogate, which JSON can spell"}',
        b"",
        b'{"text": "cut off',
        b'{"text": "bad byte \xff here"}',
        b'{"no": "text"}',
        b'{"text": 7}',
        b'{"text": ""}',
        json.dumps({"text": "an end <|endoftext|> that is text, and CRLF\r\nhere"}).encode(),
        jsonl(["last line, without a newline \u2028 and with a separator"]).rstrip(),
    ]
    (web / "d.jsonl").write_bytes(b"\n".join(hostile))
    for number, text in enumerate(texts[3 * size :][:10]):
        (books / f"{number}.txt").write_text(text)
    pyarrow.parquet.write_table(pyarrow.table({"content": texts[3 * size + 10 :]}), folder / "table.parquet")
    return folder


def config(folder: Path, output: Path, **more: Any) -> DataConfig:
    """A data config for that corpus; small vocabulary, one worker."""
    tree: dict[str, Any] = {
        "output": str(output),
        "sources": [
            {"name": "web", "files": str(folder / "web")},
            {"name": "books", "files": str(folder / "books")},
            {"name": "table", "files": str(folder / "table.parquet"), "text_field": "content"},
        ],
        "tokenizer": {"type": "bpe", "vocab_size": 600},
        "validation": {"fraction": 0.05},
        "packing": [{"sequence_length": 64}, {"sequence_length": 32, "method": "concat"}],
        "workers": 1,
    }
    return validate(DataConfig, {**tree, **more})


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file under the folder, by its relative path."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def texts_of(dataset: Dataset, source: TokenSource) -> list[str]:
    encoder = Encoder.open(dataset.tokenizer_path)
    out = []
    for number in range(source.num_documents):
        shard, inside = source.find(number)
        tokens = shard.document(inside)
        assert tokens[-1] == dataset.eod_id
        out.append(encoder.decode(tokens[:-1].tolist()))
    return out


def all_texts(dataset: Dataset) -> list[str]:
    return [text for source in [*dataset.sources, *dataset.validation] for text in texts_of(dataset, source)]


def simple(tmp_path: Path, texts: list[str] | bytes, **more: Any) -> DataConfig:
    """A config over one jsonl file, bytes tokenizer, nothing held out."""
    (tmp_path / "raw.jsonl").write_bytes(texts if isinstance(texts, bytes) else jsonl(texts))
    sources = [{"name": "web", "files": str(tmp_path / "raw.jsonl")}]
    output = more.pop("output", tmp_path / "out")
    return config(
        tmp_path,
        output,
        **{"sources": sources, "tokenizer": {"type": "bytes"}, "validation": {"fraction": 0.0}, "packing": [], **more},
    )
