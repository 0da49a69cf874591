"""`mlite generate` and `mlite score`: their options. What they do loads torch and stands in files of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional

import typer

from data_pipeline.errors import ConfigError, Fault
from launcher.prompts import Record, read_texts, require_one_source
from megatron_lite.inference.given import text_faults

if TYPE_CHECKING:
    from launcher.config import RunConfig

Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.", show_default=False)]
Overrides = Annotated[Optional[list[str]], typer.Argument(metavar="[a.b=c ...]", show_default=False)]  # noqa: UP045 (typer reads it)
BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Texts that go through the model at once.")]


def generate(
    run: Run,
    overrides: Overrides = None,
    prompt: Annotated[Optional[list[str]], typer.Option("--prompt", "-p", help="Text to go on from; may be repeated.")] = None,  # noqa: UP045
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--file", help='One prompt a line, or .jsonl with "prompt"; - is standard input.'),
    ] = None,
    interactive: Annotated[bool, typer.Option("--interactive", "-i", help="Ask for a prompt, answer, ask again; Ctrl-D ends.")] = False,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="The longest answer. It also ends where the context is full.")
    ] = 100,
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Answers to each prompt.")] = 1,
    stop: Annotated[Optional[list[str]], typer.Option("--stop", help="Text that ends an answer and isn't shown; may be repeated.")] = None,  # noqa: UP045
    temperature: Annotated[float, typer.Option(help="0: always the most probable token.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Only the k most probable; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option("--top-p", help="Only the fewest that have this probability together.")] = 1.0,
    min_p: Annotated[float, typer.Option("--min-p", help="Only those this times as probable as the most probable.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1: less of what prompt and answer have; CTRL's.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty", help="Off the logits of what the answer has.")] = 0.0,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty", help="Off the logits, times how often it has it.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Answer j of all is drawn with seed + j, whatever the others are.")] = 0,
    beams: Annotated[int, typer.Option("--beams", min=0, help="Beam search of this width instead of sampling.")] = 0,
    length_penalty: Annotated[float, typer.Option("--length-penalty", help="Beams: score = log-probability / tokens ^ this.")] = 1.0,
    early_stopping: Annotated[str, typer.Option("--early-stopping", help="Beams: false, true or never, as transformers has it.")] = "false",
    logprobs: Annotated[bool, typer.Option("--logprobs", help="With --json: the log-probability of each token.")] = False,
    batch_size: BatchSize = 16,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object an answer.")] = False,
) -> None:
    """Text from the newest checkpoint. Without a prompt, from the beginning of a document."""
    translates = _config_of(run, overrides).model.family == "seq2seq"
    require_one_source({"--prompt": bool(prompt), "--file": file is not None, "--interactive": interactive})
    sampling: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "seed": seed,
    }
    search: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": _early(early_stopping)}
    idle = search if not beams else sampling
    unused = {"temperature": 0.8, "top_p": 1.0, "repetition_penalty": 1.0, "length_penalty": 1.0}
    want = "the option's default without --beams" if not beams else "the option's default: beam search draws nothing"
    faults = [Fault(f"--{name.replace('_', '-')}", value, want) for name, value in idle.items() if value != unused.get(name, 0)]
    if logprobs and (not json_lines or beams):
        faults.append(Fault("--logprobs", True, "--json, and no --beams, whose whole log-probability is shown anyway"))
    if beams and samples > beams:
        faults.append(Fault("--samples", samples, f"a count from 1 to that of --beams ({beams})"))
    if translates and not (prompt or file or interactive):
        faults.append(Fault("--prompt", None, "a source to translate, --file FILE, or --interactive"))
    faults += _text_faults("--prompt", prompt) + _text_faults("--stop", stop)
    if "" in (stop or ()):
        faults.append(Fault("--stop", "", "a string that is not empty"))
    if faults:
        raise ConfigError(faults)
    records: list[Record] | None = [{"prompt": text} for text in prompt or [""]]
    if interactive or str(file) == "-":
        records = None  # the first rank reads it
    elif file is not None:
        records = read_texts(file, field="prompt", keep_blank=translates)
    from launcher.commands.generate import Asked, generate_text

    asked = Asked(max_tokens, samples, tuple(stop or ()), logprobs, batch_size, json_lines)
    generate_text(
        run,
        overrides or [],
        records=records,
        interactive=interactive,
        asked=asked,
        sampling=None if beams else sampling,
        beams={"num_beams": beams, "n_best": samples, **search},
    )


def score(
    run: Run,
    overrides: Overrides = None,
    text: Annotated[Optional[list[str]], typer.Option("--text", "-t", help="A text; may be repeated.")] = None,  # noqa: UP045
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What stands before each text and isn't scored.")] = "",
    file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--file", help='One text a line, or .jsonl with "text" and perhaps "prompt"; - is standard input.'),
    ] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also of each token.")] = False,
    batch_size: BatchSize = 8,
) -> None:
    """Log-probability, perplexity and bits per byte of given texts under the newest checkpoint, one JSON object a text."""
    _config_of(run, overrides)
    require_one_source({"--text": bool(text), "--file": file is not None})
    if not text and file is None:
        raise ConfigError([Fault("--text", None, "a text, or --file FILE")])
    if faults := _text_faults("--text", text) + _text_faults("--prompt", [prompt]):
        raise ConfigError(faults)
    records: list[Record] | None = [{"text": each} for each in text] if text else None
    if file is not None and str(file) != "-":
        records = read_texts(file, field="text", keep_blank=False)
    from launcher.commands.score import score_texts

    score_texts(run, overrides or [], records=records, prompt=prompt, tokens=tokens, batch_size=batch_size)


def _early(word: str) -> bool | Literal["never"]:
    known: dict[str, bool | Literal["never"]] = {"true": True, "false": False, "never": "never"}
    if word not in known:
        raise ConfigError([Fault("--early-stopping", word, "false, true or never")])
    return known[word]


def _config_of(run: Path, overrides: list[str] | None) -> RunConfig:
    """A wrong path or override is refused before torch is loaded."""
    from launcher.saved_config import read_config, run_of

    return read_config(run_of(run), overrides or [])


def _text_faults(option: str, texts: list[str] | None) -> list[Fault]:
    """A shell hands over bytes, whatever they are."""
    return [fault for text in texts or [] for fault in text_faults({option: text})]
