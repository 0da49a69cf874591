"""Peers' environments, made once under the temporary folder: their pins conflict with ours and with each other's."""

from __future__ import annotations

import subprocess
import venv
from pathlib import Path

PEERS = {"transformers": ["transformers==5.24.0"], "litgpt": ["litgpt==0.5.13"]}
TORCH = "torch==2.13.0"


def make_peer(name: str, folder: Path) -> Path:
    """The Python of the peer's environment below `folder`."""
    python = folder / f"megatron-lite-bench-{name}" / "bin" / "python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", TORCH, "numpy", *PEERS[name]], check=True)
    return python
