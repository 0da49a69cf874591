"""The README and the docs: if these fail, a stranger types what they say and meets an error."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.paths import ROOT
from tests.tree import with_tree

BIN = Path(sys.executable).parent


def commands(text: str) -> list[str]:
    """Every line of the ```bash blocks. The two make targets stand in an ```sh block: CI itself is their test."""
    return [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines() if line.strip()]


def test_every_command_of_the_readme_works(tmp_path: Path) -> None:
    """In order, in an empty folder that sees the checkout's docs, configs and launcher, each ending with 0."""
    for name in ("docs", "launcher"):
        (tmp_path / name).symlink_to(ROOT / name)
    environment = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
    }
    typed = commands((ROOT / "README.md").read_text())
    assert len(typed) >= 8
    for line in typed:
        done = subprocess.run(shlex.split(line), cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def test_the_tree_is_fresh() -> None:
    """A file that moved or was renamed still stands in the README. `python -m tests.tree` writes it anew."""
    readme = (ROOT / "README.md").read_text()
    assert with_tree(readme) == readme


def test_links_of_the_docs_lead_somewhere() -> None:
    """A link to a file that is gone, or to a test that was renamed."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))):
        for label, target in re.findall(r"\[([^\]]+)\]\(([^)#]+)\)", page.read_text()):
            if "://" in target:
                continue
            path = (page.parent / target).resolve()
            assert path.exists(), f"{page.name}: {target}"
            if "::" in label:
                assert re.search(rf"^def {label.split('::')[1]}\b", path.read_text(), re.MULTILINE), f"{page.name}: {label}"
