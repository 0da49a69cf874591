"""If this fails, texts of other languages stay, or texts of the wanted ones go."""

from __future__ import annotations

import builtins
import gzip
from typing import Any

import pytest

from data_pipeline import language
from data_pipeline.config import DataConfig
from data_pipeline.document import Document
from data_pipeline.errors import ConfigError
from data_pipeline.filters.config import FiltersConfig, LanguageConfig
from data_pipeline.filters.stage import Filters, filters_key
from data_pipeline.language import check_languages, identify, sample
from data_pipeline.schema import validate
from data_pipeline.step import Drop
from tests.paths import corpora

TEXTS = {
    "en": "The children went down to the river in the morning and came back with wet shoes.",
    "de": "Die Kinder gingen am Morgen zum Fluss hinunter und kamen mit nassen Schuhen zurück.",
    "fr": "Les enfants sont descendus à la rivière le matin et sont revenus les chaussures mouillées.",
    "ru": "Утром дети спустились к реке и вернулись в мокрых ботинках.",
    "zh": "孩子们早上去了河边，回来时鞋子都湿了。",
}


def test_languages_of_single_sentences() -> None:
    assert {code: identify(text, sample_chars=1000)[0] for code, text in TEXTS.items()} == {code: code for code in TEXTS}


def test_capitals_are_no_other_language() -> None:
    """A licence's disclaimer is English, in a text of its own or in one with other lines."""
    shouted = "THIS SOFTWARE IS PROVIDED AS IS, WITHOUT ANY WARRANTY, NOT EVEN THAT IT IS FIT FOR A PARTICULAR PURPOSE."
    for text in (shouted, f"Copyright (C) YEAR by AUTHOR\n\n{shouted}\n{shouted[::-1][:20]}", f"{TEXTS['en']}\n{shouted}\n{shouted}"):
        code, score = identify(text, sample_chars=1000)
        assert code == "en" and score >= 0.65, (text, score)


def test_other_languages_go_and_so_do_texts_of_none() -> None:
    step = Filters(FiltersConfig(language=LanguageConfig(keep=["en", "de"])))
    results = {code: step.apply(Document("0" * 32, text, "s")) for code, text in TEXTS.items()}
    reasons = {code: result.reason if isinstance(result, Drop) else "" for code, result in results.items()}
    assert reasons == {"en": "", "de": "", "fr": "language_other", "ru": "language_other", "zh": "language_other"}
    strict = Filters(FiltersConfig(language=LanguageConfig(keep=["en"], min_score=0.9999)))
    assert strict.apply(Document("0" * 32, "0 1 2", "s")) in (Drop("language_unsure"), Drop("language_other"))


def test_a_long_text_is_judged_by_its_beginning_middle_and_end() -> None:
    text = "".join(chr(65 + n % 26) for n in range(10_000))
    assert sample(text, 100) == f"{text[:34]} {text[4983:5016]} {text[-33:]}"
    assert sample(text[:100], 100) == text[:100]


def test_the_real_captions_are_told_apart() -> None:
    """Multi30k's 1,014 validation captions in each language, one short sentence each: at most 1 in 100 wrongly dropped, none wrongly kept."""
    folder = corpora("multi30k_en_de")
    for code in ("en", "de"):
        lines = gzip.decompress((folder / f"val.{code}.gz").read_bytes()).decode().splitlines()[::5]
        found = [identify(line, sample_chars=1000) for line in lines]
        assert sum(name == code and score >= 0.65 for name, score in found) >= 0.99 * len(lines)
        assert sum(name != code and score >= 0.65 for name, score in found) <= 1


def test_what_the_model_does_not_know_is_refused_before_any_work() -> None:
    with pytest.raises(ConfigError, match=r"filters.language.keep: got 'xxx', wanted a language that the model knows"):
        check_languages(["en", "xxx"])
    config = validate(FiltersConfig, {"language": {"keep": ["en"]}})
    assert filters_key(config) != filters_key(validate(FiltersConfig, {"language": {"keep": ["de"]}}))


def test_without_the_package_the_fix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def missing(name: str, *more: Any) -> Any:
        if name.startswith("py3langid"):
            raise ImportError(name)
        return original(name, *more)

    language._model.cache_clear()
    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-lite\[language\]'"):
        filters_key(validate(FiltersConfig, {"language": {"keep": ["en"]}}))
    monkeypatch.undo()
    assert validate(DataConfig, {"output": "x", "sources": [{"name": "a", "files": "b"}], "filters": {"language": {"keep": ["en"]}}})
