"""If these fail, a wrong config starts a job, or a right one is read as something else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from data_pipeline.errors import ConfigError
from launcher.config import RunConfig, load_config, parse_arguments, vocabulary_notice, with_vocabulary
from tests.paths import ROOT


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"run": {"name": "x"}, "data": {"path": "data/x"}, "training": {"steps": 10}}))
    return path


def faults(path: Path, *overrides: str, world_size: int | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, world_size=world_size)
    return {fault.field: str(fault) for fault in caught.value.faults}


def test_shipped_configs_load_on_any_world() -> None:
    """tp is 1 in all of them, so that no world is refused."""
    for path in (ROOT / "configs" / "run").glob("*.yaml"):
        for world_size in (1, 2, 4, 8):
            config = load_config(path, world_size=world_size)
            assert config.parallel.tp == 1


def test_the_resolved_config_loads_as_itself(config_file: Path, tmp_path: Path) -> None:
    config = with_vocabulary(load_config(config_file, ["optimizer.lr=3e-4", "data.packing=concat", "run.name='1e-4'"]), tokenizer_size=300)
    (tmp_path / "saved").mkdir()
    saved = tmp_path / "saved" / "config.yaml"
    saved.write_text(config.to_yaml())
    assert load_config(saved) == config and config.model.vocab_size == 300 and config.optimizer.lr == 3e-4
    assert load_config(saved).run.name == "1e-4"  # a name that looks like a number, as in a sweep, stays a name


def test_model_may_be_a_file_and_is_overridden_key_by_key(config_file: Path) -> None:
    model = ROOT / "configs" / "model" / "tiny.yaml"
    config = load_config(config_file, [f"model={model}", "model.hidden_size=64", "training.sequence_length=128"])
    assert (config.model.hidden_size, config.model.num_key_value_heads) == (64, 2)


def test_what_an_encoder_decoder_has_no_choice_in(config_file: Path) -> None:
    """Keys of documents and of pairs that can't go together, each named once with what helps."""
    pairs = ("model.family=seq2seq", "training.sequence_length=64")
    found = faults(config_file, *pairs, "data.packing=concat", "data.document_mask=false", "training.source_length=4096")
    assert set(found) == {"data.packing", "data.document_mask", "training.source_length"}
    cut = ("parallel.tp=2", "parallel.sequence_parallel=true", "training.source_length=33")
    assert set(faults(config_file, *pairs, *cut, world_size=2)) == {"training.source_length"}
    found = faults(config_file, "training.source_length=64", "model.encoder.share_embedding=false")
    assert set(found) == {"model.encoder", "training.source_length"} and all(
        "set model.family: seq2seq" in each or "set family" in each for each in found.values()
    )


def test_faults_of_all_sections_and_across_them_come_together(config_file: Path) -> None:
    found = faults(config_file, "run.nam=y", "logging.wandb.mode=of", "training.global_batch_size=5", "parallel.tp=2", world_size=4)
    assert set(found) == {"run.nam", "logging.wandb.mode", "training.global_batch_size"}
    assert "did you mean run.name?" in found["run.nam"] and "use 4 or 6" in found["training.global_batch_size"]


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["model.hidden_sise=768", "model.num_attention_heads=12"], {"model.hidden_sise"}),
        (["model.hidden_size=${oops}", "model.num_attention_heads=12"], {"model.hidden_size"}),
        (["parallel.tp=${oops}", "training.global_batch_size=6"], {"parallel.tp"}),
        (["parallel=${oops}", "training.global_batch_size=6"], {"parallel"}),
        (["training.steps=${oops}"], {"training.steps"}),
        (["data.path=null", "data.sources=['${oops}']"], {"data.sources.0"}),
        (["optimizer.betas=[0.9, '${oops}']"], {"optimizer.betas.1"}),
        (["deepspeed.train_batch_size=${oops}"], {"deepspeed.train_batch_size"}),
        (["training.global_batch_sise=32", "training.global_batch_size=6"], {"training.global_batch_sise"}),
        (["deepspeed=no.json", "optimizer.lr=${oops}", "model.Hidden=3"], {"deepspeed", "optimizer.lr", "model.Hidden"}),
    ],
)
def test_a_faulty_key_brings_no_faults_that_are_none(config_file: Path, overrides: list[str], fields: set[str]) -> None:
    """A rule that would read the key's default instead says what goes away by itself."""
    assert set(faults(config_file, *overrides, world_size=4)) == fields


def test_a_layout_that_the_world_cannot_hold_names_the_command(config_file: Path) -> None:
    found = faults(config_file, "parallel.tp=4", world_size=2)
    assert "deepspeed --num_gpus 4 launcher/train.py" in found["parallel.tp"]


def test_exactly_one_of_path_and_sources(config_file: Path) -> None:
    assert "exactly one of path and sources" in faults(config_file, "data.sources=[{path: a}]")["data"]
    assert [source.weight for source in load_config(config_file).data.mixture] == [1.0]


def test_deepspeed_may_be_a_file_and_owned_keys_are_refused(config_file: Path, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"gradient_clipping": "auto", "zero_optimization": {"reduce_bucket_size": 1000}}))
    bad.write_text(json.dumps({"gradient_clipping": 0.3, "optimizer": {"type": "Adam"}}))
    assert load_config(config_file, [f"deepspeed={good}"], world_size=1).deepspeed["zero_optimization"]["reduce_bucket_size"] == 1000
    found = faults(config_file, f"deepspeed={bad}", world_size=1)
    assert "optimizer.max_grad_norm" in found["deepspeed.gradient_clipping"] and "deepspeed.optimizer.type" in found
    assert "a readable" in str(faults(config_file, "deepspeed=missing.json")) or "missing.json" in str(
        faults(config_file, "deepspeed=missing.json")
    )
    assert "engine: torch" in faults(config_file, f"deepspeed={good}", "training.engine=torch", "parallel.zero_stage=0")["deepspeed"]


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(config_file: Path) -> None:
    config = load_config(config_file, ["model.vocab_size=100"])
    with pytest.raises(ConfigError, match="at least the tokenizer's 300"):
        with_vocabulary(config, tokenizer_size=300)
    assert vocabulary_notice(config, tokenizer_size=100) == ""
    assert vocabulary_notice(config, tokenizer_size=90).startswith("model.vocab_size is 100, the data's tokenizer has 90: 10 ids")


def test_a_saved_config_started_from_elsewhere_is_refused(config_file: Path, tmp_path: Path) -> None:
    """It would begin another run of the same name beside the first."""
    (tmp_path / "status.json").write_text("{}")
    assert "run.dir=" in faults(config_file)["run.dir"]
    assert load_config(config_file, [f"run.dir={tmp_path}"]).run.folder == tmp_path


@pytest.mark.parametrize(
    ("words", "config", "overrides"),
    [
        (["c.yaml"], "c.yaml", ()),
        (["--config", "c.yaml", "a.b=c"], "c.yaml", ("a.b=c",)),
        (["--local_rank=1", "--config=c.yaml", "a=b=c"], "c.yaml", ("a=b=c",)),
        (["--local_rank", "1", "a.b=1", "c.yaml"], "c.yaml", ("a.b=1",)),
    ],
)
def test_command_lines(words: list[str], config: str, overrides: tuple[str, ...]) -> None:
    arguments = parse_arguments(words, usage="usage")
    assert (str(arguments.config), arguments.overrides) == (config, overrides)


@pytest.mark.parametrize("words", [[], ["--config"], ["a.yaml", "b.yaml"], ["--cfg", "a.yaml"], ["a.yaml", "--lr=1"]])
def test_command_lines_that_say_nothing_clear(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="usage"):
        parse_arguments(words, usage="usage")


def test_checkpoint_keys_that_would_do_nothing_are_refused(config_file: Path) -> None:
    """init_from beside a resume that goes on from elsewhere; steps to keep that are never saved, or by chance only."""
    found = faults(config_file, "checkpoint={resume: runs/a, init_from: runs/b, interval_steps: 40, keep_every_steps: 100}")
    assert "null beside checkpoint.resume: runs/a" in found["checkpoint.init_from"]
    assert "(40), or a divisor of it to keep every checkpoint. use 80 or 120" in found["checkpoint.keep_every_steps"]
    found = faults(config_file, "checkpoint={interval_steps: null, interval_minutes: 30, keep_every_steps: 100}")
    assert "set it to a divisor of 100" in found["checkpoint.keep_every_steps"]
    load_config(config_file, ["checkpoint={resume: never, init_from: runs/b, interval_steps: 50, keep_every_steps: 100}"])


def test_every_section_has_a_default_but_what_only_the_user_knows() -> None:
    required = [name for name, field in RunConfig.model_fields.items() if field.is_required()]
    assert required == ["run", "data", "training"]
