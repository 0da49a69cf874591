"""The full tables into tests/proofs: all of them, or those named on the command line."""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

# name -> module with prove(folder) -> bool, which writes name.md
PROOFS = {
    "parity": "tests.proofs.prove_parity",
    "variations": "tests.proofs.prove_variations",
    "resume": "tests.proofs.prove_resume",
    "hostile": "tests.proofs.prove_hostile",
    "data-kills": "tests.proofs.prove_data_kills",
    "mixture": "tests.proofs.prove_mixture",
}


def main(names: list[str]) -> int:
    warnings.filterwarnings("ignore", category=FutureWarning)
    unknown = sorted(set(names) - set(PROOFS))
    if unknown:
        print(f"no such proof: {', '.join(unknown)}; there are {', '.join(PROOFS)}")
        return 2
    broken = [name for name in names or PROOFS if not importlib.import_module(PROOFS[name]).prove(Path(__file__).parent)]
    print(f"broken: {', '.join(broken)}" if broken else "everything holds")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
