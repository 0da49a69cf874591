"""`report.html` of a run: one page without anything to fetch; the same folder gives the same page."""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from data_pipeline.storage import atomic_write
from launcher.console import duration
from launcher.report_curves import Curve, chart, short
from launcher.report_facts import Attempt, RunFacts, number, read_run
from launcher.report_page import details, page, pairs, table, tiles
from megatron_lite.sizes import flops_per_token, num_parameters

WAIT = "data_wait_s"  # a sum over the steps that a record stands for; the others are of one step
# chart -> its curves: (label, key of metrics.jsonl, how it is drawn)
CHARTS: tuple[tuple[str, tuple[tuple[str, str, str], ...]], ...] = (
    ("Loss (nats a token)", (("training", "loss", "thin"), ("held out", "eval/loss", "dots"))),
    ("Held-out bits per byte", (("held out", "eval/bits_per_byte", "dots"),)),
    ("Gradient norm, before clipping", (("gradient norm", "grad_norm", "thin"),)),
    ("Learning rate", (("learning rate", "lr", "line"),)),
    ("Tokens per second", (("tokens per second", "tokens_per_second", "thin"),)),
    ("Seconds a step", (("step", "step_time_s", "thin"), ("of it waiting for data", WAIT, "line"))),
    ("Model FLOPs utilisation", (("MFU", "mfu", "thin"),)),
)
CUT = (CHARTS[0][0], CHARTS[2][0])
QUIET_EVENTS = ("saved", "started", "done", "stopped", "memory")  # which stand elsewhere on the page


def write_report(run: Path, to: Path | None = None) -> Path:
    """Write the page of a run folder; its path. Raises ConfigError where the folder has no config."""
    facts = read_run(run)
    target = to or facts.folder.path / "report.html"
    sections = [
        f"<h2>Curves</h2>{_curves(facts)}" if facts.steps or facts.evaluations else "<p>No step has been logged yet.</p>",
        _evaluations(facts),
        _attempts(facts),
        _sizes(facts),
        _data(facts),
        _events(facts),
        _environment(facts),
        details("Config, as resolved", f"<pre>{html.escape(yaml.safe_dump(facts.tree, sort_keys=False, allow_unicode=True))}</pre>"),
        _deepspeed(facts),
    ]
    title = str((facts.tree.get("run") or {}).get("name") or run.name)
    with atomic_write(target) as file:
        file.write(page(title, _state(facts), [tiles(_headline(facts)), *sections]).encode())
    return target


def _state(facts: RunFacts) -> str:
    """How the run stands, in a sentence."""
    status = facts.status
    state, code, message = status.get("state", "unknown"), status.get("code"), status.get("message")
    if state == "done" and message:
        return str(message)
    return f"{state}{f' (exit code {code})' if code is not None else ''}{f': {message}' if message else ''}"


def _headline(facts: RunFacts) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if facts.steps:
        last = facts.steps[-1]
        total = facts.status.get("total_steps") or (facts.config.training.num_steps if facts.config else "?")
        found += [("step", f"{last['step']:,} of {total if isinstance(total, str) else f'{total:,}'}"), ("tokens", short(last["tokens"]))]
        found += [("training loss", f"{number(last['loss']):.4f}")]
    if facts.evaluations:
        best = min(facts.evaluations, key=lambda record: number(record["eval/loss"]))
        newest = facts.evaluations[-1]
        found += [
            ("held-out loss", f"{number(newest['eval/loss']):.4f}"),
            ("bits per byte", f"{number(newest.get('eval/bits_per_byte')):.4f}"),
        ]
        if best is not newest:
            found.append(("best held-out loss", f"{number(best['eval/loss']):.4f} at step {best['step']:,}"))
    if facts.steps:
        rates, mfu = (facts.column(key)[~np.isnan(facts.column(key))] for key in ("tokens_per_second", "mfu"))
        found += [("tokens per second", short(float(np.median(rates))))] if rates.size else []
        found += [("training time", took(facts.clock_s[-1]))]
        found += [("MFU", f"{np.median(mfu):.1%}")] if mfu.size else []
    if facts.config:
        found.append(("parameters", short(num_parameters(facts.config.model))))
    return found


def _curves(facts: RunFacts) -> str:
    """Every chart over steps, tokens and time; the page's buttons choose."""
    seconds = float(facts.clock_s[-1]) if facts.steps else 0.0
    unit, size = ("hours", 3600) if seconds > 3 * 3600 else ("minutes", 60) if seconds > 600 else ("seconds", 1)
    axes: list[tuple[str, str, Callable[[Sequence[float] | np.ndarray], np.ndarray]]] = [
        ("step", "steps", lambda steps: np.asarray(steps)),
        ("tokens", "tokens", lambda steps: facts.at(steps, facts.column("tokens"))),
        ("time", f"{unit} of training", lambda steps: facts.at(steps, facts.clock_s) / size),
    ]
    resumes = [attempt for attempt in facts.attempts if attempt.started.get("step")]
    blocks = []
    for name, label, place in axes:
        marks = list(zip(place([attempt.started["step"] for attempt in resumes]), [f"attempt {attempt.number}" for attempt in resumes]))
        charts = []
        for title, series in CHARTS:
            curves = []
            for colour, (curve, key, kind) in enumerate(series):
                ys = facts.column(key) / facts.steps_each if key == WAIT else facts.column(key)
                xs = place(facts.evaluated_steps if key.startswith("eval/") else facts.column("step"))
                curves.append(Curve(curve, xs, ys, kind, colour))  # type: ignore[arg-type]
            charts.append(chart(title, curves, x_label=label, marks=marks, cut=title in CUT))
        blocks.append((name, label, "".join(charts)))
    buttons = "".join(
        f'<input type="radio" name="axis" id="x-{name}"{" checked" if name == "step" else ""}><label for="x-{name}">{html.escape(label)}</label>'
        for name, label, _ in blocks
    )
    return buttons + "".join(f'<div class="charts by-{name}">{charts}</div>' for name, _, charts in blocks)


def _evaluations(facts: RunFacts) -> str:
    if not facts.evaluations:
        return ""
    keys = ("eval/loss", "eval/perplexity", "eval/bits_per_byte", "eval/tokens", "eval/sequences")
    tokens = facts.at(facts.evaluated_steps, facts.column("tokens")) if facts.steps else np.zeros(len(facts.evaluations))
    rows = [
        [
            f"{record['step']:,}",
            short(float(seen)),
            *(f"{number(record.get(key)):,.5g}" for key in keys[:3]),
            *(f"{record.get(key, 0):,}" for key in keys[3:]),
        ]
        for record, seen in zip(facts.evaluations, tokens)
    ]
    head = ["step", "tokens trained on", "loss (nats)", "perplexity", "bits per byte", "targets scored", "rows"]
    return details(f"Evaluations ({len(rows)})", table(head, rows), opened=len(rows) <= 12)


def _attempts(facts: RunFacts) -> str:
    rows = []
    for attempt in facts.attempts:
        rows.append(
            [
                str(attempt.number),
                str(attempt.environment.get("started", "")),
                str(attempt.started.get("step", "")),
                _layout(attempt.started.get("layout") or {}),
                f"{attempt.environment.get('world_size', '?')} by {attempt.environment.get('starter', '?')}",
                str(attempt.environment.get("host", "")),
                took(attempt.seconds) if attempt.started else "",
                _end(attempt, facts),
            ]
        )
    failures = "".join(
        f"<h3>Attempt {attempt.number}: rank {html.escape(str(attempt.failure.get('rank')))} failed</h3>"
        f"<pre>{html.escape(str(attempt.failure.get('message', '')))}\n{html.escape(str(attempt.failure.get('details', '')))}</pre>"
        for attempt in facts.attempts
        if attempt.failure
    )
    return "<h2>Attempts</h2>" + table(["attempt", "started", "from step", "layout", "processes", "host", "took", "end"], rows) + failures


def _layout(layout: dict[str, Any]) -> str:
    """dp 2 × tp 2, ZeRO 1"""
    axes = [
        f"{axis} {layout[axis]}" for axis in ("dp", "tp", "pp", "cp", "ep") if axis in layout and (layout[axis] > 1 or axis in ("dp", "tp"))
    ]
    words = [" × ".join(axes), f"ZeRO {layout['zero_stage']}" if "zero_stage" in layout else ""]
    return ", ".join(filter(None, [*words, "sequence parallel" if layout.get("sequence_parallel") else ""]))


def _end(attempt: Attempt, facts: RunFacts) -> str:
    if attempt.failure:
        return f"failed with code {attempt.failure.get('code')}"
    if attempt.ended:
        return str(attempt.ended.get("event"))
    if facts.status.get("attempt") == attempt.number:
        return str(facts.status.get("state", ""))
    return "killed"


def _sizes(facts: RunFacts) -> str:
    rows: list[tuple[str, str]] = []
    config = facts.config
    if config is not None:
        training, flops = config.training, flops_per_token(config.model, config.training.sequence_length, config.training.source_length)
        rows += [
            ("parameters", f"{num_parameters(config.model):,}"),
            ("model FLOPs a token, forward and backward", short(flops)),
            ("targets a step, at most", f"{training.global_batch_size * training.sequence_length:,}"),
        ]
        if facts.steps:
            rows.append(("model FLOPs so far", short(flops * facts.steps[-1]["tokens"])))
    if facts.steps:
        saves = [number(event.get("seconds")) for event in facts.events if event.get("event") == "saved"]
        rows += [
            ("time in steps", took(facts.clock_s[-1])),
            ("of it waiting for data", took(float(np.nansum(facts.column("data_wait_s"))))),
            ("saves", f"{len(saves)}, {took(float(np.nansum(saves)))} together"),
            ("done twice because of resumes", f"{facts.num_moved:,} logged steps, {took(facts.moved_s)}"),
        ]
    for event in [event for event in facts.events if event.get("event") == "memory"][-1:]:
        planned, kept, measured = (number(event.get(f"{key}_bytes")) / 2**20 for key in ("planned", "planned_with_kept", "measured"))
        beside = f", {kept:,.1f} MiB with what the allocator keeps" if kept > 0 else ""
        rows.append(("peak memory of a rank", f"planned {planned:,.1f} MiB{beside}; measured {measured:,.1f} MiB"))
    rows += [(f"checkpoint {name}", f"{num_bytes / 1e6:,.1f} MB") for name, num_bytes in facts.checkpoints()]
    return "<h2>Size and time</h2>" + pairs(rows) if rows else ""


def _data(facts: RunFacts) -> str:
    rows = []
    seen = facts.steps[-1]["tokens"] if facts.steps else 0
    for path, share, manifest in facts.datasets():
        if isinstance(manifest, str):
            rows.append([path, f"{share:.1%}", manifest, *[""] * 6])
            continue
        trained = sum(source.tokens for source in manifest.sources if source.split == "train")
        for source in manifest.sources:
            epochs = f"{seen * share / trained:.2f}" if source.split == "train" and trained else ""
            part = f"{share:.1%}" if source.split == "train" else ""
            cells = [f"{count:,}" for count in (source.documents, source.tokens, source.text_bytes)]
            per_token = f"{source.text_bytes / max(source.tokens, 1):.2f}"
            rows.append([path, part, f"{source.name}, {source.split}", *cells, per_token, epochs, source.hash[:12]])
    head = ["dataset", "share so far", "source", "documents", "tokens", "bytes of text", "bytes a token", "epochs so far", "identity"]
    return "<h2>Data</h2>" + table(head, rows) if rows else ""


def _events(facts: RunFacts) -> str:
    rows = [
        [
            str(event.get("attempt", "")),
            str(event.get("event", "")),
            _words({k: v for k, v in event.items() if k not in ("time", "attempt", "event")}),
        ]
        for event in facts.events
        if event.get("event") not in QUIET_EVENTS
    ]
    return details(f"Events ({len(rows)})", table(["attempt", "event", ""], rows), opened=len(rows) <= 12) if rows else ""


def _words(fields: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}" for key, value in fields.items())


def _environment(facts: RunFacts) -> str:
    if not facts.attempts:
        return ""
    rows: Sequence[tuple[str, str]] = [
        (
            key,
            " ".join(value)
            if key == "command"
            else value
            if isinstance(value, str)
            else _words(value)
            if isinstance(value, dict)
            else json.dumps(value),
        )
        for key, value in facts.attempts[-1].environment.items()
    ]
    return details(f"Environment of attempt {facts.attempts[-1].number}", pairs(rows), opened=True)


def _deepspeed(facts: RunFacts) -> str:
    try:
        text = facts.folder.deepspeed.read_text(encoding="utf-8")
    except OSError:
        return ""
    return details("What DeepSpeed was given", f"<pre>{html.escape(text)}</pre>")


def took(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
