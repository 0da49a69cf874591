"""`mlite score`: how probable given texts are to a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError, Fault
from launcher.finished import open_run, with_tokenizer
from launcher.metrics import perplexity, to_line
from launcher.prompts import Record, in_batches, read_standard_input
from megatron_lite.inference.text import TokenLogprob


def score_texts(
    path: Path, overrides: Sequence[str], *, records: Sequence[Record] | None, prompt: str, tokens: bool, batch_size: int
) -> None:
    """Print one JSON object a record; without records they come from standard input. A record's own prompt comes before `prompt`."""
    run = open_run(path, overrides, command="score")
    model = with_tokenizer(run, overrides)
    if records is None:
        records = read_standard_input(run.groups.world, field="text", keep_blank=False)
    blank = [number for number, record in enumerate(records, 1) if not record.get("prompt", prompt).strip()]
    if model.translates and blank:
        want, fix = "a source for each text", '--prompt SOURCE, or "prompt" in each line of a .jsonl'
        raise ConfigError(
            [Fault("--prompt", f"none for text {', '.join(map(str, blank[:5]))}{' ...' if len(blank) > 5 else ''}", want, fix)]
        )
    for batch in in_batches(records, batch_size):
        found = model.scores([record["text"] for record in batch], prompts=[record.get("prompt", prompt) for record in batch])
        for record, known in zip(batch, found):
            if run.groups.rank == 0:
                print(to_line({**record, **_summary(record["text"], known, tokens=tokens), "step": run.state.step}), end="", flush=True)


def _summary(text: str, known: Sequence[TokenLogprob], *, tokens: bool) -> dict[str, Any]:
    """In nats; bits per byte of the text's UTF-8."""
    logprobs = [each.logprob for each in known if each.logprob is not None]
    total = math.fsum(logprobs)
    line: dict[str, Any] = {"tokens": len(known), "logprob": total}
    if logprobs:
        line["perplexity"] = perplexity(-total / len(logprobs))
    if logprobs and text:  # an encoder-decoder says how probable an end is, though no text comes before it
        line["bits_per_byte"] = -total / math.log(2) / len(text.encode())
    if tokens:
        line["logprobs"] = [[each.text, each.logprob] for each in known]
    return line
