"""The data config: what to read, what to do with it, where the dataset goes. Light: the CLI reads it before anything heavy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from data_pipeline.decontaminate.config import DecontaminateConfig
from data_pipeline.dedup.config import DedupConfig
from data_pipeline.filters.config import FiltersConfig
from data_pipeline.fim import FimConfig
from data_pipeline.normalise import NormaliseConfig
from data_pipeline.schema import Section, compose, validate
from data_pipeline.storage import is_url

Method = Literal["best_fit", "concat"]
LATER_SECTIONS = {"filters", "decontaminate", "fim"}


class SourceConfig(Section):
    """Where some text comes from: `files` (paths, folders, globs) or `dataset` (a Hugging Face name or folder).

    Of duplicates between sources, the one whose source stands first in the config stays. Aligned pairs, for an encoder-decoder, come
    from `files` and `target_files` with a sentence a line, or from two fields of a record.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")  # names the source in every report
    files: str | list[str] | None = None  # paths, folders, globs, URLs; plain, .gz or .zst
    format: Literal["auto", "txt", "jsonl", "parquet"] = "auto"  # auto: by the name
    txt_documents: Literal["file", "paragraph", "line"] = "file"  # paragraphs stand between blank lines
    dataset: str | None = None  # of Hugging Face: a name, or a folder of one
    dataset_config: str | None = None  # which of its configurations
    split: str = "train"  # which of its splits
    revision: str | None = Field(None, min_length=1)  # of a name on the Hub: a commit or a tag, so that every build reads the same
    streaming: bool = True  # read as it comes; false downloads it first
    text_field: str = "text"  # of a record
    target_files: str | list[str] | None = None  # pairs: the other side of `files`, line by line; matched in the order of their names
    source_field: str | None = Field(None, min_length=1)  # pairs: the field of a record that is translated, or `a.b` for one inside another
    target_field: str | None = Field(None, min_length=1)  # pairs: the field that it is translated into
    invalid_utf8: Literal["drop", "replace"] = "drop"  # a record with bad bytes: count it and leave it out, or write U+FFFD for each

    @model_validator(mode="after")
    def _one_of(self) -> SourceConfig:
        if (self.files is None) == (self.dataset is None):
            raise ValueError("exactly one of files and dataset | files: 'raw/*.jsonl' for files, dataset: owner/name for Hugging Face")
        foreign = (
            {"dataset_config", "split", "revision", "streaming"} if self.dataset is None else {"format", "txt_documents", "invalid_utf8"}
        )
        if given := foreign & self.model_fields_set:
            kind = "a source of files" if self.dataset is None else "a Hugging Face dataset"
            raise ValueError(f"no {', '.join(sorted(given))} for {kind} | remove it")
        return self

    @model_validator(mode="after")
    def _two_sides(self) -> SourceConfig:
        if not self.is_pairs:
            return self
        if (self.source_field is None) != (self.target_field is None):
            raise ValueError("source_field and target_field together | name both sides of a pair")
        if self.target_files is not None and (self.files is None or self.target_field is not None):
            raise ValueError("target_files beside files, without fields | a pair is a line of each, or two fields of one record")
        if foreign := {"text_field", "txt_documents", *(["format"] if self.target_files is not None else [])} & self.model_fields_set:
            raise ValueError(f"no {', '.join(sorted(foreign))} for pairs | remove it")
        if self.source_field is not None and self.format == "txt":
            raise ValueError("jsonl or parquet with source_field | a text file has no fields: give target_files instead")
        return self

    @property
    def is_pairs(self) -> bool:
        return self.target_files is not None or self.source_field is not None or self.target_field is not None

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without keys that came later, unless they are set: what was read before there were any keeps its key."""
        later = {"invalid_utf8": "drop", "revision": None, "target_files": None, "source_field": None, "target_field": None}
        return {key: value for key, value in handler(self).items() if key not in later or value != later[key]}


class TokenizerConfig(Section):
    """bpe, unigram: trained on this text. bytes: every byte a token. pretrained: a tokenizer.json, or the folder that holds one."""

    type: Literal["bpe", "unigram", "bytes", "pretrained"] = "bpe"  # trained here, plain bytes, or somebody else's
    vocab_size: int = Field(4096, ge=257)  # bpe, unigram: with the 256 bytes and the special tokens
    pretokenizer: Literal["gpt2", "llama3"] = "gpt2"  # bpe, unigram: how text is cut into words
    max_train_bytes: int = Field(1 << 31, ge=1)  # bpe, unigram: a larger corpus is sampled, by hash, down to about this
    special_tokens: dict[str, int] | None = None  # bpe, unigram: ids of special tokens; null: the end of document, at 0
    name_or_path: str | None = None  # pretrained: a tokenizer.json, or the folder that holds it
    eod_token: str | None = None  # what ends a document: pretrained, where its files don't say; or one of special_tokens
    bos_token: str | None = None  # what begins a document, likewise

    @model_validator(mode="after")
    def _keys_of_the_type(self) -> TokenizerConfig:
        keys = {
            "bpe": {"vocab_size", "pretokenizer", "max_train_bytes", "special_tokens", "eod_token", "bos_token"},
            "unigram": {"vocab_size", "pretokenizer", "max_train_bytes", "special_tokens", "eod_token", "bos_token"},
            "bytes": set(),
            "pretrained": {"name_or_path", "eod_token", "bos_token"},
        }[self.type]
        if given := self.model_fields_set - keys - {"type"}:
            raise ValueError(f"no {', '.join(sorted(given))} for a tokenizer of type {self.type} | remove it, or choose another type")
        if self.type == "pretrained" and not self.name_or_path:
            raise ValueError("name_or_path for a pretrained tokenizer | the path of a tokenizer.json or of the folder that holds it")
        return self

    @model_validator(mode="after")
    def _special(self) -> TokenizerConfig:
        if self.type not in ("bpe", "unigram"):
            return self
        stated = self.special_tokens or {}
        ids = list(stated.values())
        if len(set(ids)) < len(ids) or any(not 0 <= id < self.vocab_size for id in ids) or "" in stated or len(ids) > self.vocab_size - 257:
            raise ValueError(
                f"special_tokens with an id of its own each, from 0 to {self.vocab_size - 1}, leaving 256 for bytes | {stated}"
            )
        for key, token in (("eod_token", self.eod_token), ("bos_token", self.bos_token)):
            if token is not None and token not in stated:
                raise ValueError(f"{key} among special_tokens | give its id there: special_tokens: {{{token!r}: 0}}")
        return self

    def content(self) -> dict[str, Any]:
        """What it is a function of; keys that came later are left out where nothing is asked of them."""
        content = self.model_dump(mode="json")
        return {key: value for key, value in content.items() if value is not None or key != "special_tokens"}


class ValidationConfig(Section):
    """Documents held out of training, chosen by a hash of their text: the choice stays as the corpus grows."""

    fraction: float = Field(0.01, ge=0.0, lt=1.0)  # of the documents; 0 holds out nothing


class PackingConfig(Section):
    """A packing plan to make at once; others are made when a run needs them. Pairs have two lengths in place of one."""

    sequence_length: int | None = Field(None, ge=1)  # targets a row
    method: Method = "best_fit"  # whole documents fitted into rows, or documents chained and cut
    source_length: int | None = Field(None, ge=2)  # of pairs: tokens a row for the encoder; a pair that is longer is left out and counted
    target_length: int | None = Field(None, ge=2)  # of pairs: targets a row for the decoder, likewise

    @model_validator(mode="after")
    def _of_one_kind(self) -> PackingConfig:
        of_pairs = (self.source_length, self.target_length)
        if (self.sequence_length is None) == (of_pairs == (None, None)):
            raise ValueError("sequence_length, or for pairs source_length and target_length | for example {sequence_length: 2048}")
        if self.sequence_length is None and None in of_pairs:
            raise ValueError("source_length and target_length together | for example {source_length: 256, target_length: 256}")
        if self.sequence_length is None and "method" in self.model_fields_set:
            raise ValueError("no method for pairs | remove it: whole pairs are fitted into rows")
        return self


class DataConfig(Section):
    """Raw text to a dataset folder."""

    output: str  # the dataset folder, or the URL of one: built in `work`, then published
    work: str | None = None  # where work is kept that makes the next build fast; null: beside the output, in OUTPUT.work
    seed: int = Field(1234, ge=0)  # which documents are held out, and which the tokenizer is trained on
    sources: list[SourceConfig] = Field(min_length=1)
    normalise: NormaliseConfig = NormaliseConfig()
    filters: FiltersConfig | None = None
    decontaminate: DecontaminateConfig | None = None
    dedup: DedupConfig | None = Field(default_factory=DedupConfig)
    tokenizer: TokenizerConfig = TokenizerConfig()
    fim: FimConfig | None = None
    validation: ValidationConfig = ValidationConfig()
    packing: list[PackingConfig] = []
    max_source_loss: float | None = Field(None, gt=0.0, le=1.0)  # share of a source that may be dropped or cut; more stops the build
    strict: bool = False  # true: the first record that can't be read stops the build
    workers: int = Field(2, ge=1)  # processes; the result is the same for any number

    @field_validator("output")
    @classmethod
    def _somewhere(cls, value: str) -> str:
        if not value.rstrip("/") or value.endswith(":/"):
            raise ValueError("a folder, or a URL such as s3://bucket/name | the dataset is written there")
        return value

    @model_validator(mode="after")
    def _work_is_here(self) -> DataConfig:
        if is_url(self.output) and self.work is None:
            raise ValueError("work, a local folder, where the output is a URL | the dataset is built there: work: data/NAME.work")
        if self.work is not None and (not self.work or is_url(self.work)):
            raise ValueError("work in a local folder | the files of a build are mapped into memory")
        return self

    @field_validator("sources")
    @classmethod
    def _names_differ(cls, value: list[SourceConfig]) -> list[SourceConfig]:
        names = [source.name for source in value]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"a name of its own for each source | {', '.join(twice)} is given twice")
        return value

    @model_validator(mode="after")
    def _fim_sources(self) -> DataConfig:
        names = [source.name for source in self.sources]
        if self.fim is not None and (unknown := set(self.fim.sources or ()) - set(names)):
            raise ValueError(f"fim.sources that are names of sources, {', '.join(names)} | {', '.join(sorted(unknown))} is none")
        return self

    @model_validator(mode="after")
    def _pairs(self) -> DataConfig:
        pairs = [source.name for source in self.sources if source.is_pairs]
        if pairs and len(pairs) < len(self.sources):
            raise ValueError(
                f"sources that are all pairs, or none | {', '.join(pairs)} {'is' if len(pairs) == 1 else 'are'}: make two datasets, the second with the first's tokenizer"
            )
        for number, plan in enumerate(self.packing):
            if (plan.sequence_length is None) != bool(pairs):
                wanted = "source_length and target_length" if pairs else "sequence_length"
                raise ValueError(f"packing.{number} with {wanted} | the sources are {'pairs' if pairs else 'documents'}")
        if pairs and (foreign := self._not_for_pairs()):
            raise ValueError(f"no {', '.join(foreign)} for pairs | remove it: a pair goes or stays as a whole")
        return self

    def _not_for_pairs(self) -> list[str]:
        dedup = self.dedup
        cut = [f"dedup.{key}" for key in ("lines", "substring") if dedup is not None and getattr(dedup, key) is not None]
        return [*cut, *(["fim"] if self.fim is not None else [])]

    @property
    def name(self) -> str:
        return self.output.rstrip("/").rpartition("/")[2]

    @property
    def folder(self) -> Path:
        """Where the dataset is built: the output, or the copy from which it is published."""
        return self.work_folder / "dataset" if is_url(self.output) else Path(self.output)

    @property
    def work_folder(self) -> Path:
        """What a later build can use again; deleting it costs time and nothing else."""
        if self.work is not None:
            return Path(self.work)
        return Path(self.output).with_name(Path(self.output).name + ".work")

    def content(self) -> dict[str, Any]:
        """The part that decides what is built: not where, nor with how many workers, nor which plans are added."""
        content = self.model_dump(mode="json", exclude={"output", "work", "workers", "packing", "max_source_loss"})
        content["tokenizer"] = self.tokenizer.content()
        # Sections that came later stand in no older config, so that a dataset without them keeps its key and its bytes.
        return {key: value for key, value in content.items() if value is not None or key not in LATER_SECTIONS}


def load_data_config(path: str | Path, overrides: Iterable[str] = ()) -> DataConfig:
    """Read and check a data config; raises ConfigError with every fault."""
    tree, faults = compose(path, overrides)
    return validate(DataConfig, tree, composing=faults)
