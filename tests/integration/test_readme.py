"""The README and the docs: if these fail, a stranger types what they say and meets an error."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data_pipeline.config import DataConfig
from data_pipeline.errors import MegatronLiteError
from data_pipeline.schema import Section
from launcher.cli import app
from launcher.commands import data
from launcher.config import RunConfig, load_config
from launcher.plan import ALLOCATOR_SHARE, PROCESS_BYTES, plan_run, show_bytes
from launcher.slurm.cluster import ClusterConfig
from megatron_lite.sizes import flops_per_token, num_parameters
from tests.benchmarks import bench_plan
from tests.config_reference import section_in
from tests.integration.test_plan import BAND, EXACT
from tests.paths import ROOT
from tests.tree import with_tree
from tests.unit.test_imports import ONLY_IN

BIN = Path(sys.executable).parent
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "docs" / "first-model.md", *(page for page in DOCS if page.name != "first-model.md")]


def commands(text: str) -> list[str]:
    """Every line of the ```bash blocks. What needs a cluster, a GPU, a network or minutes stands in an ```sh block; the two make
    targets of the README, too: CI itself is their test."""
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line.strip()]


def test_every_command_of_the_docs_works(tmp_path: Path) -> None:
    """Each different line once, page after page, in a folder that has the checkout's configs and sees a text, docs, launcher and slurm.
    Each ends with 0, or with the code that its comment gives."""
    for name in ("docs", "launcher", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    typed = list(dict.fromkeys(line for page in PAGES for line in commands(page.read_text())))
    assert len(typed) >= 20
    for line in typed:
        code = int(match[1]) if (match := re.search(r"# exits with (\d+)$", line)) else 0
        words = shlex.split(line, comments=True)
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "<svg" in (tmp_path / "runs/mine/report.html").read_text()


def test_the_tree_is_fresh() -> None:
    """A file that moved or was renamed still stands in the README. `python -m tests.tree` writes it anew."""
    readme = (ROOT / "README.md").read_text()
    assert with_tree(readme) == readme


def test_links_of_the_docs_lead_somewhere() -> None:
    """A link to a file that is gone, to a heading that is not there, or to a test that was renamed."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "slurm" / "README.md", *ROOT.glob("tests/*/README.md")):
        for label, target in re.findall(r"\[([^\]]+)\]\(([^)]+)\)", page.read_text()):
            if "://" in target:
                continue
            file, _, heading = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            assert path.exists(), f"{page.name}: {target}"
            if heading:
                assert heading in headings(path.read_text()), f"{page.name}: {target}"
            if "::" in label:
                assert re.search(rf"^def {label.split('::')[1]}\b", path.read_text(), re.MULTILINE), f"{page.name}: {label}"


def test_every_module_that_is_to_be_run_exists() -> None:
    """`python -m something` of ours, on any page, in the Makefile or in CI; and each benchmark stands on its page."""
    benchmarks = ROOT / "tests" / "benchmarks"
    pages = [*PAGES, *ROOT.glob("tests/*/README.md"), *(ROOT / name for name in ("CONTRIBUTING.md", "Makefile", ".ci/run"))]
    named = {word for page in pages for word in re.findall(r"-m ((?:tests|launcher)(?:\.\w+)+)", page.read_text())}
    assert {"tests.proofs.prove", "tests.tree", "tests.config_reference"} <= named
    for module in named:
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file(), module
    assert {path.stem for path in benchmarks.glob("bench_*.py")} == {word.rpartition(".")[2] for word in named if ".bench_" in word}


def headings(text: str) -> set[str]:
    """Anchors as they are made of headings: lower case, words joined by hyphens."""
    return {re.sub(r"[^\w\- ]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines() if line.startswith("#")}


def test_every_subcommand_that_is_written_of_exists() -> None:
    """`mlite something`, on any page, in prose or code."""
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    of_data = {command.name or command.callback.__name__ for command in data.app.registered_commands if command.callback}
    for page in PAGES:
        for word, second in re.findall(r"(?:`|^|> |\$ )mlite ([a-z]+)(?: ([a-z]+))?", page.read_text(), re.MULTILINE):
            assert word in known | {"data"}, f"{page.name}: mlite {word}"
            assert word != "data" or not second or second in of_data, f"{page.name}: mlite data {second}"


def test_every_key_that_is_written_of_exists() -> None:
    """`a.b=c` or `a.b` in code, on any page; and each key in the first column of the table of other frameworks' keys."""
    known = keys(RunConfig) | keys(DataConfig) | {f"cluster.{key}" for key in keys(ClusterConfig)} | {"cluster"}
    sections = {key.split(".")[0] for key in known if "." in key} | {"cluster"}
    for page in PAGES:
        text = re.sub(r"<!-- keys:.*?\n## ", "", page.read_text(), flags=re.DOTALL)  # other frameworks' keys
        text = re.sub(r".*# exits with \d+$", "", text, flags=re.MULTILINE)  # wrong on purpose
        code = " ".join(re.findall(r"`[^`\n]+`|```(?:ba)?sh\n.*?```", text, re.DOTALL))
        for key in re.findall(r"(?<![\w./{-])([a-z_]+(?:\.[a-z_]+)+)(?![\w/.*(])", code):
            if key.split(".")[0] in sections and Path(key).suffix not in (".json", ".yaml", ".jsonl", ".html", ".md", ".py", ".sh"):
                assert key in known or key.endswith(".key"), f"{page.name}: {key}"
    table = (ROOT / "docs" / "coming-from.md").read_text().partition("<!-- keys:")[2].partition("\n## ")[0]
    ours = [key for row in table.splitlines() if row.startswith("| `") for key in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    assert len(ours) > 45 and not set(ours) - known


def keys(section: type[Section], prefix: str = "") -> set[str]:
    """Every key below a section, and the sections themselves, dotted."""
    found: set[str] = set()
    for name, field in section.model_fields.items():
        found.add(prefix + name)
        inner = section_in(field.annotation)
        found |= keys(inner, f"{prefix}{name}.") if inner is not None else set()
    return found


def test_every_invariant_stands_in_the_design_with_a_test() -> None:
    """All thirteen, in order; that the tests exist is checked with the links. And who alone may import what."""
    page = (ROOT / "docs" / "design.md").read_text()
    rows = re.findall(r"^\| (\d+) \| .* \| (.*) \|$", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 14))
    assert all(re.search(r"\[\w+\.py::test_\w+\]\(", tests) for _, tests in rows)
    for library, (place, *_) in ONLY_IN.items():
        assert f"{library} only in {place}" in page


def test_what_a_plan_adds_and_promises_is_said() -> None:
    """In the page of numbers: shares of the allocator, sizes of a process, the band of peak memory and how it is measured."""
    page = (ROOT / "docs" / "numbers.md").read_text()
    share, process = ({kind: of[kind] for kind in ("cpu", "cuda")} for of in (ALLOCATOR_SHARE, PROCESS_BYTES))
    assert f"{100 * share['cpu']:.0f} % (CPU) or {100 * share['cuda']:.0f} % (GPU) of it for the allocator" in page
    assert f"{process['cpu'] >> 20} MiB (CPU) or {process['cuda'] >> 20} MiB (GPU) for the process" in page
    assert BAND == bench_plan.BAND and EXACT == bench_plan.EXACT and f"within {100 * BAND:.0f} % with" in page
    assert " ".join(f"{name}={value}" for name, value in EXACT.items()) in page


def test_every_exit_code_has_a_section() -> None:
    """In the page that is arranged by them."""
    codes = {error.exit_code for error in MegatronLiteError.__subclasses__()} | {0, 1}
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert {int(code) for code in re.findall(r"^## (\d+): ", page, re.MULTILINE)} == codes


def test_numbers_of_the_recipe_are_computed() -> None:
    """Its page gives a budget of a run that nobody has made: at least that must be of this config."""
    run, model = ROOT / "configs/run/gpt2-124m.yaml", f"model={ROOT / 'configs/model/gpt2-124m.yaml'}"
    config, small = load_config(run, [model], world_size=8), load_config(run, [model, "training.micro_batch_size=8"])
    steps, tokens = config.training.num_steps, config.training.global_batch_size * config.training.sequence_length
    flops = flops_per_token(config.model, config.training.sequence_length)
    page = (ROOT / "docs/recipes/gpt2-124m.md").read_text()
    assert "Not run yet" in page
    plan = plan_run(config, world=8, device_type="cuda")
    about = [plan_run(config, world=8, device_type="cuda").needed_bytes, plan_run(small, world=1, device_type="cuda").needed_bytes]
    said = [int(size) for size in re.findall(r"about (\d+) GiB in micro-batches", page)]
    assert said == [pytest.approx(size / 2**30, rel=0.1) for size in about]
    for number in (
        f"{num_parameters(config.model):,}",
        f"{steps:,}",
        f"{tokens:,}",
        f"{steps * tokens:,}",
        f"{flops * steps * tokens:.2e}",
        f"{show_bytes(plan.checkpoint_bytes)}, at most {show_bytes(plan.checkpoints_kept_bytes)} on disk",
    ):
        assert number.replace("e+", "e") in page, number
