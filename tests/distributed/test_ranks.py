"""If this fails, other distributed tests may hang, or pass where a rank failed."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankError, Ranks


def _sum_of_ranks(extra: int) -> float:
    total = torch.tensor([dist.get_rank() + extra], dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("the reason")
    dist.barrier()


def _sleep_on(rank: int) -> None:
    time.sleep(60 if dist.get_rank() == rank else 0)


def test_every_rank_answers(ranks2: Ranks) -> None:
    """If this fails, results are lost, reordered or left over from the case before."""
    assert ranks2.run(_sum_of_ranks, 1) == [3.0, 3.0]
    assert ranks2.run(_sum_of_ranks, 2) == [5.0, 5.0]


def test_failures_and_hangs_are_told_and_the_pool_recovers() -> None:
    """If this fails, one broken case hides its reason or takes all later ones down."""
    ranks = Ranks(2)
    try:
        with pytest.raises(RankError, match="the reason"):
            ranks.run(_fail_on, 1)
        assert ranks.run(_sum_of_ranks, 0) == [1.0, 1.0]
        with pytest.raises(RankError, match=r"no answer from ranks \[1\]"):
            ranks.run(_sleep_on, 1, timeout_s=2)
    finally:
        ranks.close()
