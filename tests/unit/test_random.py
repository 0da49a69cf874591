"""If this fails, dropout masks are biased, repeat, or are other masks than those of the version before."""

import hashlib

import numpy as np
import pytest
import torch

from megatron_lite.parallel.random import DropoutKey, keep_mask, sample_keys
from megatron_lite.parallel.random import site as place
from tests.reference import Step, dropout_factor


def mask(
    seed: int = 1, step: int = 1, samples: tuple[int, ...] = (0, 1), site: str = "a", rows: int = 64, channels: int = 256
) -> torch.Tensor:
    keys = sample_keys(DropoutKey(seed, step), torch.tensor(samples))
    return keep_mask(keys, place(site), [0], [rows], channels, 0.25)


def test_equals_the_plain_hash() -> None:
    """Signed wrap-around arithmetic in torch against unsigned numpy, with words that use the top bits."""
    seed, step, samples = 2**63 + 12345, 2**40 + 7, (2**31 + 5, 0)
    ours = mask(seed=seed, step=step, samples=samples, rows=17, channels=33)
    for row, sample in enumerate(samples):
        theirs = dropout_factor(0.25, Step(seed, step), sample, "a", [17], 33)
        assert torch.equal(ours[row], theirs > 0)


def test_golden() -> None:
    """Masks are part of what a seed means: a change is a new format version."""
    digest = hashlib.sha256(np.packbits(mask(rows=8, channels=64).numpy()).tobytes()).hexdigest()
    assert digest[:16] == "e0d7a3dc8a464e33"


def test_rate_and_independence() -> None:
    """Kept with 1 - p, and uncorrelated between neighbours in every coordinate."""
    base = mask(rows=512, channels=512).double() - 0.75
    scale = base.numel() ** -0.5  # one standard error of a correlation
    assert abs(float(base.mean())) / (0.25 * 0.75) ** 0.5 < 4 * scale

    def correlation(other: torch.Tensor, these: torch.Tensor = base) -> float:
        return abs(float((these * other).mean() / (0.25 * 0.75)))

    others = {
        "seed": mask(2, rows=512, channels=512),
        "step": mask(step=2, rows=512, channels=512),
        "site": mask(site="b", rows=512, channels=512),
    }
    for name, other in others.items():
        assert correlation(other.double() - 0.75) < 5 * scale, name
    assert correlation(base[1:], base[:1]) < 5 * scale * 2**0.5, "samples"
    for shift in (1, 2, 16, 64):
        assert correlation(base[:, shift:], base[:, :-shift]) < 5 * scale * 1.2, f"positions {shift}"
        assert correlation(base[:, :, shift:], base[:, :, :-shift]) < 5 * scale * 1.2, f"channels {shift}"


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 0.9])
def test_probability(probability: float) -> None:
    keys = sample_keys(DropoutKey(0, 0), torch.arange(4))
    dropped = 1 - keep_mask(keys, place("x"), [0], [256], 1024, probability).double().mean()
    assert abs(float(dropped) - probability) < 4 * (0.25 / 2**20) ** 0.5 or probability == dropped == 0


def test_operator_is_sound_and_opaque_to_the_compiler() -> None:
    """A compiler that takes the hash apart draws other masks (torch's inductor did): shapes are all that it may know."""
    keys = sample_keys(DropoutKey(3, 4), torch.arange(3))
    torch.library.opcheck(keep_mask, (keys, place("x"), [2, 0], [2, 5], 7, 0.3))
    assert torch.equal(keep_mask(keys, place("x"), [2, 0], [2, 5], 7, 0.3), keep_mask(keys, place("x"), [0, 0], [4, 5], 7, 0.3)[:, 2:])
