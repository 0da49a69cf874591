"""`mlite data`: raw text to a dataset folder; look at it, check it, trace it; others' token files in and out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from data_pipeline.errors import ConfigError, Fault

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

Words = Annotated[Optional[list[str]], typer.Argument(metavar="[CONFIG] [a.b=c ...]", show_default=False)]  # noqa: UP045 (typer reads it)
ConfigOption = Annotated[Optional[str], typer.Option("--config", help="The data config, where it is not the first argument.")]  # noqa: UP045
Folder = Annotated[Path, typer.Argument(metavar="DATASET", help="A dataset folder.", show_default=False)]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")]
Length = Annotated[Optional[int], typer.Option("--sequence-length", "-s", min=1, help="Targets a row.")]  # noqa: UP045
ShownDocument = Annotated[Optional[str], typer.Option("--document", "-d", help="Show this one, by its id or the id's beginning.")]  # noqa: UP045
Among = Annotated[Optional[int], typer.Option("--num-samples", min=1, help="Look among so many samples; default one epoch.")]  # noqa: UP045
Method = Annotated[Optional[str], typer.Option("--method", help="best_fit or concat; default best_fit.")]  # noqa: UP045
SourceLength = Annotated[Optional[int], typer.Option("--source-length", min=2, help="Of pairs: tokens a row for the encoder.")]  # noqa: UP045
TargetLength = Annotated[Optional[int], typer.Option("--target-length", min=2, help="Of pairs: targets a row.")]  # noqa: UP045
OF_PAIRS = "a row of pairs has --source-length and --target-length, and no method"


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

        _refuse({"--quiet": quiet or None}, "what its jobs say goes into their output files")
        submit_build(path, overrides, tasks=4 if tasks is None else tasks, cluster=cluster, replace=replace)
        return
    _refuse({"--tasks": tasks, "--cluster": cluster}, "they go with --slurm")
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
    lengths = {"source_length": source_length, "target_length": target_length}
    if is_pairs := any(source.pairs for source in dataset.sources):
        _refuse({"--sequence-length": sequence_length, "--method": method}, OF_PAIRS)
        _check_pair_shape(source_length, target_length)
    else:
        _refuse({"--source-length": source_length, "--target-length": target_length}, "the dataset has no pairs: give --sequence-length")
    plan = validate(PackingConfig, lengths if is_pairs else {"sequence_length": sequence_length, "method": method or "best_fit"})
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
    from data_pipeline.show import show_dataset, show_document, show_pair_rows, show_rows

    row_of_text: dict[str, object] = {"--sequence-length": sequence_length, "--method": method}
    if not rows:
        _refuse({**row_of_text, "--source-length": source_length, "--target-length": target_length}, "it goes with --rows")
    if rows and (source_length, target_length) != (None, None):
        _refuse(row_of_text, OF_PAIRS)
        lengths = _check_pair_shape(source_length, target_length)
        show_pair_rows(folder, number=rows, source_length=lengths[0], target_length=lengths[1], seed=seed, tokens=tokens)
    elif rows:
        length, packing = _row_shape(sequence_length, method)
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


@app.command()
def trace(
    target: Annotated[Path, typer.Argument(metavar="RUN|DATASET", help="A run folder, or a dataset folder.", show_default=False)],
    sample: Annotated[Optional[int], typer.Option("--sample", min=0, help="The sample's number, from 0.")] = None,  # noqa: UP045
    step: Annotated[Optional[int], typer.Option("--step", min=1, help="Of a run: the step, as metrics.jsonl counts; with --row.")] = None,  # noqa: UP045
    row: Annotated[int, typer.Option("--row", min=0, help="The row in that step's global batch, from 0.")] = 0,
    position: Annotated[int, typer.Option("--position", "-p", min=0, help="The target's place in the row, from 0.")] = 0,
    document: Annotated[Optional[str], typer.Option("--document", "-d", help="Instead: the samples that hold this document.")] = None,  # noqa: UP045
    file: Annotated[Optional[str], typer.Option("--file", help="Instead: what became of a record of this input file.")] = None,  # noqa: UP045
    line: Annotated[int, typer.Option("--line", min=1, help="With --file: the record's number, from 1; of jsonl, the line.")] = 1,
    num_samples: Among = None,
    sequence_length: Length = None,
    method: Method = None,
    source_length: SourceLength = None,
    target_length: TargetLength = None,
    seed: Annotated[int, typer.Option("--seed", help="Of a dataset: the seed of the run that it is traced for.")] = 1234,
    validation: Annotated[bool, typer.Option("--validation", help="The held-out rows.")] = False,
) -> None:
    """Where a token of a training row came from, as JSON; or, with --document, which samples hold a document; or, with --file and
    --line, what became of a place in the input, and the samples that hold it."""
    from data_pipeline.pair_loader import PairRowSource
    from data_pipeline.trace import find_documents, trace_pairs
    from data_pipeline.trace import trace as trace_token

    lengths = (source_length, target_length) if (source_length, target_length) != (None, None) else None
    shape: dict[str, Any] = {"sequence_length": sequence_length, "method": method, "seed": seed, "pair_lengths": lengths}
    if file is not None:
        _trace_input(target, file, line, num_samples=num_samples, **shape)
        return
    rows, steps = _rows(target, split="validation" if validation else "train", **shape)
    if document is not None:
        split = "validation" if validation else "train"
        found = [each for each in find_documents(rows.datasets, document) if each.split == split]
        if not found:
            kind = "held-out" if validation else "training"
            raise ConfigError([Fault("--document", document, f"a document of the {kind} rows", "add or drop --validation")])
        for each in found:
            _print_samples(rows, steps, each, num_samples)
        return
    if (sample is None) == (step is None) or (step is not None and steps is None):
        fix = "steps count from 1, samples and rows from 0; held-out rows have samples alone"
        raise ConfigError([Fault("--sample", sample, "--sample N, or of a run --step N --row N", fix)])
    if step is not None:
        sample = steps.sample(step, row)
    assert sample is not None
    if validation and sample >= len(rows):
        raise ConfigError([Fault("--sample", sample, f"0 to {len(rows) - 1}: there are {len(rows)} held-out rows")])
    if isinstance(rows, PairRowSource):
        for pair in trace_pairs(rows, sample):
            _print_json(pair.__dict__)
        return
    _print_json(trace_token(rows, sample, position).__dict__)


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
        _print_json(file)


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


def _trace_input(target: Path, file: str, line: int, *, num_samples: int | None, **shape: Any) -> None:
    """What became of it; and the samples, of a run, or of a dataset where the length of a row is given."""
    from data_pipeline.dataset import Dataset
    from data_pipeline.trace import find_documents
    from data_pipeline.trace_input import trace_input

    is_run = (target / "config.yaml").is_file()
    if not is_run and shape["sequence_length"] is None and shape["pair_lengths"] is None:
        for each in trace_input([Dataset.open(target)], file, line):
            _print_json(each)
        return
    rows, steps = _rows(target, split="train", **shape)
    found = trace_input(rows.datasets, file, line)
    for each in found:
        _print_json(each)
    for document in dict.fromkeys(each["document"] for each in found if each["outcome"] == "stored" and each["split"] == "train"):
        for stored in find_documents(rows.datasets, document):
            _print_samples(rows, steps, stored, num_samples)


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


def _print_samples(rows: Any, steps: Any, found: Any, num_samples: int | None) -> None:
    """Those that hold the document, with step and row where a run of several datasets or batch sizes took them."""
    from data_pipeline.trace import samples_of

    where = {"data": str(rows.dataset(found.entry).path)} if len(rows.datasets) > 1 else {}
    among = {"num_samples": num_samples or len(rows), "entry": found.entry}
    for sample in samples_of(rows, split=found.split, source=found.source, document=found.number, **among):
        place = steps.place(sample) if steps is not None else None
        _print_json({"sample": sample, **({"step": place[0], "row": place[1]} if place else {}), **where})


def _rows(
    target: Path,
    *,
    sequence_length: int | None,
    method: str | None,
    seed: int,
    split: str,
    pair_lengths: tuple[int | None, int | None] | None = None,
) -> tuple[Any, Any]:
    """(rows, StepSamples or None): of a run as its saved config has them, of a dataset as the options say. Held-out rows have no steps."""
    from data_pipeline.loader import Dataset, Phase, RowSource

    row_of_text: dict[str, object] = {"--sequence-length": sequence_length, "--method": method}
    if (target / "config.yaml").is_file():
        of_pairs = dict(zip(("--source-length", "--target-length"), pair_lengths or ()))
        _refuse({**row_of_text, **of_pairs}, "the rows of a run are as its config has them")
        from launcher.datasets import open_datasets, open_rows
        from launcher.metrics import JsonLines
        from launcher.mixture import mixture_of_run, phases_for, phases_of_run
        from launcher.resume_policy import require_same_packing
        from launcher.run_folder import RunFolder
        from launcher.saved_config import read_config
        from launcher.step_samples import samples_of_steps

        config = read_config(target)
        datasets, folder = open_datasets(config.data), RunFolder(target)
        rows = open_rows(config, datasets, split=split)
        if split != "train":
            return rows, None
        if (written := mixture_of_run(folder)) is not None:
            require_same_packing(written, rows.identity["packing_version"], folder=target)
        phases = phases_of_run(folder) or [Phase.from_dict(phase) for phase in phases_for(config, datasets)]
        events = [event for _, event in JsonLines(folder.events).lines() if event is not None]
        return rows.with_phases(phases), samples_of_steps(events, config.training.global_batch_size)
    if pair_lengths is not None:
        from data_pipeline.pair_loader import PairRowSource

        _refuse(row_of_text, OF_PAIRS)
        one, other = _check_pair_shape(*pair_lengths)
        return PairRowSource.open([(Dataset.open(target), 1.0, None)], source_length=one, target_length=other, seed=seed, split=split), None
    length, how = _row_shape(sequence_length, method)
    return RowSource.open([(Dataset.open(target), 1.0, None)], sequence_length=length, packing=how, seed=seed, split=split), None


def _check_pair_shape(source_length: int | None, target_length: int | None) -> tuple[int, int]:
    if source_length is None or target_length is None:
        raise ConfigError(
            [Fault("--source-length", source_length, "it and --target-length", "the places of a row of pairs on either side")]
        )
    return source_length, target_length


def _refuse(options: Mapping[str, object], why: str) -> None:
    """Options of which nothing would come here, where they were given."""
    if faults := [Fault(name, value, "nothing here", why) for name, value in options.items() if value is not None]:
        raise ConfigError(faults)


def _row_shape(sequence_length: int | None, method: str | None) -> tuple[int, Any]:
    method = method or "best_fit"
    if sequence_length is None:
        raise ConfigError(
            [Fault("--sequence-length", None, "the targets of a row", "or, to trace, give the run's folder in place of the dataset's")]
        )
    if method not in ("best_fit", "concat"):
        raise ConfigError([Fault("--method", method, "best_fit or concat")])
    return sequence_length, method


def _print_json(value: dict[str, Any]) -> None:
    import json

    print(json.dumps(value, ensure_ascii=False))
