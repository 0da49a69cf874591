"""The `mlite` command. Subcommands import what they need when they run, so that help and mistakes cost nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from data_pipeline.errors import MegatronLiteError
from launcher.commands import data, text
from launcher.console import escape_unprintable

app = typer.Typer(
    help="From raw text to a pretrained language model: data, training, evaluation, text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data.app, name="data", help="Raw text to a dataset folder; look at it, check it, trace it.")

Words = Annotated[Optional[list[str]], typer.Argument(metavar="[CONFIG] [a.b=c ...]", show_default=False)]
ConfigOption = Annotated[Optional[str], typer.Option("--config", help="The run config, where it is not the first argument.")]
Overrides = Annotated[Optional[list[str]], typer.Argument(metavar="[a.b=c ...]", show_default=False)]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.", show_default=False)]


@app.command()
def init(
    name: Annotated[str, typer.Argument(metavar="NAME", show_default=False)],
    text: Annotated[str, typer.Option("--text", help="A file, a folder or a quoted glob of .txt, .jsonl or .parquet, plain, .gz or .zst.")],
    force: Annotated[bool, typer.Option("--force", help="Overwrite configs of this name.")] = False,
) -> None:
    """Write a data config and a run config for a text of your own, and say what to type next."""
    from launcher.commands.init import write_configs

    write_configs(name, text, force=force)


@app.command()
def train(
    words: Words = None,
    config: ConfigOption = None,
    processes: Annotated[int, typer.Option("--processes", "-n", help="0: one a GPU, or parallel.tp on a machine without.")] = 0,
) -> None:
    """Train on this machine, with as many processes as it takes; ends with the run's own exit code."""
    from launcher.commands.train import train_here

    raise typer.Exit(train_here([*(["--config", config] if config else []), *(words or [])], processes=processes))


@app.command()
def plan(
    words: Words = None,
    config: ConfigOption = None,
    world: Annotated[int, typer.Option("--world", min=0, help="Ranks of the job; 0: what `mlite train` would start here.")] = 0,
    memory: Annotated[
        Optional[str], typer.Option("--memory", help="What a rank may use, such as 80GiB; else what this machine has.")
    ] = None,
    rate: Annotated[
        Optional[float], typer.Option("--rate", min=1e-9, help="Tokens per second of the whole job; else the run's own.")
    ] = None,
    device: Annotated[Optional[str], typer.Option("--device", help="cpu or cuda; else what this machine has.")] = None,
    json_lines: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Before launch: memory by part, FLOPs, tokens a day, checkpoint size; refuses what can't fit and says what would."""
    from launcher.commands.plan import plan_config

    arguments = [*(["--config", config] if config else []), *(words or [])]
    plan_config(arguments, world=world, memory=memory, rate=rate, device=device, as_json=json_lines)


@app.command("eval")
def evaluate(run: Run, overrides: Overrides = None) -> None:
    """Held-out loss, perplexity and bits per byte of the newest checkpoint, as JSON; data.path=DIR scores another dataset."""
    from launcher.saved_config import read_config, run_of

    read_config(run_of(run), overrides or [])
    from launcher.commands.eval import evaluate_run

    evaluate_run(run, overrides or [])


app.command()(text.generate)
app.command()(text.score)


@app.command()
def submit(
    words: Words = None,
    config: ConfigOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and say what Slurm would be asked for.")] = False,
) -> None:
    """Check a run on a cluster's login node and queue it by submitit; requeued until it is done."""
    from launcher.commands.submit import submit_run

    raise typer.Exit(submit_run([*(["--config", config] if config else []), *(words or [])], dry_run=dry_run))


@app.command()
def status(run: Run) -> None:
    """Where a run stands: state, step, time left, whether a job is at it now."""
    from launcher.commands.status import show_status

    show_status(run)


@app.command()
def report(
    run: Run,
    to: Annotated[Optional[Path], typer.Option("--to", help="Where to write it; default: in the run folder.")] = None,
) -> None:
    """One HTML page of a run: curves, evaluations, attempts, data, events, environment. Also written when a run is done or stopped."""
    from launcher.commands.report import report_run

    report_run(run, to=to)


@app.command()
def export(
    run: Run,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The folder to write; it must not exist.", show_default=False)],
    overrides: Overrides = None,
    family: Annotated[str, typer.Option(help="auto (the first that can hold the model), or one of them: gpt2, llama, ....")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto (as it was trained), fp32, bf16 or fp16.")] = "auto",
    max_file_size: Annotated[str, typer.Option("--max-file-size", help="Larger weights are split into several files.")] = "5GB",
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is there.")] = False,
) -> None:
    """The newest checkpoint as a Hugging Face folder: a Llama, GPT-2 or other model of theirs, tokenizer, generation config."""
    from launcher.commands.export import export_run

    export_run(run, overrides or [], to=to, family=family, dtype=dtype, max_file_size=max_file_size, force=force)


@app.command("import")
def import_model(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A Hugging Face model folder.", show_default=False)],
    to: Annotated[Optional[Path], typer.Option("--to", metavar="FILE", help="Default: configs/model/NAME.yaml.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Check a Hugging Face folder, write the model section that fits it, and say how to train on from its weights."""
    from launcher.commands.import_model import import_model as import_folder

    import_folder(folder, to=to, force=force)


@app.command()
def quickstart(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", show_default=False)] = Path("quickstart"),
    steps: Annotated[int, typer.Option(min=8, help="Optimizer steps; fewer learn too little.")] = 320,
) -> None:
    """The whole job on text that every Python has: data, training, a stop and a resume, a sample, a plot."""
    from launcher.commands.quickstart import run_quickstart

    run_quickstart(folder, steps=steps)


@app.command()
def doctor() -> None:
    """What is right and what is wrong with this machine for training."""
    from launcher.commands.doctor import examine

    raise typer.Exit(examine())


def main() -> None:
    """Run the command line; errors meant for the user are shown without a traceback and end with their own code."""
    escape_unprintable()
    try:
        app()
    except MegatronLiteError as error:
        print(f"mlite: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
