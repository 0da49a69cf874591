"""If this fails, a shipped data config does not work, or a key of the config is documented nowhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from data_pipeline.config import DataConfig, load_data_config
from data_pipeline.errors import ConfigError
from data_pipeline.schema import _section_in
from tests.paths import ROOT

CONFIGS = sorted((ROOT / "configs" / "data").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_are_sound(path: Path) -> None:
    """A config that we ship is refused by the command that it is for."""
    assert load_data_config(path).sources


def keys(section: Any) -> set[str]:
    found = set()
    for name, field in section.model_fields.items():
        found.add(name)
        inner = _section_in(field.annotation)
        if inner is not None and issubclass(inner, BaseModel):
            found |= keys(inner)
    return found


def test_the_reference_names_every_key() -> None:
    text = (ROOT / "configs" / "data" / "reference.yaml").read_text()
    assert {key for key in keys(DataConfig) if f"{key}:" not in text} == set()


def test_keys_of_another_kind_of_source_or_tokenizer_are_not_silently_ignored(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for source, tokenizer, wanted in (
        ("{name: a, files: x, split: train}", "{type: bytes}", "no split for a source of files"),
        ("{name: a, dataset: x, format: txt}", "{type: bytes}", "no format for a Hugging Face dataset"),
        ("{name: a, dataset: x, files: y}", "{type: bytes}", "exactly one of files and dataset"),
        ("{name: a, files: x}", "{type: bytes, pretokenizer: gpt2}", "no pretokenizer for a tokenizer of type bytes"),
        ("{name: a, files: x}", "{type: bpe, name_or_path: x}", "no name_or_path for a tokenizer of type bpe"),
        ("{name: a, files: x}", "{type: pretrained}", "name_or_path for a pretrained tokenizer"),
    ):
        path.write_text(f"output: out\nsources: [{source}]\ntokenizer: {tokenizer}\n")
        with pytest.raises(ConfigError, match=wanted):
            load_data_config(path)


def test_reading_a_config_is_light() -> None:
    """`mlite` reads it before it knows whether there is anything to do."""
    code = (
        "import sys; from data_pipeline.config import load_data_config; load_data_config('configs/data/tiny.yaml'); "
        "print([m for m in ('torch', 'tokenizers', 'datasets', 'pyarrow', 'numba', 'scipy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
