"""The README's tree, written from the first line of each module's docstring: `python -m tests.tree` puts it there."""

from __future__ import annotations

import ast
import re

from tests.paths import ROOT

BEGIN, END = "<!-- tree: written by `python -m tests.tree` -->\n", "<!-- end of tree -->"
PACKAGES = ("data_pipeline", "megatron_lite", "launcher")
TESTS = " ".join(f"{path.name}/" for path in sorted((ROOT / "tests").iterdir()) if any(path.glob("*.py")))
OTHERS = f"""configs/            model/ data/ run/ cluster/: what the commands take
slurm/              pretrain.sh, data.sh, and a container recipe
docs/               first model, data, Slurm, every key, every number, troubleshooting, other frameworks' keys, a recipe, the design
tests/              {TESTS}; ranks.py (a pool of gloo processes), reference.py (the maths, plainly)
"""


def tree() -> str:
    """One line a file: its name, indented, and what its docstring says first."""
    lines = []
    for package in PACKAGES:
        lines.append(f"{package}/")
        paths = [path for path in (ROOT / package).rglob("*.py") if path.name != "__init__.py"]
        seen = set()
        for path in sorted(paths, key=lambda path: (path.parent.relative_to(ROOT), path)):
            inside = path.relative_to(ROOT / package).parent
            if inside.parts and inside not in seen:
                seen.add(inside)
                lines.append(f"  {inside}/")
            name = "  " * (len(inside.parts) > 0) + f"  {path.name}"
            lines.append(f"{name:<36}{first_words(path.read_text())}")
    return "```\n" + "\n".join(lines) + "\n" + OTHERS + "```\n"


def first_words(source: str) -> str:
    """The first line of the module's docstring, up to its first full stop or colon that ends a thought."""
    line = (ast.get_docstring(ast.parse(source)) or "").split("\n")[0]
    return re.split(r"(?<!et al)\. |: [a-z]\w+ |; ", line)[0].rstrip(".:")


def with_tree(readme: str) -> str:
    before, _, rest = readme.partition(BEGIN)
    return before + BEGIN + tree() + END + rest.partition(END)[2]


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_tree(path.read_text()))
