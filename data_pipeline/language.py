"""Which language a text is in, by the model inside the package py3langid (naive Bayes over byte n-grams, 140 languages; Lui and
Baldwin 2012). Its own package, since it is optional: pip install 'megatron-lite[language]'."""

from __future__ import annotations

import difflib
import functools
import importlib.metadata
from collections.abc import Sequence
from typing import Any

from data_pipeline.errors import ConfigError, Fault

_FIELD = "filters.language"


def identify(text: str, *, sample_chars: int) -> tuple[str, float]:
    """(ISO 639 code, probability) of a sample of the text."""
    lines = sample(text, sample_chars).split("\n")  # capitals are no features of a language: the model knows few words in them
    code, score = _model().classify("\n".join(line.lower() if line.isupper() else line for line in lines))
    return str(code), float(score)


def sample(text: str, num_chars: int) -> str:
    """The text, or beginning, middle and end of a longer one, together `num_chars` and two spaces."""
    if len(text) <= num_chars:
        return text
    part = num_chars // 3
    middle = (len(text) - part) // 2
    return " ".join([text[: num_chars - 2 * part], text[middle : middle + part], text[-part:]])


def check_languages(codes: Sequence[str]) -> str:
    """The version of the model. Raises ConfigError where it isn't installed or doesn't know a language."""
    labels = sorted(_model().labels)
    faults = []
    for code in codes:
        if code not in labels:
            near = difflib.get_close_matches(code, labels, n=3, cutoff=0.3)
            faults.append(
                Fault(f"{_FIELD}.keep", code, "a language that the model knows", f"near ones: {', '.join(near) or ', '.join(labels)}")
            )
    if faults:
        raise ConfigError(faults)
    return f"py3langid {importlib.metadata.version('py3langid')}"


@functools.cache
def _model() -> Any:
    try:
        from py3langid.langid import MODEL_FILE, LanguageIdentifier
    except ImportError:
        fix = "pip install 'megatron-lite[language]', or leave filters.language out"
        raise ConfigError([Fault(_FIELD, "a language filter", "the package py3langid, which is not installed", fix)]) from None
    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
