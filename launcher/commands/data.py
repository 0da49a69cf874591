"""`mlite data`: raw text to a dataset folder; look at it, check it, trace it; others' token files in and out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

from data_pipeline.errors import ConfigError, Fault
from launcher.commands.row_options import (
    NO_PAIRS,
    OF_PAIRS,
    Length,
    Method,
    SourceLength,
    TargetLength,
    check_pair_shape,
    refuse,
    row_shape,
)
from launcher.commands.trace import trace

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Words = Annotated[Optional[list[str]], typer.Argument(metavar="[CONFIG] [a.b=c ...]", show_default=False)]  # noqa: UP045 (typer reads it)
ConfigOption = Annotated[Optional[str], typer.Option("--config", help="The data config, where it is not the first argument.")]  # noqa: UP045
Folder = Annotated[Path, typer.Argument(metavar="DATASET", help="A dataset folder.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
ShownDocument = Annotated[Optional[str], typer.Option("--document", "-d", help="Show this one, by its id or the id's beginning.")]  # noqa: UP045


@app.command()
def build(
    words: Words = None,
    config: ConfigOption = None,
    quiet: Quiet = False,
    replace: Annotated[bool, typer.Option("--replace", help="Let a different dataset in the output folder give way.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Not here: as Slurm jobs. Words cluster.key=value are the cluster's.")] = False,
    tasks: Annotated[Optional[int], typer.Option("--tasks", min=1, help="With --slurm: tasks of each job array; default 4.")] = None,  # noqa: UP045
    cluster: Annotated[Optional[str], typer.Option("--cluster", help="With --slurm: a file of configs/cluster.")] = None,  # noqa: UP045
) -> None:
    """Raw text to a dataset folder. Started again after a stop or a kill, it goes on."""
    path, overrides = _config_and_overrides(words or [], config)
    if slurm:
        from launcher.slurm.data import submit_build

        refuse({"--quiet": quiet or None}, "what its jobs say goes into their output files")
        submit_build(path, overrides, tasks=4 if tasks is None else tasks, cluster=cluster, replace=replace)
        return
    refuse({"--tasks": tasks, "--cluster": cluster}, "they go with --slurm")
    from data_pipeline.build import build as build_dataset
    from data_pipeline.config import load_data_config

    build_dataset(load_data_config(path, overrides), quiet=quiet, replace=replace)


@app.command()
def pack(
    folder: Folder,
    sequence_length: Length = None,
    method: Method = None,
    source_length: SourceLength = None,
    target_length: TargetLength = None,
) -> None:
    """Make the packing plan for a sequence length. A run makes it too, if it is missing."""
    from data_pipeline.assemble import make_plans
    from data_pipeline.config import PackingConfig
    from data_pipeline.dataset import Dataset
    from data_pipeline.schema import validate

    if sequence_length is None and source_length is None and target_length is None:
        fix = "for example --sequence-length 2048; of pairs --source-length 256 --target-length 256"
        raise ConfigError([Fault("--sequence-length", None, "the targets of a row", fix)])
    dataset = Dataset.open(folder)
    lengths = {"--source-length": source_length, "--target-length": target_length}
    if is_pairs := any(source.pairs for source in dataset.sources):
        refuse({"--sequence-length": sequence_length, "--method": method}, OF_PAIRS)
        check_pair_shape(source_length, target_length)
    else:
        refuse(lengths, NO_PAIRS)
    plan = validate(
        PackingConfig,
        {"source_length": source_length, "target_length": target_length}
        if is_pairs
        else {"sequence_length": sequence_length, "method": method or "best_fit"},
    )
    for line in make_plans(dataset, [plan]):
        print(line)


@app.command()
def inspect(
    folder: Folder,
    document: ShownDocument = None,
    number: Annotated[int, typer.Option("--number", "-n", min=0, help="How many documents of each source to show.")] = 3,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show the tokens one by one.")] = False,
    rows: Annotated[int, typer.Option("--rows", "-r", min=0, help="Instead: so many rows, with their lengths.")] = 0,
    sequence_length: Length = None,
    method: Method = None,
    source_length: SourceLength = None,
    target_length: TargetLength = None,
    seed: Annotated[int, typer.Option("--seed", help="Of rows: the seed of the run that would see them in this order.")] = 1234,
) -> None:
    """What is in a dataset: its books, its sources, its tokenizer, and some documents decoded; or rows, with what stands where."""
    from data_pipeline.dataset import Dataset
    from data_pipeline.show import show_dataset, show_document, show_pair_rows, show_rows

    row_of_text: dict[str, object] = {"--sequence-length": sequence_length, "--method": method}
    row_of_pairs: dict[str, object] = {"--source-length": source_length, "--target-length": target_length}
    if not rows:
        refuse({**row_of_text, **row_of_pairs}, "it goes with --rows")
    if rows and any(source.pairs for source in Dataset.open(folder).sources):
        refuse(row_of_text, OF_PAIRS)
        lengths = check_pair_shape(source_length, target_length)
        show_pair_rows(folder, number=rows, source_length=lengths[0], target_length=lengths[1], seed=seed, tokens=tokens)
    elif rows:
        refuse(row_of_pairs, NO_PAIRS)
        length, packing = row_shape(sequence_length, method)
        show_rows(folder, number=rows, sequence_length=length, packing=packing, seed=seed, tokens=tokens)
    elif document is not None:
        show_document(folder, document, tokens=tokens)
    else:
        show_dataset(folder, number=number, tokens=tokens)


@app.command()
def verify(folder: Folder, quiet: Quiet = False) -> None:
    """Check every byte of a dataset, that each document ends once, and that the books balance. Code 3 where something is wrong."""
    from data_pipeline.verify import verify_dataset

    verify_dataset(folder, quiet=quiet)


app.command()(trace)

Evaluations = Annotated[
    list[str], typer.Argument(metavar="[NAME=]FILES...", help="Evaluation sets as jsonl; or one data config.", show_default=False)
]


@app.command()
def decontaminate(
    folder: Folder,
    evaluations: Evaluations,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where to write the evidence, a JSON line an item and document.")
    ] = None,
    set_: Annotated[Optional[list[str]], typer.Option("--set", help="A setting of the section decontaminate: --set ngram=10.")] = None,  # noqa: UP045
    workers: Annotated[int, typer.Option("--workers", min=1, help="Processes.")] = 1,
    quiet: Quiet = False,
) -> None:
    """Look for evaluation items in a finished dataset. Code 3 where some are found; nothing is changed."""
    from data_pipeline.decontaminate.check import check_dataset, config_for
    from data_pipeline.errors import DataError

    found = check_dataset(folder, config_for(evaluations, set_ or []), output=output, workers=workers, quiet=quiet)
    if found:
        where = f"; see {output}" if output is not None else ": --output FILE says which and where"
        raise DataError(f"{folder}: holds parts of {found:,} evaluation item{'s' if found != 1 else ''}{where}")


Patterns = Annotated[
    list[str], typer.Argument(metavar="FILES...", help="Token files, folders, patterns; Megatron's prefixes.", show_default=False)
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The dataset folder to write.", show_default=False)]
TheirTokenizer = Annotated[
    str, typer.Option("--tokenizer", help="The tokenizer.json that made the ids, or its folder.", show_default=False)
]
TheirFormat = Annotated[str, typer.Option("--format", help="megatron, nanogpt, llmc, npy; auto: by name and first bytes.")]


@app.command("import")
def import_(
    files: Patterns,
    output: Output,
    tokenizer: TheirTokenizer,
    format: TheirFormat = "auto",
    name: Annotated[str, typer.Option("--name", help="What the source is called in reports.")] = "imported",
    validation: Annotated[Optional[list[str]], typer.Option("--validation", help="Token files that are held out, whole.")] = None,  # noqa: UP045
    validation_fraction: Annotated[float, typer.Option("--validation-fraction", min=0.0, help="Or: this share of the documents.")] = 0.0,
    eod_token: Annotated[Optional[str], typer.Option("--eod-token", help="What ends a document, where the files don't say.")] = None,  # noqa: UP045
    bos_token: Annotated[Optional[str], typer.Option("--bos-token", help="What begins one, likewise.")] = None,  # noqa: UP045
    dtype: Annotated[Optional[str], typer.Option("--dtype", help="Of ids in files without a header: uint16, uint32, ...")] = None,  # noqa: UP045
    quiet: Quiet = False,
) -> None:
    """Token files of Megatron-LM, nanoGPT, llm.c or numpy to a dataset folder, with the same ids."""
    from data_pipeline.interchange.importing import Source, import_tokens

    source = Source(name, files, validation or (), validation_fraction)
    import_tokens([source], output, tokenizer=tokenizer, format=format, eod_token=eod_token, bos_token=bos_token, dtype=dtype, quiet=quiet)


@app.command()
def export(
    folder: Folder,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A folder to make.", show_default=False)],
    format: Annotated[str, typer.Option("--format", help="megatron, nanogpt, llmc or npy.", show_default=False)],
    ends: Annotated[str, typer.Option("--ends", help="Ends of documents: keep, drop; auto drops those that an import added.")] = "auto",
) -> None:
    """A dataset to token files of Megatron-LM, nanoGPT, llm.c or numpy, with the same ids; one JSON line a file."""
    from data_pipeline.dataset import Dataset
    from data_pipeline.interchange.exporting import export_tokens

    for file in export_tokens(Dataset.open(folder), output, format=format, ends=ends):
        print(json.dumps(file, ensure_ascii=False))


@app.command()
def publish(
    folder: Folder,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where to, such as s3://bucket/name.", show_default=False)],
    quiet: Quiet = False,
    replace: Annotated[bool, typer.Option("--replace", help="Let a different dataset there give way.")] = False,
) -> None:
    """A dataset to object storage: every file compared, the manifest last. Started again after a kill, it goes on."""
    from data_pipeline.dataset import Dataset
    from data_pipeline.progress import Progress
    from data_pipeline.publish import publish as publish_dataset

    progress = Progress(quiet=quiet)
    sent = publish_dataset(Dataset.open(folder).path, url, replace=replace, progress=progress)
    progress.say(f"{sent} files sent to {url}" if sent else f"everything was in {url} already")


@app.command()
def fertility(
    folder: Folder,
    tokenizer: Annotated[Optional[list[str]], typer.Option("--tokenizer", help="Others beside its own: files or folders.")] = None,  # noqa: UP045
    max_bytes: Annotated[int, typer.Option("--max-bytes", min=1, help="About so much text of each source.")] = 10_000_000,
) -> None:
    """How a tokenizer fits the text: tokens a word, bytes a token, ids used, and whether every text comes back."""
    from data_pipeline.tokenizer.fertility import report

    print(report(folder, tokenizer or (), max_bytes=max_bytes))


# ------------------------------------------------------------------------------------------------- reading


def _config_and_overrides(words: list[str], config: str | None) -> tuple[str, list[str]]:
    """CONFIG is the first word without `=`, or --config."""
    paths = [word for word in words if "=" not in word]
    given = [*([config] if config is not None else []), *paths]
    if len(given) != 1:
        what = "none" if not given else " ".join(given)
        raise ConfigError(
            [Fault("CONFIG", what, "the path of one data config", "for example: mlite data build configs/data/tiny.yaml workers=4")]
        )
    return given[0], [word for word in words if "=" in word]
