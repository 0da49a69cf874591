"""If this fails, a parallel layout changes what is trained (invariants 1, 4 and 13)."""

import pytest

from tests import parity
from tests.parity import LIMITS, Case
from tests.parity_models import TABLE

# Every value of every axis, each stage with each tensor-parallel size; `make prove` runs the whole table.
COVERING = [
    Case(stage=None, accumulation=4),
    Case(stage=0, dropout=0.1),
    Case(stage=3, accumulation=4, model="mqa", dropout=0.1),
    Case(dp=2, stage=None, accumulation=4, model="mqa"),
    Case(dp=2, stage=0),
    Case(dp=2, stage=1, accumulation=4, dropout=0.1),
    Case(dp=2, stage=2, model="mqa", dropout=0.1),
    Case(dp=2, stage=3, accumulation=4),
    Case(tp=2, stage=0, sequence_parallel=True, accumulation=4, model="mqa", dropout=0.1),
    Case(tp=2, stage=1, checkpointing="selective", dropout=0.1),
    Case(tp=2, stage=2, sequence_parallel=True),
    Case(tp=2, stage=3, accumulation=4, model="mqa", dropout=0.1),
    Case(tp=2, dp=2, stage=None, sequence_parallel=True, dropout=0.1),
    Case(tp=2, dp=2, stage=0, model="mqa"),
    Case(tp=2, dp=2, stage=1, sequence_parallel=True, accumulation=4, dropout=0.1),
    Case(tp=2, dp=2, stage=2, sequence_parallel=True, accumulation=4, model="mqa"),
    Case(tp=2, dp=2, stage=3, sequence_parallel=True, checkpointing="full", dropout=0.1),
    Case(tp=4, stage=0, accumulation=4),
    Case(tp=4, stage=1, sequence_parallel=True, model="mqa", dropout=0.1),
    Case(tp=4, stage=2, sequence_parallel=True, accumulation=4, dropout=0.1),
    Case(tp=4, stage=3, model="mqa"),
    Case(tp=4, stage=1, model="tiny-vocabulary"),
    Case(tp=4, stage=3, model="tiny-vocabulary", sequence_parallel=True),
    Case(stage=1, large_kernels=True),
    Case(tp=2, dp=2, stage=3, sequence_parallel=True, checkpointing="selective", large_kernels=True),
    Case(tp=4, stage=1, large_kernels=True, model="mqa"),
    Case(tp=2, dp=2, stage=1, sequence_parallel=True, model="2017", dropout=0.1),
    Case(tp=2, stage=3, accumulation=4, model="2017"),
    Case(tp=2, stage=3, sequence_parallel=True, checkpointing="selective", model="scores"),
    Case(tp=4, stage=1, model="scores"),
]

PAIRS = [
    Case(tp=2, stage=1, sequence_parallel=True, model="seq2seq", dropout=0.1, accumulation=4),
    Case(tp=2, dp=2, stage=3, model="seq2seq-apart", checkpointing="full", dropout=0.1),
]

PLANTED = [
    Case(tp=2, stage=1, fault="missing tp mark"),
    Case(tp=2, stage=3, fault="missing tp mark"),
    Case(tp=2, stage=1, sequence_parallel=True, fault="missing gradient sum"),
    Case(dp=2, stage=1, fault="loss per rank"),
    Case(tp=4, stage=1, fault="doubled KV gradient"),
    Case(tp=4, stage=1, model="mqa", fault="doubled KV gradient"),
]


@pytest.mark.parametrize("model", TABLE)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_comparison_is_of_real_learning(model: str, dropout: float) -> None:
    """Agreement on a run that clips nothing and learns nothing would prove little."""
    assert parity.is_real_learning(parity.expected(model, dropout))


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_layout_changes_nothing(case: Case) -> None:
    """B065, B096, B154: losses, norms, gradients, parameters and batches are those of plain torch on one process."""
    measured = parity.measure(case)
    assert measured.within_limits, f"{measured}; wanted {LIMITS}"


@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_layout_changes_nothing_for_an_encoder_decoder(case: Case) -> None:
    """The same with an encoder: its gradients come through every layer's cross-attention, summed over tp."""
    measured = parity.measure(case, steps=3)
    assert measured.within_limits, f"{measured}; wanted {LIMITS}"


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: f"{case.fault}-tp{case.tp}-z{case.stage}-{case.model}")
def test_planted_fault_turns_it_red(case: Case) -> None:
    """B093 and its kin: a comparison that passes with the bug in is none."""
    try:
        measured = parity.measure(case)
    except AssertionError as error:
        assert "differs between ranks" in str(error) or "disagree" in str(error), error
        return
    assert not measured.within_limits, f"{case.fault} went unnoticed: {measured}"


BF16 = [
    Case(stage=None, model="mqa", precision="bf16", dropout=0.1),
    Case(dp=2, stage=1, accumulation=4, precision="bf16", dropout=0.1),
    Case(tp=4, stage=2, model="mqa", precision="bf16", dropout=0.1),
    Case(tp=2, dp=2, stage=3, sequence_parallel=True, precision="bf16", dropout=0.1),
]


@pytest.mark.parametrize("case", BF16, ids=str)
def test_bf16_is_no_further_from_one_process_than_that_from_fp32(case: Case) -> None:
    """Rounding differs between layouts, so bf16 is held to the size of its own rounding; both numbers are printed."""
    bound = parity.distance(parity.expected(case.model, case.dropout, "bf16"), parity.expected(case.model, case.dropout))
    measured = parity.measure(case)
    print(f"{case}: {measured.loss:.1e} from one process, which is {bound.loss:.1e} from fp32")
    assert measured.same_batches and measured.loss <= bound.loss
