"""`mlite generate`: text from a checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.errors import ConfigError
from launcher.finished import open_run, with_tokenizer
from launcher.metrics import to_line
from launcher.prompts import Record, in_batches, read_standard_input, typed_lines
from megatron_lite.checkpoint.agree import broadcast_json
from megatron_lite.inference.beam import BeamOptions
from megatron_lite.inference.given import is_text
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.inference.text import Answer, LanguageModel
from megatron_lite.parallel.groups import ProcessGroups


@dataclass(frozen=True)
class Asked:
    """What is to be made of each prompt, and how it is shown."""

    max_tokens: int = 100
    samples: int = 1
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    batch_size: int = 16  # answers at once
    json_lines: bool = False


def generate_text(
    path: Path,
    overrides: Sequence[str],
    *,
    records: Sequence[Record] | None,
    asked: Asked,
    sampling: Mapping[str, Any] | None,
    beams: Mapping[str, Any] | None = None,
    interactive: bool = False,
) -> None:
    """Print each record's prompt and what follows it, sampled, or searched for where `sampling` is None. Without records they come from
    standard input. One prompt's only sample appears as it is made. Blank lines of a plain file are no prompts, but sources whose
    translations are blank lines, so that line n stays line n."""
    options = SamplingOptions(**sampling) if sampling is not None else None
    search = BeamOptions(**(beams or {})) if options is None else None
    run = open_run(path, overrides, command="generate")
    model = with_tokenizer(run, overrides)
    answers = _Answers(model, asked, options, search, speaks=run.groups.rank == 0, step=run.state.step)
    if interactive:
        for prompt in _typed(run.groups):
            try:
                answers.answer([{"prompt": prompt}])
            except ConfigError as error:  # on every rank: too long, say
                _complain(error, aloud=answers.speaks)
            else:
                answers.seed_after(asked.samples)
        return
    if records is None:
        records = read_standard_input(run.groups.world, field="prompt", keep_blank=model.translates)
    for batch in in_batches(records, max(1, asked.batch_size // asked.samples)):
        answers.answer(batch, alone=len(records) == 1)
        answers.seed_after(len(batch) * asked.samples)


def _typed(groups: ProcessGroups) -> Iterator[str]:
    """Prompts that are typed at the first rank, until there are no more."""
    lines = _asked_for() if groups.rank == 0 else iter(())
    while (line := broadcast_json(next(lines, None), groups.world)) is not None:
        yield line


def _asked_for() -> Iterator[str]:
    """Of what is typed, what is text."""
    lines = typed_lines()
    while True:
        _put("> " if sys.stdin.isatty() else "")
        line = next(lines, None)
        if line is None:
            return
        if is_text(line):
            yield line
        else:
            _complain(f"the prompt is no text in {sys.stdin.encoding} ({line!r})", aloud=True)


def _complain(why: object, *, aloud: bool) -> None:
    if aloud:
        print(f"mlite: {why}", file=sys.stderr, flush=True)


@dataclass
class _Answers:
    """Answers, printed."""

    model: LanguageModel
    asked: Asked
    options: SamplingOptions | None
    search: BeamOptions | None
    speaks: bool  # this rank prints
    step: int

    def seed_after(self, answers: int) -> None:
        if self.options is not None:
            self.options = replace(self.options, seed=self.options.seed + answers)

    def answer(self, batch: Sequence[Record], *, alone: bool = True) -> None:
        asked, prompts = self.asked, [record["prompt"] for record in batch]
        streamed = alone and asked.samples == 1 and not asked.json_lines and self.options is not None and self.speaks
        translates = self.model.translates
        streamed = streamed and not translates  # a translation is shown as one line, once it is whole
        show = _shown_after(prompts[0])
        if self.options is not None:
            found = self.model.answers(
                prompts,
                max_new_tokens=asked.max_tokens,
                sampling=self.options,
                stop=asked.stop,
                n=asked.samples,
                logprobs=asked.logprobs,
                on_text=(lambda _, text: show(text)) if streamed else None,
            )
        else:
            found = self.model.best(prompts, max_new_tokens=asked.max_tokens, beams=self.search, stop=asked.stop)
        if not self.speaks:
            return
        if streamed:
            show("\n")
        for record, answers in zip(batch, found):
            for number, each in enumerate(answers):
                if asked.json_lines:
                    _put(to_line(self._line(record, each, number)))
                elif not streamed:
                    one_line = " ".join(each.text.split("\n"))
                    _put(f"{one_line}\n" if translates else f"{each.prompt}{each.text}\n---\n")

    def _line(self, record: Record, answer: Answer, number: int) -> dict[str, Any]:
        line = {**record, "text": answer.text, "tokens": len(answer.tokens), "finish": answer.finish, "step": self.step}
        if self.asked.samples > 1:
            line["sample"] = number
        line |= {key: value for key in ("seed", "score", "logprob") if (value := getattr(answer, key)) is not None}
        if self.asked.logprobs:
            line["logprobs"] = [[text, logprob] for text, logprob in zip(self.model.token_texts(answer), answer.logprobs)]
        return line


def _shown_after(prompt: str) -> Callable[[str], None]:
    """Prints pieces, before the first of them the prompt: one that is refused is not shown."""
    before = [prompt]

    def show(piece: str) -> None:
        _put("".join(before) + piece)
        before.clear()

    return show


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
