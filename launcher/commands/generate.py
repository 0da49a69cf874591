"""`mlite generate`: text from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from data_pipeline.tokenizer.encode import Encoder
from launcher.finished import dataset_of, open_run
from launcher.metrics import to_line
from megatron_lite.inference.generate import generate
from megatron_lite.inference.sampling import SamplingOptions


def generate_text(
    path: Path,
    overrides: Sequence[str],
    *,
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    json_lines: bool = False,
) -> None:
    """Print each prompt and what follows it; one prompt's text appears as it is made. Prompt n is sampled with seed + n."""
    options = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    run = open_run(path, overrides)
    dataset = dataset_of(run.config, run.state, run.checkpoint)
    encoder = Encoder.open(dataset.tokenizer_path)
    speaks = run.groups.rank == 0
    streamed = encoder.stream() if len(prompts) == 1 and not json_lines and speaks else None
    if streamed is not None:
        _put(prompts[0])
    begin = dataset.eod_id if dataset.bos_id is None else dataset.bos_id
    answers = generate(
        run.model,
        [encoder.encode(prompt).tolist() for prompt in prompts],
        max_new_tokens=max_tokens,
        sampling=[replace(options, seed=seed + number) for number in range(len(prompts))],
        begin_id=begin,
        stop_ids=[dataset.eod_id],
        on_token=(lambda row, token: _put(streamed.feed(token))) if streamed is not None else None,
    )
    if streamed is not None:
        _put(streamed.finish() + "\n")
    elif speaks:
        for prompt, answer in zip(prompts, answers):
            text = encoder.decode(answer.tokens)
            if json_lines:
                _put(
                    to_line({"prompt": prompt, "text": text, "tokens": len(answer.tokens), "finish": answer.finish, "step": run.state.step})
                )
            else:
                _put(f"{prompt}{text}\n---\n")


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
