"""If this fails, `mlite plan` lets a run start that can't fit, refuses one that can, or says wrong numbers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from data_pipeline.errors import ConfigError
from launcher.commands.plan import measured_rate, plan_config
from launcher.config import load_config
from launcher.plan import Limit, fitting_changes, parse_bytes, plan_run, require_fit, show_bytes, with_changes
from megatron_lite.sizes import checkpoint_bytes, flops_per_token, num_parameters

LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
}
GIB = 2**30


@pytest.fixture
def config_file(tmp_path: Path) -> Callable[..., Path]:
    def write(**sections: dict[str, Any]) -> Path:
        tree = {
            "run": {"name": "a", "dir": str(tmp_path / "runs" / "a")},
            "model": LLAMA_8B,
            "data": {"path": str(tmp_path / "no-data-yet")},
            "training": {"steps": 1000, "sequence_length": 8192, "global_batch_size": 64, "precision": "bf16"},
        }
        for name, section in sections.items():
            tree[name] = {**tree.get(name, {}), **section}
        path = tmp_path / "run.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def plan_json(capsys: pytest.CaptureFixture[str], *words: str, **options: Any) -> dict[str, Any]:
    plan_config(list(words), as_json=True, **options)
    return json.loads(capsys.readouterr().out)


def test_numbers_are_those_of_the_formulas(config_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Parameters, FLOPs and checkpoint are exact; needs no dataset where vocab_size is given."""
    path = config_file()
    found = plan_json(capsys, str(path), "parallel.tp=8", world=16, device="cuda", rate=100_000.0)
    config = load_config(path)
    assert found["parameters"] == num_parameters(config.model) == 8_030_261_248
    assert found["local_parameters"] * 8 == 8_030_261_248 + 7 * (2 * 32 + 1) * 4096  # norms stand on every rank
    assert found["flops_per_step"] == flops_per_token(config.model, 8192) * 64 * 8192
    assert found["checkpoint_bytes"] == checkpoint_bytes(config.model) == 12 * 8_030_261_248
    assert (found["dp"], found["micro_batch_size"], found["micro_batches"]) == (2, 2, 16)
    assert found["time"] == {
        "tokens_per_second": 1e5,
        "step_time_s": 64 * 8192 / 1e5,
        "tokens_a_day": 86400 * 1e5,
        "run_s": 1000 * 64 * 8192 / 1e5,
    }
    assert found["communication"]["dp"] == {"all_reduce": 4 * found["local_parameters"], "all_gather": 2 * found["local_parameters"]}
    assert found["fits"] and found["limit_bytes"] is None
    assert sum(found["memory"]["moments"][found["memory"]["peak_moment"]].values()) == found["memory"]["peak_bytes"]


def test_what_cannot_fit_is_refused_with_what_would(config_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """Exit 2; each suggestion, taken, fits; none changes more than it must."""
    path = config_file()
    with pytest.raises(ConfigError) as refusal:
        plan_config([str(path)], world=8, memory="80GiB", device="cuda")
    assert refusal.value.exit_code == 2 and "80.0 GiB (--memory)" in str(refusal.value)
    config = load_config(path, world_size=8)
    limit = Limit(80 * GIB, "a test")
    changes = fitting_changes(config, plan_run(config, world=8, device_type="cuda"), limit)
    assert changes and len(changes[0]) == 1
    for change in changes:
        words = [f"{key}={value}" for key, value in change.items()]
        assert " ".join(words) in str(refusal.value)
        plan_config([str(path), *words], world=8, memory="80GiB", device="cuda")
        for key in change if len(change) > 1 else ():
            fewer = with_changes(config, {other: value for other, value in change.items() if other != key})
            assert plan_run(fewer, world=8, device_type="cuda").needed_bytes > limit.bytes, f"{key} is not needed in {change}"


def test_a_model_too_large_for_all_ranks_says_how_many_would_do(config_file: Callable[..., Path]) -> None:
    """If this fails, somebody searches by hand for the number of GPUs."""
    config = load_config(config_file(), world_size=1)
    with pytest.raises(ConfigError, match=r"--world \d+") as refusal:
        require_fit(config, plan_run(config, world=1, device_type="cuda"), Limit(24 * GIB, "a test"))
    assert "no layout of 1 rank fits" in str(refusal.value)
    with pytest.raises(ConfigError, match="no layout of up to"):
        require_fit(config, plan_run(config, world=1, device_type="cuda"), Limit(2 * GIB, "a test"))


@pytest.mark.parametrize("gib", [20, 28, 40, 60])
def test_a_suggested_world_is_one_that_starts(config_file: Callable[..., Path], gib: int) -> None:
    """A micro-batch as written that no longer divides a rank's share of the batch is refused there, though it would fit."""
    training = {"sequence_length": 16, "global_batch_size": 64, "micro_batch_size": 64}
    path = config_file(model={"num_attention_heads": 1, "num_key_value_heads": 1}, parallel={"zero_stage": 3}, training=training)
    with pytest.raises(ConfigError) as refusal:
        plan_config([str(path)], world=1, memory=f"{gib}GiB", device="cuda")
    ((world, changes),) = re.findall(r"--world (\d+) does, with (this layout|.*)", str(refusal.value))
    words = [] if changes == "this layout" else changes.split()
    plan_config([str(path), *words], world=int(world), memory=f"{gib}GiB", device="cuda")


def test_what_deepspeed_was_told_bounds_the_suggestions(config_file: Callable[..., Path]) -> None:
    """A ZeRO stage or a share that the deepspeed section spells out leaves only layouts that agree with it."""
    path = config_file(deepspeed={"zero_optimization": {"stage": 1}, "train_micro_batch_size_per_gpu": 16})
    with pytest.raises(ConfigError, match="--world") as refusal:
        plan_config([str(path)], world=4, memory="60GiB", device="cuda")
    assert [fault.field for fault in refusal.value.faults] == ["memory of a rank"] and "zero_stage" not in str(refusal.value)
    ((world, changes),) = re.findall(r"--world (\d+) does, with (this layout|.*)", str(refusal.value))
    load_config(path, [] if changes == "this layout" else changes.split(), world_size=int(world))


def test_checkpoints_that_stay_for_good_are_counted(config_file: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    """A disk that holds keep_last of them and one more fills up in the middle of a run."""
    path = config_file(checkpoint={"keep_last": 3, "keep_every_steps": 100})
    found = plan_json(capsys, str(path), world=8, device="cuda")
    assert found["checkpoints_kept_bytes"] == (3 + 1 + 9) * found["checkpoint_bytes"]  # 100 .. 900; step 1000 is among the newest
    plan_config([str(path)], world=8, device="cuda")
    assert "(keep_last 3, every 100 steps for good, and one being written)" in capsys.readouterr().out


def test_unknown_vocabulary_is_asked_for(config_file: Callable[..., Path]) -> None:
    """If this fails, planning before the data is built ends in a traceback."""
    with pytest.raises(ConfigError, match=r"model\.vocab_size=NUMBER"):
        plan_config([str(config_file(model={"vocab_size": "auto"}))], world=8, device="cuda")


def test_faults_of_the_config_come_first(config_file: Callable[..., Path]) -> None:
    """All of them at once, and no plan."""
    with pytest.raises(ConfigError) as refusal:
        plan_config([str(config_file()), "training.global_batch_size=7", "model.num_attention_heads=24"], world=8, memory="1GiB")
    assert {fault.field for fault in refusal.value.faults} == {"model.num_attention_heads", "training.global_batch_size"}
    with pytest.raises(ConfigError, match="cpu or cuda"):
        plan_config([str(config_file())], device="tpu")


def test_the_rate_is_the_runs_own(config_file: Callable[..., Path], tmp_path: Path) -> None:
    """The median of the last steps; from another number of ranks it is taken to grow with them."""
    config = load_config(config_file())
    assert measured_rate(config, world=2, device_type="cuda") == (None, "")
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    rates = [5.0, 100.0, 110.0, 120.0, 1.0]
    lines = [json.dumps({"step": step, "tokens_per_second": rate}) for step, rate in enumerate(rates, start=1)]
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "config.yaml").write_text(config.to_yaml())
    started = {"event": "started", "step": 0, "layout": {"world": 2}, "device": "cuda"}
    (folder / "events.jsonl").write_text(json.dumps(started) + "\n")
    assert measured_rate(config, world=2, device_type="cuda")[0] == 100.0
    rate, source = measured_rate(config, world=4, device_type="cuda")
    assert rate == 200.0 and "on 2 ranks" in source
    with open(folder / "events.jsonl", "ab") as file:  # killed in the middle of a letter, and of a line
        file.write(b'{"event": "\xc3\n4\n{"event": "started", "layo')
    assert measured_rate(config, world=4, device_type="cuda") == (rate, source)
    (folder / "events.jsonl").write_text(json.dumps(started) + "\n" + json.dumps({**started, "step": 3}) + "\n")
    assert measured_rate(config, world=2, device_type="cuda")[0] == 60.5  # steps 4 and 5: those before may have been another config's


def test_a_rate_of_another_model_goes_by_its_flops_and_of_other_arithmetic_is_none(
    config_file: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run that is planned is often a larger one than the one that was measured."""
    path, folder = config_file(), tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    config = load_config(path)
    (folder / "config.yaml").write_text(config.to_yaml())
    (folder / "metrics.jsonl").write_text('{"step": 1, "tokens_per_second": 100.0}\n')
    (folder / "events.jsonl").write_text(json.dumps({"event": "started", "step": 0, "layout": {"world": 1}, "device": "cpu"}) + "\n")
    for words in (["model.num_hidden_layers=4"], ["training.sequence_length=256"], ["model.num_hidden_layers=4", "model.hidden_size=1024"]):
        other = load_config(path, words)
        rate, source = measured_rate(other, world=1, device_type="cpu")
        flops = [flops_per_token(each.model, each.training.sequence_length) for each in (config, other)]
        assert rate == pytest.approx(100.0 * flops[0] / flops[1]) and rate > 120 and "FLOPs a token" in source
    for words in (["training.precision=fp32"], ["training.compile=true"], ["training.activation_checkpointing=full"]):
        rate, why = measured_rate(load_config(path, words), world=1, device_type="cpu")
        assert rate is None and words[0].partition("=")[0] in why
    assert measured_rate(config, world=1, device_type="cuda") == (None, f"{folder} ran on cpu")
    plan_config([str(path), "training.compile=true"], world=1, device="cpu", memory="1TB")
    assert f"no rate known ({folder} ran training.compile=False); give --rate" in capsys.readouterr().out


def test_sizes_in_words() -> None:
    """What a person writes for --memory and reads in the table."""
    assert [parse_bytes(text) for text in ("80GiB", "24GB", "512 MiB", "1.5k", "100")] == [80 * GIB, 24 * 10**9, 2**29, 1536, 100]
    for wrong in ("", "lots", "-1GiB", "8GX"):
        with pytest.raises(ConfigError):
            parse_bytes(wrong)
    assert [show_bytes(count) for count in (0, 2048, 3 * 2**20, 93.4 * GIB)] == ["0 B", "2.00 KiB", "3.00 MiB", "93.4 GiB"]
