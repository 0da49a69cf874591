"""The alarm for a source that loses more of its text than anybody meant: a filter too strict, a field that is the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.progress import Progress
from data_pipeline.read import BLANK_KINDS
from data_pipeline.step import Ledger

WARNED_SHARE = 0.5
_SHOWN_REASONS = 4


def check_losses(ledger: Ledger, chain: Sequence[str], *, limit: float | None, progress: Progress) -> None:
    """Raises DataError where a source lost more than the share `limit`, of its documents or of their bytes; without a limit, says so
    from WARNED_SHARE on."""
    alarms = [
        f"{source} lost {100 * share:.1f} % of its text: {why}"
        for source, share, why in source_losses(ledger, chain)
        if share > (WARNED_SHARE if limit is None else limit)
    ]
    if alarms and limit is not None:
        raise DataError(
            f"more than max_source_loss ({100 * limit:.0f} %) is gone\n"
            + "\n".join(f"  {alarm}" for alarm in alarms)
            + "\nLook at what was dropped (filters.write_dropped), then change what drops it, or raise max_source_loss. What was done so far is kept."
        )
    for alarm in alarms:
        progress.say(f"warning: {alarm}")


def check_stored_losses(stored: dict[str, Any], *, limit: float | None, progress: Progress) -> None:
    """The same for a dataset that stands already, of its manifest's ledger: the limit may be another than when it was built."""
    ledger = Ledger.from_dict(stored)
    check_losses(ledger, [stage for stage in ledger.stages if stage != "encode"], limit=limit, progress=progress)


def source_losses(ledger: Ledger, chain: Sequence[str]) -> list[tuple[str, float, str]]:
    """(source, share lost, what took most) of every source, by name."""
    return [(source, lost_share(ledger, chain, source), _why(ledger, chain, source)) for source in sorted(ledger.stages[chain[0]])]


def lost_share(ledger: Ledger, chain: Sequence[str], source: str) -> float:
    """Of what the source's files hold, blank lines left out: the share of the documents or of the text's bytes, whichever is larger."""
    first, last = ledger.tally(chain[0], source), ledger.tally(chain[-1], source)
    blank = sum(count.documents for reason, count in first.dropped.items() if reason in BLANK_KINDS)
    documents, num_bytes = first.read.documents - blank, first.written.bytes
    gone = 1 - last.written.documents / documents if documents else 0.0
    return max(gone, 1 - last.written.bytes / num_bytes if num_bytes else 0.0)


def _why(ledger: Ledger, chain: Sequence[str], source: str) -> str:
    """What took most, by bytes."""
    reasons: list[tuple[int, str]] = []
    for stage in chain:
        tally = ledger.tally(stage, source)
        for reason, count in {**tally.dropped, **tally.errors}.items():
            if reason not in BLANK_KINDS:
                reasons.append((count.bytes, f"{count.documents:,} {reason.replace('_', ' ')}"))
        if tally.kept.bytes > tally.written.bytes:
            reasons.append((tally.kept.bytes - tally.written.bytes, f"{tally.kept.bytes - tally.written.bytes:,} bytes cut by {stage}"))
    return ", ".join(text for _, text in sorted(reasons, key=lambda pair: -pair[0])[:_SHOWN_REASONS])
