"""`mlite data trace`: where a token of a training row came from, or what became of a place in the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from data_pipeline.errors import ConfigError, Fault
from launcher.commands.row_options import OF_PAIRS, Length, Method, SourceLength, TargetLength, check_pair_shape, refuse, row_shape

Among = Annotated[Optional[int], typer.Option("--num-samples", min=1, help="Look among so many samples; default one epoch.")]  # noqa: UP045


def trace(
    target: Annotated[Path, typer.Argument(metavar="RUN|DATASET", help="A run folder, or a dataset folder.", show_default=False)],
    sample: Annotated[Optional[int], typer.Option("--sample", min=0, help="The sample's number, from 0.")] = None,  # noqa: UP045
    step: Annotated[Optional[int], typer.Option("--step", min=1, help="Of a run: the step, as metrics.jsonl counts; with --row.")] = None,  # noqa: UP045
    row: Annotated[Optional[int], typer.Option("--row", min=0, help="The row in that step's global batch; default 0, the first.")] = None,  # noqa: UP045
    position: Annotated[Optional[int], typer.Option("--position", "-p", min=0, help="The target's place in the row; default 0.")] = None,  # noqa: UP045
    document: Annotated[Optional[str], typer.Option("--document", "-d", help="Instead: the samples that hold this document.")] = None,  # noqa: UP045
    file: Annotated[Optional[str], typer.Option("--file", help="Instead: what became of a record of this input file.")] = None,  # noqa: UP045
    line: Annotated[
        int | None, typer.Option("--line", min=1, help="With --file: the record's number, default 1; of jsonl, the line.")
    ] = None,
    num_samples: Among = None,
    sequence_length: Length = None,
    method: Method = None,
    source_length: SourceLength = None,
    target_length: TargetLength = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of a dataset: the seed of the run that it is traced for; default 1234.")
    ] = None,
    validation: Annotated[bool, typer.Option("--validation", help="The held-out rows.")] = False,
) -> None:
    """Where a token of a training row came from, as JSON; or, with --document, which samples hold a document; or, with --file and
    --line, what became of a place in the input, and the samples that hold it."""
    from data_pipeline.pair_loader import PairRowSource
    from data_pipeline.trace import find_documents, trace_pairs
    from data_pipeline.trace import trace as trace_token

    lengths = (source_length, target_length) if (source_length, target_length) != (None, None) else None
    shape: dict[str, Any] = {"sequence_length": sequence_length, "method": method, "seed": seed, "pair_lengths": lengths}
    of_a_place: dict[str, object] = {"--sample": sample, "--step": step, "--row": row, "--position": position}
    if file is not None:
        refuse({**of_a_place, "--document": document, "--validation": validation or None}, "--file is looked for everywhere")
        _trace_input(target, file, line or 1, num_samples=num_samples, **shape)
        return
    refuse({"--line": line}, "it goes with --file")
    if document is None:
        refuse({"--num-samples": num_samples}, "it goes with --document or --file")
    else:
        refuse(of_a_place, "all places of the document are looked for")
    if step is None:
        refuse({"--row": row}, "it goes with --step")
    rows, steps = rows_of(target, split="validation" if validation else "train", **shape)
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
        sample = steps.sample(step, row or 0)
    assert sample is not None
    if validation and sample >= len(rows):
        raise ConfigError([Fault("--sample", sample, f"0 to {len(rows) - 1}: there are {len(rows)} held-out rows")])
    if isinstance(rows, PairRowSource):
        refuse({"--position": position}, "a row of pairs is shown whole")
        for pair in trace_pairs(rows, sample):
            _print_json(pair.__dict__)
        return
    _print_json(trace_token(rows, sample, position or 0).__dict__)


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
    rows, steps = rows_of(target, split="train", **shape)
    found = trace_input(rows.datasets, file, line)
    for each in found:
        _print_json(each)
    for document in dict.fromkeys(each["document"] for each in found if each["outcome"] == "stored" and each["split"] == "train"):
        for stored in find_documents(rows.datasets, document):
            _print_samples(rows, steps, stored, num_samples)


def rows_of(
    target: Path,
    *,
    sequence_length: int | None,
    method: str | None,
    seed: int | None,
    split: str,
    pair_lengths: tuple[int | None, int | None] | None = None,
) -> tuple[Any, Any]:
    """(rows, StepSamples or None): of a run as its saved config has them, of a dataset as the options say. Held-out rows have no steps."""
    from data_pipeline.loader import Dataset, Phase, RowSource

    row_of_text: dict[str, object] = {"--sequence-length": sequence_length, "--method": method}
    if (target / "config.yaml").is_file():
        of_pairs = dict(zip(("--source-length", "--target-length"), pair_lengths or ()))
        refuse({**row_of_text, **of_pairs, "--seed": seed}, "the rows of a run are as its config has them")
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
        if (written := mixture_of_run(folder)) is not None:
            require_same_packing(written, rows.identity["packing_version"], folder=target)
        if split != "train":
            return rows, None
        phases = phases_of_run(folder) or [Phase.from_dict(phase) for phase in phases_for(config, datasets)]
        events = [event for _, event in JsonLines(folder.events).lines() if event is not None]
        return rows.with_phases(phases), samples_of_steps(events, config.training.global_batch_size)
    seed = 1234 if seed is None else seed
    if pair_lengths is not None:
        from data_pipeline.pair_loader import PairRowSource

        refuse(row_of_text, OF_PAIRS)
        one, other = check_pair_shape(*pair_lengths)
        return PairRowSource.open([(Dataset.open(target), 1.0, None)], source_length=one, target_length=other, seed=seed, split=split), None
    length, how = row_shape(sequence_length, method)
    return RowSource.open([(Dataset.open(target), 1.0, None)], sequence_length=length, packing=how, seed=seed, split=split), None


def _print_samples(rows: Any, steps: Any, found: Any, num_samples: int | None) -> None:
    """Those that hold the document, with step and row where a run of several datasets or batch sizes took them; or why it is in none."""
    from data_pipeline.pair_loader import PairRowSource
    from data_pipeline.trace import samples_of

    where = {"data": str(rows.dataset(found.entry).path)} if len(rows.datasets) > 1 else {}
    if isinstance(rows, PairRowSource):
        source = next(each for each in rows.dataset(found.entry).split(found.split) if each.name == found.source)
        if (reason := rows.why_left_out(source, found.number)) is not None:
            _print_json({"outcome": "in no row", "reason": reason, **where})
            return
    among = {"num_samples": num_samples or len(rows), "entry": found.entry}
    for sample in samples_of(rows, split=found.split, source=found.source, document=found.number, **among):
        place = steps.place(sample) if steps is not None else None
        _print_json({"sample": sample, **({"step": place[0], "row": place[1]} if place else {}), **where})


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, ensure_ascii=False))
