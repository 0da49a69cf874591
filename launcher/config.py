"""The run's config: sections that others own, put together, checked as a whole before a device or a process group is touched."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from data_pipeline.block_cache import CacheConfig
from data_pipeline.errors import ConfigError, Fault
from data_pipeline.schema import LEFT_OUT, S, Section, compose, is_left_out, mended, names_any, section_faults, validate
from data_pipeline.yaml_text import dump_yaml
from megatron_lite.config import (
    CheckpointConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    SchedulerConfig,
    TrainingConfig,
    checkpoint_faults,
    layout_faults,
    scheduler_faults,
)
from megatron_lite.training.deepspeed_config import deepspeed_config


class RunSection(Section):
    """What the run is called, where its folder is, and the number that all of its randomness comes from."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")  # names the run and its folder
    dir: str = ""  # empty: runs/NAME
    seed: int = Field(1234, ge=0, lt=2**63)  # of initial weights, data order and dropout
    hang_timeout_s: float = Field(1800.0, gt=0)  # a rank that gets no further for so long ends the job with code 5

    @property
    def folder(self) -> Path:
        return Path(self.dir or f"runs/{self.name}")


class DataSource(Section):
    """One dataset folder in the mixture; weights are shares of tokens, relative to each other."""

    path: str  # a dataset folder that `mlite data build` made, or its URL
    weight: float = Field(1.0, ge=0)  # its share of the tokens, relative to the others
    max_epochs: float | None = Field(None, gt=0)  # a run that would go through it more often is refused


class DataChange(Section):
    """Other weights from a step on. Resuming under a changed schedule changes what comes, never what was."""

    from_step: int = Field(ge=2)  # the first step that has them, or begins to
    weights: list[float] = Field(min_length=1)  # one for each of data.sources
    over_steps: int = Field(0, ge=0)  # reached gradually over so many steps; 0: at once


class DataSection(Section):
    """Which datasets, in which shares, packed how."""

    path: str | None = None  # one dataset folder, or its URL; or give sources
    sources: list[DataSource] | None = Field(None, min_length=1)
    temperature: float | None = Field(None, gt=0)  # weights are multiplied by tokens^(1/temperature): 1 by size, larger more even
    schedule: list[DataChange] = []  # weights that change during the run
    packing: Literal["best_fit", "concat"] = "best_fit"  # whole documents fitted into rows, or documents chained and cut
    document_mask: bool = True  # tokens see their own document only
    cache: CacheConfig = CacheConfig()

    @model_validator(mode="after")
    def _one_of(self) -> DataSection:
        if (self.path is None) == (self.sources is None):
            raise ValueError("exactly one of path and sources | data.path: DIR for one dataset, data.sources: [{path, weight}] for several")
        if self.sources is None and (self.temperature is not None or self.schedule):
            raise ValueError("sources where there is a temperature or a schedule | one dataset has no shares")
        return self

    @model_validator(mode="after")
    def _weights(self) -> DataSection:
        several = [[source.weight for source in self.mixture], *(change.weights for change in self.schedule)]
        for weights in several:
            if len(weights) != len(self.mixture) or min(weights) < 0 or not any(weights):
                raise ValueError(f"a weight of 0 or more for each of {len(self.mixture)} sources, one above 0 | {weights} is not that")
        for before, after in pairwise(self.schedule):
            if after.from_step <= before.from_step + before.over_steps - (before.over_steps > 0):
                raise ValueError(
                    f"changes in order, each begun after the one before is there | from_step {after.from_step} comes too early after "
                    f"from_step {before.from_step} over {before.over_steps} steps"
                )
        return self

    @property
    def mixture(self) -> list[DataSource]:
        return self.sources if self.sources is not None else [DataSource(path=self.path or "")]


class EvaluationConfig(Section):
    """How often the held-out rows are scored (always after the last step), and how many of them."""

    interval_steps: int | None = Field(50, gt=0)  # null: after the last step only
    max_sequences: int = Field(320, ge=0)  # 0: no evaluation at all


class WandbConfig(Section):
    """Weights & Biases: one run, the same for every attempt. Failing or slow, it never holds training up."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"  # auto: WANDB_MODE, else online with a key, else offline
    project: str = "megatron-lite"  # of wandb
    entity: str | None = None  # user or team; null: the key's own


class TensorBoardConfig(Section):
    """TensorBoard, where the `tensorboard` package is installed."""

    mode: Literal["enabled", "disabled"] = "disabled"  # enabled: event files in tensorboard/ of the run folder


class LoggingConfig(Section):
    """What is written and shown while a run goes, beside its folder's own metrics.jsonl."""

    interval_steps: int = Field(1, gt=0)  # steps between two lines of metrics.jsonl and of the console
    statistics_interval_steps: int | None = Field(None, gt=0)  # steps between two lines with rms of activations and gradients by layer
    wandb: WandbConfig = WandbConfig()
    tensorboard: TensorBoardConfig = TensorBoardConfig()

    @model_validator(mode="after")
    def _statistics(self) -> LoggingConfig:
        every, logged = self.statistics_interval_steps, self.interval_steps
        if every is not None and every % logged:
            want = f"a multiple of logging.interval_steps ({logged}), as they stand in its lines"
            raise section_faults([Fault("statistics_interval_steps", every, want, f"use {-(-every // logged) * logged}")])
        return self


class RunConfig(Section):
    """Everything that a training run is a function of, but for the data and the world's size."""

    run: RunSection
    model: ModelConfig = ModelConfig()
    data: DataSection
    parallel: ParallelConfig = ParallelConfig()
    training: TrainingConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: SchedulerConfig = SchedulerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    logging: LoggingConfig = LoggingConfig()
    deepspeed: dict[str, Any] = {}  # more for DeepSpeed, here or as the path of a JSON file; not what our sections own

    @field_validator("deepspeed", mode="before")
    @classmethod
    def _empty(cls, value: object) -> object:
        return {} if value is None else value

    @property
    def row_tokens(self) -> int:
        """Tokens of a row that a forward pass reads: inputs, and of an encoder-decoder the source's."""
        return self.training.sequence_length + (self.training.encoder_length if self.model.family == "seq2seq" else 0)

    def to_yaml(self) -> str:
        return dump_yaml(self.model_dump(mode="json"))


SECTIONS = tuple(name for name in RunConfig.model_fields)


@dataclass(frozen=True)
class Arguments:
    """A command line `[--config] CONFIG [a.b=c ...]`."""

    config: Path
    overrides: tuple[str, ...]


def parse_arguments(argv: Iterable[str], *, usage: str) -> Arguments:
    """CONFIG as an argument or `--config`; `--local_rank` is what the deepspeed command puts in, and is ignored."""
    config: str | None = None
    overrides: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("--local_rank", "--local-rank"):
            if not equals:
                next(words, None)
        elif flag == "--config" or (not word.startswith("-") and not equals):
            found = value if equals else (next(words, None) if flag == "--config" else word)
            if config is not None or not found:
                raise ConfigError(f"one config is wanted, got {config!r} and {found!r}. {usage}")
            config = found
        elif equals and not word.startswith("-"):
            overrides.append(word)
        else:
            raise ConfigError(f"unknown option {word!r}. {usage}")
    if config is None:
        raise ConfigError(f"no config given. {usage}")
    return Arguments(Path(config), tuple(overrides))


def load_config(path: str | Path, overrides: Iterable[str] = (), *, world_size: int | None = None) -> RunConfig:
    """Read, compose and check a run config. With `world_size`, the layout too. Raises ConfigError with every fault."""
    tree, faults = compose(path, overrides, section_names=SECTIONS)
    if isinstance(tree.get("deepspeed"), str):
        try:
            tree["deepspeed"] = _read_json(tree["deepspeed"])
        except ConfigError as error:
            tree["deepspeed"], faults = LEFT_OUT, [*faults, *error.faults]
    try:
        config = validate(RunConfig, tree, composing=faults)
    except ConfigError as error:
        raise ConfigError([*error.faults, *_faults_across(tree, world_size)]) from None
    if faults := world_faults(config, world_size=world_size):
        raise ConfigError(faults)
    _check_own_folder(Path(path), config)
    return config


def world_faults(config: RunConfig, *, world_size: int | None) -> list[Fault]:
    """All that a config of sound sections may have against a world; none: it starts there. DeepSpeed's sizes follow dp too."""
    return _faults_across({name: getattr(config, name) for name in SECTIONS}, world_size)


def _faults_across(sections: Mapping[str, Any], world_size: int | None) -> list[Fault]:
    """Faults across sections, built or as they were read. Where keys are wrong already, the rules that name them are left out."""
    wrong: set[str] = set()

    def part(kind: type[S], name: str) -> S | None:
        value = sections.get(name)
        if isinstance(value, kind):
            return value
        built, keys = mended(kind, {} if value is None else value)
        wrong.update(keys)
        return built

    model, parallel = part(ModelConfig, "model"), part(ParallelConfig, "parallel")
    training, scheduler = part(TrainingConfig, "training"), part(SchedulerConfig, "lr_scheduler")
    optimizer, more = part(OptimizerConfig, "optimizer"), sections.get("deepspeed") or {}
    faults: list[Fault] = []
    if model and parallel and training:
        faults += layout_faults(model, parallel, training, world_size=parallel.tp if world_size is None else world_size)
    data = part(DataSection, "data")
    if model and data and model.family == "seq2seq":
        faults += _pair_faults(data)
    if training and scheduler:
        faults += scheduler_faults(scheduler, training)
    if checkpoint := part(CheckpointConfig, "checkpoint"):
        faults += checkpoint_faults(checkpoint)
    if training and optimizer and parallel and isinstance(more, Mapping):
        faults += _deepspeed_faults(training, optimizer, parallel, dict(more), world_size=world_size)
    return [fault for fault in faults if not names_any(fault, wrong) and not is_left_out(fault.got)]


def _pair_faults(data: DataSection) -> list[Fault]:
    """Keys that have no choice with rows of aligned pairs."""
    fix = "rows of aligned pairs are fitted so, and pairs don't see each other"
    choices = [("packing", data.packing, "best_fit"), ("document_mask", data.document_mask, True)]
    return [Fault(f"data.{key}", got, f"{want!r} with model.family: seq2seq", fix) for key, got, want in choices if got != want]


def with_vocabulary(config: RunConfig, *, tokenizer_size: int) -> RunConfig:
    """Fill in `vocab_size: auto`; a smaller number than the tokenizer's is refused, a larger one is the user's choice."""
    size = config.model.vocab_size
    if isinstance(size, int):
        if size < tokenizer_size:
            raise ConfigError([Fault("model.vocab_size", size, f"at least the tokenizer's {tokenizer_size}", "use auto")])
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"vocab_size": tokenizer_size})})


def vocabulary_notice(config: RunConfig, *, tokenizer_size: int) -> str:
    """What a user should know of ids that no token of the data has; empty where there are none."""
    size = config.model.vocabulary
    if size <= tokenizer_size:
        return ""
    return f"model.vocab_size is {size:,}, the data's tokenizer has {tokenizer_size:,}: {size - tokenizer_size:,} ids are no token"


def _read_json(path: str) -> dict[str, Any]:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([Fault("deepspeed", path, "a mapping, or the path of a JSON file", str(error))]) from None
    if not isinstance(value, dict):
        raise ConfigError([Fault("deepspeed", path, "a JSON file with an object in it", "see DeepSpeed's configuration reference")])
    return value


def _deepspeed_faults(
    training: TrainingConfig, optimizer: OptimizerConfig, parallel: ParallelConfig, more: dict[str, Any], *, world_size: int | None
) -> list[Fault]:
    if training.engine != "deepspeed":
        return (
            [Fault("deepspeed", list(more), "nothing with training.engine: torch", "remove the section, or use engine deepspeed")]
            if more
            else []
        )
    dp = max(1, (world_size or parallel.tp) // parallel.tp)
    try:
        deepspeed_config(training, optimizer, parallel, dp=dp, overrides=more)
    except ConfigError as error:  # a rank's share of the batch is known with the world only
        return [fault for fault in error.faults if world_size or fault.field != "deepspeed.train_micro_batch_size_per_gpu"]
    return []


def _check_own_folder(path: Path, config: RunConfig) -> None:
    """A run's saved config started from elsewhere would begin another run beside it."""
    if (path.parent / "status.json").is_file() and path.parent.resolve() != config.run.folder.resolve():
        raise ConfigError(
            [
                Fault(
                    "run.dir",
                    str(config.run.folder),
                    f"the run folder that this config lies in, {path.parent}",
                    f"start from the folder where the run was started, or add run.dir={path.parent}",
                )
            ]
        )
