"""If these fail, docs/config-reference.md says what the code does not do. `python -m tests.config_reference` writes it anew."""

from __future__ import annotations

from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.schema import Section
from launcher.config import RunConfig
from launcher.slurm.cluster import ClusterConfig
from megatron_lite.config import ParallelConfig
from megatron_lite.model_config import ModelConfig
from tests.config_reference import PAGE, default, field_comments, reference, section_in, values


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == reference()


def test_every_key_is_explained() -> None:
    """A key without a comment beside its field would stand in the page with nothing but its type."""

    def unexplained(section: type[Section], prefix: str = "") -> list[str]:
        found = []
        for name, field in section.model_fields.items():
            inner = section_in(field.annotation)
            if inner is not None:
                found += unexplained(inner, f"{prefix}{name}.")
            elif name not in field_comments(section):
                found.append(prefix + name)
        return found

    assert unexplained(RunConfig) + unexplained(DataConfig) + unexplained(ClusterConfig) == []


def test_limits_and_defaults() -> None:
    fields = ModelConfig.model_fields
    assert (values(fields["hidden_dropout"]), default(fields["hidden_dropout"])) == ("number, at least 0, below 1", "`0.0`")
    assert (values(fields["vocab_size"]), default(fields["num_key_value_heads"])) == ("integer or `auto`", "`null`")
    assert default(ParallelConfig.model_fields["tp"]) == "`1`" and default(ParallelConfig.model_fields["sequence_parallel"]) == "`false`"
    assert (values(SourceConfig.model_fields["files"]), default(SourceConfig.model_fields["name"])) == (
        "text or list of text or `null`",
        "must be given",
    )
