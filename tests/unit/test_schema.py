"""Config sections: if these fail, a typo in a config is ignored, or a value means something else than was written."""

from pathlib import Path
from typing import Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import Field, model_validator

from data_pipeline.errors import ConfigError, Fault
from data_pipeline.schema import Section, apply_override, compose, section_faults, validate
from data_pipeline.yaml_text import dump_yaml, parse_yaml


class Inner(Section):
    steps: int = Field(3, gt=0)
    lr: float = 1.0
    mode: Literal["auto", "off"] = "auto"
    micro: int | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _rule(self) -> "Inner":
        if self.steps == 13:
            raise ValueError("any number but 13 | use 12")
        return self


class Outer(Section):
    inner: Inner = Inner()
    items: list[Inner] = []


def faults(tree: dict) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        validate(Outer, tree)
    return {fault.field: str(fault) for fault in caught.value.faults}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e9", 1e9),
        ("off", "off"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("010", 10),
        ("1_000", 1000),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("1.5.0", "1.5.0"),
        ("[1, 2.0]", [1, 2.0]),
    ],
)
def test_scalars_mean_what_they_say(text: str, value: object) -> None:
    """3e-4 must be a number and `off` a word: YAML 1.1 has both the other way round."""
    parsed = parse_yaml(text, where="test")
    assert parsed == value
    assert type(parsed) is type(value)


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.from_regex(r"[-+]?0?[0-9_xe.:]{0,4}", fullmatch=True), st.text(max_size=8), st.floats(allow_nan=False)))
@example("08")  # no octal number, so that PyYAML leaves it bare
@example("a\x85b")
def test_what_is_written_is_read_back(value: object) -> None:
    """A dataset called '08' in a frozen config must not be 8 when a Slurm job reads it."""
    assert repr(parse_yaml(dump_yaml({"key": value}), where="test")["key"]) == repr(value)


def test_all_faults_at_once_each_with_its_remedy() -> None:
    """A user who fixes one fault and queues again must not meet the next one an hour later."""
    found = faults({"inner": {"steps": 0, "lrr": 1.0, "mode": "of", "micro": "x"}, "items": [{"step": 1}], "iner": {}})
    assert set(found) == {"inner.steps", "inner.lrr", "inner.mode", "inner.micro", "items.0.step", "iner"}
    assert "did you mean inner.lr?" in found["inner.lrr"]
    assert "did you mean items.0.steps?" in found["items.0.step"]
    assert "did you mean inner?" in found["iner"]
    assert "greater than 0" in found["inner.steps"]
    assert "'auto' or 'off'" in found["inner.mode"]
    assert "'x'" in found["inner.micro"]


def test_rules_of_a_section_give_want_and_fix() -> None:
    """A rule over several keys is reported like any fault."""
    assert "any number but 13. use 12" in faults({"inner": {"steps": 13}})["inner"]


@pytest.mark.parametrize("value", ["5", 5.5, True, None, [5]])
def test_nothing_is_converted_silently(value: object) -> None:
    """A string or boolean where a number belongs is a fault; 5.5 is not 5."""
    assert "inner.steps" in faults({"inner": {"steps": value}})


def test_an_int_may_stand_for_a_float() -> None:
    """lr: 1 is as good as lr: 1.0."""
    assert validate(Outer, {"inner": {"lr": 1}}).inner.lr == 1.0


def test_overrides_reach_files_and_references_resolve(tmp_path: Path) -> None:
    """model: FILE, then model.key=value over it, then ${...}: in this order whatever order they are typed in."""
    (tmp_path / "inner.yaml").write_text("steps: 7\nlr: 3e-4\n")
    (tmp_path / "run.yaml").write_text("inner: inner.yaml\nitems: [{steps: '${inner.steps}'}]\n")
    tree, faults = compose(tmp_path / "run.yaml", ["inner.steps=9"], section_names=["inner"])
    config = validate(Outer, tree)
    assert faults == []
    assert (config.inner.steps, config.inner.lr, config.items[0].steps) == (9, 3e-4, 9)
    (tmp_path / "other.yaml").write_text("steps: 5\n")
    tree, _ = compose(tmp_path / "run.yaml", ["inner.lr=2", f"inner={tmp_path / 'other.yaml'}"], section_names=["inner"])
    config = validate(Outer, tree)
    assert (config.inner.steps, config.inner.lr) == (5, 2.0)


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("a: 1\na: 2\n", [], "given twice"),
        ("a: ${b.c}\n", [], "a reference to another key"),
        ("a: [1\n", [], "not valid YAML"),
        ("- 1\n", [], "mapping of sections"),
        ("inner: gone.yaml\n", [], "gone.yaml"),
        ("a: 1\n", ["a"], "section.key=value"),
        ("a: 1\n", ["a.b=2"], "a mapping"),
        ("a: 1\n", [".b=2"], "section.key=value"),
        ("a: 1\n", ["a=[2"], "a value in YAML"),
        ("a: {b: 1}\n", ["a.b=${c"], "a.b: got '${c', wanted keys and values that can be read"),
        ("a: {~: 1}\n", [], "Incompatible key type"),
        ("a: !!set {x}\n", [], "a: got {'x'}"),
    ],
)
def test_bad_files_and_overrides_are_config_errors(tmp_path: Path, text: str, overrides: list[str], said: str) -> None:
    """Whatever is wrong with the file or an override ends in exit code 2 and one sentence."""
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        tree, faults = compose(tmp_path / "c.yaml", overrides, section_names=["inner"])
        validate(Outer, tree, composing=faults)
    assert said in str(caught.value)
    assert caught.value.exit_code == 2


def test_faults_of_composing_are_named_with_those_of_validating(tmp_path: Path) -> None:
    """A file that is not there, a reference to nothing, a bad override and an unknown key: one error, each field once."""
    (tmp_path / "c.yaml").write_text("inner: {steps: '${gone}', lr: -1, stepz: 2}\nother: ${inner.lr}\nitems: no.yaml\n")
    tree, faults = compose(tmp_path / "c.yaml", ["=3"], section_names=["items"])
    with pytest.raises(ConfigError) as caught:
        validate(Outer, tree, composing=faults)
    assert [fault.field for fault in caught.value.faults] == ["override", "items", "inner.steps", "inner.stepz", "other"]


class Pair(Section):
    width: int = Field(4, gt=0)
    parts: int = 2
    inner: Inner = Inner()
    items: list[Inner] = []

    @model_validator(mode="after")
    def _whole(self) -> "Pair":
        if self.width % self.parts:
            raise section_faults([Fault("parts", self.parts, f"a divisor of width ({self.width})")])
        if any(item.steps == 3 for item in self.items):
            raise ValueError("steps of its own for each item")
        return self


class Outmost(Section):
    pair: Pair
    name: str = ""


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        (["pair.width=${gone}", "pair.parts=3"], ["pair.width"]),  # the rule would read the default width
        (["pair.wdth=6", "pair.parts=3"], ["pair.wdth"]),  # as here: 6 was meant
        (["pair.zzz=6", "pair.parts=3"], ["pair.zzz", "pair.parts"]),
        (["pair.inner.lr=${gone}", "pair.parts=3"], ["pair.inner.lr", "pair.parts"]),  # of another section: the rule holds
        (["pair.inner.Steps=6", "pair.parts=3"], ["pair.inner.Steps", "pair.parts"]),  # no name of a union member, by its capital
        (["pair.inner.int=6"], ["pair.inner.int"]),
        (["pair.items=[{steps: '${gone}'}]"], ["pair.items.0.steps"]),
        (["pair.items=['${gone}', {lr: x}]"], ["pair.items.0", "pair.items.1.lr"]),  # numbers are those of the file
        (["pair=${gone}"], ["pair"]),
        (["name=${gone}", "pair.zzz=6", "pair.parts=3"], ["name", "pair.zzz", "pair.parts"]),
        (["pair.inner=${pair.items}", "pair.items=['${pair.inner}']"], ["pair.inner.0", "pair.items.0"]),  # each within the other
    ],
)
def test_no_rule_is_held_against_a_default_in_the_place_of_a_faulty_key(tmp_path: Path, overrides: list[str], fields: list[str]) -> None:
    """Else a typo is reported with faults that go away by themselves, or under a name that stands nowhere in the config."""
    (tmp_path / "c.yaml").write_text("pair: {}\n")
    tree, faults = compose(tmp_path / "c.yaml", overrides)
    with pytest.raises(ConfigError) as caught:
        validate(Outmost, tree, composing=faults)
    assert [fault.field for fault in caught.value.faults] == fields


def test_three_question_marks_are_text(tmp_path: Path) -> None:
    """OmegaConf takes them for a value that is to come; here they may be a name."""
    (tmp_path / "c.yaml").write_text("a: ???\nb: ['???']\n")
    assert compose(tmp_path / "c.yaml") == ({"a": "???", "b": ["???"]}, [])


def test_missing_file_is_a_config_error(tmp_path: Path) -> None:
    """The path is in the message."""
    with pytest.raises(ConfigError, match=r"gone\.yaml"):
        compose(tmp_path / "gone.yaml")


def test_override_values_are_yaml() -> None:
    """a.b=3e-4 is a number, a.b=[1] a list, a.b= the empty string."""
    tree: dict = {}
    for override in ("a.x=3e-4", "a.y=[1, two]", "a.z=", "--a.w=true"):
        apply_override(tree, override)
    assert tree == {"a": {"x": 3e-4, "y": [1, "two"], "z": "", "w": True}}
