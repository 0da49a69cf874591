"""What a model can't read, said before it is asked to."""

from __future__ import annotations

from collections.abc import Sequence

from data_pipeline.errors import ConfigError, Fault
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.decoder import Decoder
from megatron_lite.models.seq2seq import Seq2Seq


def require_prompts(model: Decoder, prompts: Sequence[Sequence[int]], *, begin_id: int | None, faults: Sequence[Fault] = ()) -> None:
    """Raises ConfigError, `faults` first, unless the model can go on from each prompt, or write of it as of a source: something to
    read, no longer than the context, all ids in the vocabulary."""
    found = [*faults, *_of_begin(begin_id, model.config)]
    if isinstance(model, Seq2Seq) and begin_id is None:
        found.append(Fault("begin_id", None, "the id that stood before each target in training"))
    _refuse(found + _of_prompts(model, prompts, begin_id))


def require_texts(model: Decoder, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], *, begin_id: int | None) -> None:
    """Raises ConfigError unless the model can say how probable each text is after its prompt, or of it as of a source."""
    of_source, config = isinstance(model, Seq2Seq), model.config
    found = _of_begin(begin_id, config) + (_of_prompts(model, prompts, begin_id) if of_source else [])
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids = text if of_source else [*prompt, *text]
        read = len(ids) + (begin_id is not None) - 1  # nothing follows the last
        if read > config.max_position_embeddings:
            fix = "score it in parts; `mlite eval` takes a dataset"
            found.append(Fault(f"text {row}", f"{read} tokens to read", _at_most(config), fix))
        found += _outside(f"text {row}", ids, config)
    _refuse(found)


def _of_prompts(model: Decoder, prompts: Sequence[Sequence[int]], begin_id: int | None) -> list[Fault]:
    faults: list[Fault] = []
    begun = begin_id is not None and not isinstance(model, Seq2Seq)  # it stands before the prompt itself
    for row, prompt in enumerate(prompts):
        length = len(prompt) + begun
        if not length:
            faults.append(Fault(f"prompt {row}", "no tokens", "at least one", _fix_of_empty(model)))
        elif length > model.config.max_position_embeddings:
            faults.append(Fault(f"prompt {row}", f"{length} tokens", _at_most(model.config), "shorten it"))
        faults += _outside(f"prompt {row}", prompt, model.config)
    return faults


def _fix_of_empty(model: Decoder) -> str:
    if isinstance(model, Seq2Seq):
        return "a source ends with the end-of-document id, as in training"
    return "give a begin id, such as the end-of-document id"


def _of_begin(begin_id: int | None, config: ModelConfig) -> list[Fault]:
    return [] if begin_id is None else _outside("begin_id", [begin_id], config)


def _outside(name: str, ids: Sequence[int], config: ModelConfig) -> list[Fault]:
    outside = [token for token in ids if not 0 <= token < config.vocabulary]
    fix = "encode it with the run's own tokenizer"
    return [Fault(name, token, f"ids from 0 to {config.vocabulary - 1}", fix) for token in outside[:1]]


def _at_most(config: ModelConfig) -> str:
    return f"at most max_position_embeddings ({config.max_position_embeddings})"


def _refuse(faults: list[Fault]) -> None:
    if faults:
        raise ConfigError(faults)
