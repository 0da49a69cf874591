"""English to German from Multi30k: BLEU on test_2016_flickr with beam 4, side by side with `transformers`' Marian after the same steps.

    python -m tests.benchmarks.bench_translation [--corpus DIR] [--steps 4000] [--only ours|peer] [--peer-threads 2] [--output FILE]

Ours is the whole command: `mlite data build`, then `mlite train configs/run/translation.yaml` in two processes, each on a core, then
`mlite generate --beams 4`. The peer, of the same width and depth and as nearly as possible as many parameters, gets the same pairs in the
same steps, one a row, the same optimizer, schedule, dropout and label smoothing, and decodes by its own beam search; its
post-norm with sinusoidal positions is the paper's. Both texts are scored by sacrebleu as they come, detokenised and cased. The corpus
has the files of Multi30k's task 1: train, val and test_2016_flickr, `.en.gz` and `.de.gz`.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.dataset import Dataset
from data_pipeline.pair_loader import PairRow
from data_pipeline.tokenizer.encode import Encoder
from launcher.config import RunConfig, load_config
from launcher.datasets import open_rows
from tests.benchmarks.bench_dedup import cpu_name, version
from tests.benchmarks.bench_quality import timed
from tests.benchmarks.peers import make_peer
from tests.benchmarks.turns import ROOT

CORPUS = ROOT.parent / "shared" / "corpora" / "multi30k_en_de"
CONFIG = ROOT / "configs" / "run" / "translation.yaml"
BEAMS, MAX_TOKENS = 4, 80
MOST_S = 6 * 3600  # on a machine that does other things, too
PEER_FEED_FORWARD = 768  # two matrices of as many elements as our three of 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--only", choices=("ours", "peer"))
    parser.add_argument("--folder", type=Path, help="Where runs are kept; ours goes on there from its last checkpoint.")
    parser.add_argument("--peer-venvs", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--peer-threads", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if not options.corpus.exists():
        print(f"skipped: {options.corpus.name} is not there; give another folder with --corpus")
        return
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        report = compare(folder, options)
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    build_data(folder, options.corpus)
    config = load_config(CONFIG, [f"run.dir={folder / 'run'}", f"data.path={folder / 'data'}", f"training.steps={options.steps}"])
    report: dict[str, Any] = {
        "command": "python -m tests.benchmarks.bench_translation " + " ".join(sys.argv[1:]),
        "hardware": {"cpu": cpu_name(), "cores": 2},
        "steps": options.steps,
        "beams": BEAMS,
    }
    if options.only != "peer":
        report["ours"] = run_ours(folder, config, options)
    if options.only != "ours":
        peer = make_peer("transformers", options.peer_venvs)
        report["transformers"] = {"version": version(str(peer), "transformers"), **run_peer(folder, config, options, peer)}
    return report


def build_data(folder: Path, corpus: Path) -> None:
    """As configs/data/translation.yaml, of this corpus."""
    config = (ROOT / "configs" / "data" / "translation.yaml").read_text()
    config = config.replace("data/translation\n", f"{folder}/data\n").replace("raw/", f"{corpus}/")
    (folder / "data.yaml").write_text(config)
    timed([sys.executable, "-m", "launcher.cli", "data", "build", str(folder / "data.yaml")], threads=1)


def lines(path: Path) -> list[str]:
    return gzip.decompress(path.read_bytes()).decode().splitlines()


def bleu(hypotheses: list[str], references: list[str]) -> dict[str, Any]:
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    return {"bleu": round(metric.corpus_score(hypotheses, [references]).score, 2), "signature": str(metric.get_signature())}


# ----------------------------------------------------------------------------------------------------------------- ours


def run_ours(folder: Path, config: RunConfig, options: argparse.Namespace) -> dict[str, Any]:
    given = [str(CONFIG), f"run.dir={config.run.folder}", f"data.path={folder / 'data'}", f"training.steps={options.steps}"]
    _, times = timed([sys.executable, "-m", "launcher.cli", "train", *given, "--processes", "2"], threads=1, timeout_s=MOST_S)
    metrics = [json.loads(line) for line in (config.run.folder / "metrics.jsonl").read_text().splitlines()]
    hypotheses = translate(config.run.folder, options.corpus)
    return {
        **bleu(hypotheses, lines(options.corpus / "test_2016_flickr.de.gz")),
        "heldout_loss": metrics[-1].get("eval/loss"),
        "train_s": round(times["process_s"], 1),
        "cpu_s": round(times["cpu_s"], 1),
    }


def translate(run: Path, corpus: Path) -> list[str]:
    """Of the test set by a run's newest checkpoint, line by line."""
    sources = "\n".join(lines(corpus / "test_2016_flickr.en.gz"))
    command = [sys.executable, "-m", "launcher.cli", "generate", str(run), "--file", "-", "--beams", str(BEAMS)]
    command += ["--max-tokens", str(MAX_TOKENS), "--batch-size", "50"]
    done = subprocess.run(command, input=sources, capture_output=True, text=True, cwd=ROOT, check=True)
    return done.stdout.splitlines()


# ----------------------------------------------------------------------------------------------------------------- peer


def run_peer(folder: Path, config: RunConfig, options: argparse.Namespace, python: Path) -> dict[str, Any]:
    dataset = Dataset.open(folder / "data")
    encoder = Encoder.open(dataset.tokenizer_path)
    save_batches(folder / "batches.npz", config, dataset, options.steps)
    sources = [np.append(encoder.encode(line), dataset.eod_id) for line in lines(options.corpus / "test_2016_flickr.en.gz")]
    save_pairs(folder / "sources.npz", [[(source, source[:0]) for source in sources]])
    optimizer, scheduler = config.optimizer, config.lr_scheduler
    asked = {
        "vocab_size": dataset.vocab_size,
        "eod_id": dataset.eod_id,
        "hidden_size": config.model.hidden_size,
        "num_hidden_layers": config.model.num_hidden_layers,
        "num_attention_heads": config.model.num_attention_heads,
        "intermediate_size": PEER_FEED_FORWARD,
        "dropout": config.model.hidden_dropout,
        "label_smoothing": config.training.loss.label_smoothing,
        **{key: getattr(optimizer, key) for key in ("lr", "betas", "eps", "weight_decay", "max_grad_norm")},
        **{key: getattr(scheduler, key) for key in ("warmup_steps", "min_lr_ratio")},
        "steps": options.steps,
        "num_beams": BEAMS,
        "max_tokens": MAX_TOKENS,
        "threads": options.peer_threads,
        "seed": config.run.seed,
        **{name: str(folder / f"{name}.npz") for name in ("batches", "sources", "hypotheses")},
    }
    answer, times = timed([str(python), "-m", "tests.benchmarks.peer_marian", json.dumps(asked)], threads=2, timeout_s=MOST_S)
    stored = np.load(folder / "hypotheses.npz")
    texts = np.split(stored["ids"], np.cumsum(stored["lengths"])[:-1])
    hypotheses = [encoder.decode(text.tolist()) for text in texts]
    return {**bleu(hypotheses, lines(options.corpus / "test_2016_flickr.de.gz")), **answer, "cpu_s": round(times["cpu_s"], 1)}


def save_batches(path: Path, config: RunConfig, dataset: Dataset, steps: int) -> None:
    """The pairs of each step of our run, in its order."""
    rows, size = open_rows(config, [dataset]), config.training.global_batch_size

    def step(number: int) -> list[tuple[np.ndarray, np.ndarray]]:
        found = [rows[sample] for sample in range(number * size, (number + 1) * size)]
        return [pair for row in found if isinstance(row, PairRow) for pair in pairs_of(row)]

    save_pairs(path, map(step, range(steps)))


def pairs_of(row: PairRow) -> list[tuple[np.ndarray, np.ndarray]]:
    sides = (row.source[: row.num_source_tokens], row.source_starts), (row.targets[: row.num_targets], row.target_starts)
    split = [np.split(tokens, starts[1 : row.num_pairs]) for tokens, starts in sides]
    return list(zip(*split, strict=True))


def save_pairs(path: Path, steps: Iterable[list[tuple[np.ndarray, np.ndarray]]]) -> None:
    counts, lengths, ids = [], [], []
    for pairs in steps:
        counts.append(len(pairs))
        lengths += [(source.size, target.size) for source, target in pairs]
        ids += [side.astype(np.uint16) for pair in pairs for side in pair]
    np.savez(path, pairs_per_step=np.array(counts), lengths=np.array(lengths), ids=np.concatenate(ids))


if __name__ == "__main__":
    main()
