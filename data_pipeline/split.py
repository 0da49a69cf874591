"""Which documents are held out: a hash of the text decides, so the choice doesn't change as the corpus grows, and equal
texts always stand on the same side."""

from __future__ import annotations

import hashlib

import numpy as np

from data_pipeline.errors import ConfigError, Fault


def hash_fractions(keys: np.ndarray, *, salt: str) -> np.ndarray:
    """A number in [0, 1) for each content key (uint8[n, 16]), spread evenly, another for each salt; float64[n]."""
    out = np.empty(len(keys), dtype=np.uint64)
    salted = salt.encode() + b"\0"
    for number, key in enumerate(keys):
        out[number] = int.from_bytes(hashlib.blake2b(salted + key.tobytes(), digest_size=8).digest(), "little")
    return (out >> np.uint64(11)) * 2.0**-53


def held_out(keys: np.ndarray, kept: np.ndarray, *, fraction: float, seed: int) -> np.ndarray:
    """bool[n]: the documents among `kept` that validation gets. Raises ConfigError if a fraction above 0 gives it none, or
    training none."""
    chosen: np.ndarray = kept & (hash_fractions(keys, salt=f"held out {seed}") < fraction)
    num_kept, num_chosen = int(kept.sum()), int(chosen.sum())
    if fraction > 0 and num_chosen == 0:
        enough = min(0.5, 3 / max(num_kept, 1))
        advice = f"with {num_kept} documents, {enough:.2g} would give about {max(1, round(enough * num_kept))}; 0 holds out nothing"
        if num_kept < 4:
            advice = f"there {'is' if num_kept == 1 else 'are'} only {num_kept} document{'s' if num_kept != 1 else ''}: make each paragraph one with `txt_documents: paragraph`, add text, or set 0 to hold out nothing"
        raise ConfigError([Fault("validation.fraction", fraction, "a fraction that holds out at least one document", advice)])
    if num_chosen == num_kept:
        raise ConfigError(
            [
                Fault(
                    "validation.fraction",
                    fraction,
                    "a fraction that leaves documents to train on",
                    f"all {num_kept} documents were held out; lower it",
                )
            ]
        )
    return chosen
