"""If this fails, the commands that `mlite init` prints end in an error on a folder with more in it than text of one kind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from data_pipeline.build import build
from data_pipeline.config import load_data_config
from data_pipeline.errors import ConfigError, DataError
from data_pipeline.storage import list_files
from launcher.commands.init import look_at, patterns_of, write_configs


def write_mixed(folder: Path) -> Path:
    """Text in three formats, more bytes that are none, and a file with records that hold no text."""
    import pyarrow
    import pyarrow.parquet

    (folder / "sub").mkdir(parents=True)
    (folder / "photo.png").write_bytes(b"\x89PNG" + bytes(100_000))
    (folder / "paper.pdf").write_bytes(b"%PDF" + bytes(1000))
    (folder / "sub" / "table.csv.gz").write_bytes(gzip.compress(b"a,b\n1,2\n"))
    for name in ("a.txt", "sub/b.md", "README"):
        (folder / name).write_text("".join(f"a paragraph {n} of {name}\n\n" for n in range(30)))
    with gzip.open(folder / "sub" / "c.jsonl.gz", "wt") as file:
        file.writelines(json.dumps({"body": f"record {n}", "n": n}) + "\n" for n in range(30))
    pyarrow.parquet.write_table(pyarrow.table({"story": [f"row {n}" for n in range(30)]}), folder / "d.parquet")
    return folder


def test_what_is_not_read_is_left_out_and_every_format_is_a_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_mixed(tmp_path / "my [texts]")
    write_configs("x", "my [texts]")
    shown = capsys.readouterr().out
    assert "Left out: 1 .pdf file: not a format that is read\nLeft out: 1 .png file" in shown and "5 files, about" in shown
    config = load_data_config("configs/data/x.yaml", ["workers=1", "tokenizer={type: bytes}", "dedup=null"])
    assert {source.name: source.text_field for source in config.sources} == {"x-jsonl": "body", "x-parquet": "story", "x-txt": "text"}
    dataset = build(config, quiet=True)
    stored = {
        name: sum(s.num_documents for s in [*dataset.sources, *dataset.validation] if s.name == name) for name in ("x-jsonl", "x-txt")
    }
    assert stored == {"x-jsonl": 30, "x-txt": 90}
    with pytest.raises(DataError, match=r"nothing there is read\n  1 .pdf file"):
        look_at("my ?texts?/*.pdf")


def test_one_kind_alone_keeps_the_pattern_that_was_given(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    assert [files.patterns for files in look_at(str(tmp_path)).sources] == [str(tmp_path)]
    (tmp_path / "numbers.json").write_text('{\n "a": 1\n}\n')
    found = look_at(str(tmp_path))
    assert [files.patterns for files in found.sources] == [[f"{tmp_path}/**/*.txt"]]
    assert found.left_out == ["1 jsonl file: no record has a field of text"]
    (tmp_path / "a.txt").unlink()
    with pytest.raises(ConfigError, match="records with a field of text"):
        look_at(str(tmp_path))


@pytest.mark.parametrize("pattern", ["", "/*", "/**", "/*[a-z]*", "/**/*"])
def test_patterns_match_what_is_read_and_nothing_else(tmp_path: Path, pattern: str) -> None:
    folder = write_mixed(tmp_path / "raw")
    for name in ("x.txt.pdf", "y.TXT"):
        (folder / name).write_text("text")
    files = list_files(f"{folder}{pattern}")
    wanted = [file for file in files if not file.endswith((".png", ".pdf", ".csv.gz"))]
    assert sorted(list_files(patterns_of(f"{folder}{pattern}", wanted))) == sorted(wanted) and len(wanted) < len(files)
