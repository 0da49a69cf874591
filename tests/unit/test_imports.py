"""The house's dependency directions. If this fails, a part that stood alone has begun to know who uses it."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = ("data_pipeline", "megatron_lite", "launcher")
FREE_FOR_ALL = {"data_pipeline.storage", "data_pipeline.errors", "data_pipeline.schema", "data_pipeline.yaml_text"}
# The one place where text meets a tokenizer, for the one that opens a trained model for text. The rest of megatron_lite knows ids.
DOORS = {("megatron_lite.notebook", "data_pipeline.tokenizer.encode")}
# Inside a package: what stands left never imports what stands right of it.
MEGATRON_ORDER = [
    ("config",),
    ("sizes",),
    ("activations",),
    ("memory", "communication"),
    ("parallel",),
    ("layers",),
    ("models",),
    ("loss", "checkpoint", "inference"),
    ("training", "notebook"),
]
# What makes documents and what compares them knows nothing of what is made of them. A module that isn't named is free.
DATA_ORDER = [
    ("document", "storage", "streams", "records", "step", "pool", "blockfile", "words", "document_index"),
    ("store",),
    ("read", "read_huggingface", "normalise", "filters", "dedup", "pii", "language"),
    ("shards", "packing", "plans", "manifest"),
    ("dataset",),
    ("mixture", "loader", "earlier", "interchange"),
    ("build", "assemble"),
]
# The fused loss is called by the model's head and the cache by its attention, so both are below the models, whatever the folder.
ONLY_IN = {
    "deepspeed": ("megatron_lite/training/engine_deepspeed",),
    "submitit": ("launcher/slurm/",),
    "wandb": ("launcher/trackers.py",),
}
HEAVY_FOR_DATA = {"torch", "deepspeed", "transformers"}


def modules() -> dict[str, Path]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> set[str]:
    """Every module that the file imports, wherever in it, by dotted name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_packages_depend_downwards_only() -> None:
    """launcher -> megatron_lite, data_pipeline; nothing imports launcher; megatron_lite takes only what is free for all."""
    for name, path in modules().items():
        for target in imports(path):
            package = target.split(".")[0]
            if name.split(".")[0] != "launcher":
                assert package != "launcher", f"{name} imports {target}"
            if name.startswith("data_pipeline"):
                assert package != "megatron_lite", f"{name} imports {target}"
                assert package not in HEAVY_FOR_DATA, f"{name} imports {target}"
            if name.startswith("megatron_lite") and package == "data_pipeline" and target != "data_pipeline":
                free = FREE_FOR_ALL | {door for module, door in DOORS if module == name}
                assert any(target == each or target.startswith(each + ".") for each in free), f"{name} imports {target}"


def test_shared_base_of_data_pipeline_stands_alone() -> None:
    """storage, errors, schema and yaml_text may be imported by anyone, so they import nothing of ours but each other."""
    known = modules()
    for name in FREE_FOR_ALL:
        ours = {target for target in imports(known[name]) if target.split(".")[0] in PACKAGES}
        assert all(any(target.startswith(free) for free in FREE_FOR_ALL) for target in ours), (name, ours)


@pytest.mark.parametrize("library", ONLY_IN)
def test_library_stays_behind_its_seam(library: str) -> None:
    """A library with one door can be replaced, faked and kept out of start-up."""
    for path in modules().values():
        place = str(path.relative_to(ROOT))
        if library in {target.split(".")[0] for target in imports(path)}:
            assert place.startswith(ONLY_IN[library]), f"{place} imports {library}"


def test_megatron_lite_never_imports_right() -> None:
    """config <- parallel <- layers <- models <- {checkpoint, inference} <- training."""
    rank = {part: place for place, parts in enumerate(MEGATRON_ORDER) for part in parts}
    for name, path in modules().items():
        part = name.removeprefix("megatron_lite.").split(".")[0]
        if not name.startswith("megatron_lite.") or part not in rank:
            continue
        for target in imports(path):
            other = target.removeprefix("megatron_lite.").split(".")[0]
            if target.startswith("megatron_lite.") and other in rank and other != "loss":
                assert rank[other] <= rank[part], f"{name} imports {target}"


def test_data_pipeline_never_imports_right() -> None:
    """document, storage <- {read, normalise, filters, dedup} <- {shards, packing} <- {mixture, loader} <- build."""
    rank = {part: place for place, parts in enumerate(DATA_ORDER) for part in parts}
    for name, path in modules().items():
        part = name.removeprefix("data_pipeline.").split(".")[0]
        if not name.startswith("data_pipeline.") or part not in rank:
            continue
        for target in imports(path):
            other = target.removeprefix("data_pipeline.").split(".")[0]
            if target.startswith("data_pipeline.") and other in rank:
                assert rank[other] <= rank[part], f"{name} imports {target}"


@pytest.mark.parametrize(
    ("module", "kept_out"),
    [
        ("launcher.cli", {"torch", "deepspeed", "datasets", "pyarrow", "matplotlib", "wandb", "tokenizers"}),
        ("launcher.huggingface", {"torch", "deepspeed", "transformers", "tokenizers", "datasets"}),
        ("launcher.config", {"torch", "deepspeed", "datasets", "matplotlib", "wandb"}),
        ("data_pipeline.loader", {"torch", "tokenizers", "datasets", "pyarrow"}),
        ("launcher.commands.text", {"torch", "deepspeed", "tokenizers", "numpy"}),
        ("megatron_lite.config", {"torch", "deepspeed"}),
        ("megatron_lite.checkpoint.committed", {"torch", "deepspeed", "numpy"}),
    ],
)
def test_light_modules_load_nothing_heavy(module: str, kept_out: set[str]) -> None:
    """`mlite --help`, config checks and the loader start in a blink only while these stay out."""
    code = f"import sys, {module}; print(sorted(m for m in sys.modules if '.' not in m))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    assert kept_out.isdisjoint(ast.literal_eval(out.stdout))
