"""`mlite init NAME --text PATH`: a data config and a run config that work, sized to the text and the machine."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, replace
from glob import escape, has_magic
from pathlib import Path

from data_pipeline.config import load_data_config
from data_pipeline.errors import ConfigError, DataError, Fault
from data_pipeline.read import format_of
from data_pipeline.storage import atomic_write, is_url, list_files
from data_pipeline.streams import open_bytes
from launcher.commands.train import num_gpus
from launcher.config import load_config

PACKED = (".gz", ".zst", ".zstd")
COMPRESSION = 3  # bytes of text a byte of a packed file, roughly
BYTES_A_TOKEN = 3.5  # of BPE on text, roughly
LOOK_BYTES = 1_000_000  # of the largest file
UNKNOWN_BYTES = 100_000_000  # of a text whose size can't be asked for
COUNTED_BYTES = 1 << 26  # in which lines are counted, to know about how many there are
MOST_NAMED = 200  # files that a config names one by one
FEW_FILES = 20  # so few .txt files are cut into paragraphs or lines, or there would be too few documents to hold some out


@dataclass(frozen=True)
class Files:
    """Those of the texts that are of one format, as a source of the data config."""

    format: str
    patterns: str | list[str]
    text_field: str | None  # of jsonl and parquet
    cut: str | None  # of few .txt files: paragraph or line


@dataclass(frozen=True)
class Text:
    """What there is to train on, as far as a look at the names and the first record tells."""

    sources: list[Files]
    num_files: int
    num_bytes: int
    num_documents: int  # at least
    left_out: list[str]  # why, and how many


@dataclass(frozen=True)
class Size:
    """A model and a batch that suit so much text."""

    vocab_size: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    sequence_length: int
    global_batch_size: int
    lr: float


# Tokens of text up to which each is chosen. Without a GPU none is larger than the second; only its vocabulary grows.
SIZES = (
    (5e5, Size(4096, 128, 4, 4, 2, 344, 128, 16, 2e-3)),
    (2e7, Size(4096, 256, 4, 8, 2, 768, 256, 16, 1e-3)),
    (2e8, Size(8192, 512, 8, 8, 4, 1408, 512, 64, 6e-4)),
    (2e9, Size(32768, 768, 12, 12, 4, 2048, 1024, 256, 6e-4)),
    (float("inf"), Size(32768, 1024, 24, 16, 4, 2816, 2048, 512, 3e-4)),
)


def write_configs(name: str, pattern: str, *, force: bool = False) -> None:
    """Write configs/data/NAME.yaml and configs/run/NAME.yaml, and print the commands that use them."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
        raise ConfigError([Fault("NAME", name, "letters, digits, _ and -", "it names files and the run")])
    data_path, run_path = Path("configs/data") / f"{name}.yaml", Path("configs/run") / f"{name}.yaml"
    for path in (data_path, run_path):
        if path.exists() and not force:
            raise ConfigError([Fault("NAME", name, f"a name that is free, or --force: {path} exists", "choose another name")])
    text = look_at(pattern)
    gpus = num_gpus()
    size = choose_size(text.num_bytes, gpus=gpus)
    for path, content in ((data_path, data_config(name, text, size)), (run_path, run_config(name, text, size, gpus=gpus))):
        with atomic_write(path) as file:
            file.write(content.encode())
    load_data_config(data_path)  # what we write must be what we accept
    load_config(run_path)
    for line in text.left_out:
        print(f"Left out: {line}")
    print(f"{text.num_files} files, about {text.num_bytes / 1e6:,.1f} MB of text. Written: {data_path} and {run_path}, with comments.")
    print("Now type\n")
    print(f"  mlite data build {data_path}")
    print(f"  mlite train {run_path}\n")
    print(f"Then `mlite generate runs/{name}` writes text, and the same train command goes on after a stop.")


def look_at(pattern: str) -> Text:
    """What of the files can be read, a source for each format. Raises DataError where nothing matches or nothing that matches is read,
    ConfigError where no record has a text, or where no patterns tell what is read from what isn't."""
    files = list_files(pattern)
    by_format: dict[str, list[str]] = {}
    unread: Counter[str] = Counter()
    for file in files:
        try:
            by_format.setdefault(format_of(file), []).append(file)
        except DataError:
            unread[Path(file).suffix] += 1
    left_out = [f"{count} {suffix} file{'s' if count > 1 else ''}: not a format that is read" for suffix, count in sorted(unread.items())]
    if not by_format:
        raise DataError(f"{pattern}: nothing there is read\n  " + "\n  ".join(left_out) + "\nConvert it to .jsonl, .parquet or .txt.")
    looked: dict[str, tuple[str | None, str | None, int]] = {}
    textless: list[ConfigError] = []
    for format, members in by_format.items():
        try:
            looked[format] = _look_into(format, members)
        except ConfigError as error:
            textless.append(error)
            left_out.append(f"{len(members)} {format} file{'s' if len(members) > 1 else ''}: no record has a field of text")
    if not looked:
        raise textless[0]
    whole = not left_out and len(looked) == 1
    sources = [
        Files(format, pattern if whole else patterns_of(pattern, by_format[format]), field, cut)
        for format, (field, cut, _) in looked.items()
    ]
    kept = [file for format in looked for file in by_format[format]]
    return Text(sources, len(kept), sum(map(_text_bytes, kept)), sum(documents for _, _, documents in looked.values()), left_out)


def _look_into(format: str, files: list[str]) -> tuple[str | None, str | None, int]:
    """(field with the text, what of a file is a document, number of documents at least) of files of one format."""
    sizes = {file: _text_bytes(file) for file in files}
    sample, num_bytes = max(files, key=lambda file: sizes[file]), sum(sizes.values())
    if format == "jsonl":
        return _jsonl_field(sample), None, max(len(files), num_bytes // _line_bytes(sample))
    if format == "parquet":
        return _parquet_field(sample), None, max(len(files), num_bytes // 2000)
    if len(files) >= FEW_FILES:
        return None, None, len(files)
    cut, bytes_each = _how_to_cut(sample)
    return None, cut, max(len(files), num_bytes // bytes_each)


def patterns_of(pattern: str, files: list[str]) -> list[str]:
    """Patterns that these files match, and nothing else of what `pattern` matches: by the ends of their names where that tells them."""
    place, _, last = pattern.rpartition("/")
    if is_url(pattern) and not has_magic(pattern):
        begin = f"{pattern.rstrip('/')}/**/"
    elif Path(pattern).expanduser().is_dir():
        begin = f"{escape(pattern.rstrip('/'))}/**/"
    else:
        begin = f"{place}/" * bool(place) + ("**/" if last == "**" else last.rstrip("*"))
    endings = {_ending(file) for file in files}
    found = sorted({f"{begin}{ending}" for ending in endings})
    try:
        if sorted(list_files(found)) == sorted(files):
            return found
    except DataError:
        pass
    if len(files) > MOST_NAMED:
        raise ConfigError([Fault("--text", pattern, "files that are all of one kind", "give a pattern, for example raw/**/*.jsonl")])
    return [file if is_url(file) else escape(file) for file in files]


def _ending(file: str) -> str:
    """`*.jsonl.gz`; the name itself where it has no suffix."""
    name = file.rpartition("/")[2]
    bare, packed = (Path(name).stem, Path(name).suffix) if name.lower().endswith(PACKED) else (name, "")
    return f"*{escape(Path(bare).suffix)}{packed}" if Path(bare).suffix else escape(name)


def choose_size(num_bytes: int, *, gpus: int) -> Size:
    """The first of SIZES that the text fits, at most the second without a GPU; small texts get a small vocabulary."""
    tokens = num_bytes / BYTES_A_TOKEN
    size = next((size for limit, size in (SIZES if gpus else SIZES[:2]) if tokens <= limit), SIZES[1][1])
    vocabulary = 512 if num_bytes < 200_000 else 1024 if num_bytes < 1_000_000 else size.vocab_size
    return replace(size, vocab_size=vocabulary)


def data_config(name: str, text: Text, size: Size) -> str:
    sources = "\n".join(_source(name if len(text.sources) == 1 else f"{name}-{files.format}", files) for files in text.sources)
    fraction = min(0.2, max(0.005, round(40 / max(text.num_documents, 1), 3)))
    return f"""# Raw text to a dataset folder: mlite data build configs/data/{name}.yaml
output: data/{name}
seed: 1234

sources: # several may stand here; of duplicates between them the first keeps its copy
{sources}

normalise: {{unicode: nfc, newlines: lf}}

dedup:
  exact: true
  minhash: {{ngram: 5, num_bands: 14, rows_per_band: 8, threshold: 0.8}} # near-duplicates; null: keep them

tokenizer: {{type: bpe, vocab_size: {size.vocab_size}, pretokenizer: gpt2}} # or bytes, or pretrained with name_or_path

validation: {{fraction: {fraction:g}}} # of the documents, held out of training

packing: [{{sequence_length: {size.sequence_length}, method: best_fit}}]
workers: 2
"""


def _source(name: str, files: Files) -> str:
    lines = ""
    if files.text_field is not None:
        lines = f"\n    text_field: {json.dumps(files.text_field)} # the field of a record that holds its text"
    elif files.cut is not None:
        lines = (
            f"\n    txt_documents: {files.cut} # what of a file is a document: paragraph (between blank lines), line, or file: all of it"
        )
    return f"""  - name: {name}
    files: {json.dumps(files.patterns)} # files, folders or globs; .txt, .jsonl, .parquet, plain, .gz or .zst{lines}"""


def run_config(name: str, text: Text, size: Size, *, gpus: int) -> str:
    tokens = text.num_bytes / BYTES_A_TOKEN
    epochs = 4 if tokens < 2e7 else 1
    steps = int(max(100, epochs * tokens / (size.global_batch_size * size.sequence_length)))
    if not gpus:
        steps = min(steps, 1000)
    every = max(20, min(1000, steps // 8))
    precision = "bf16" if gpus else "fp32"
    return f"""# Train: mlite train configs/run/{name}.yaml       any key can be overridden: training.steps=500
# On several processes: deepspeed --num_gpus 2 launcher/train.py --config configs/run/{name}.yaml parallel.tp=2
run: {{name: {name}, seed: 1234}} # the run folder is runs/{name}

model:
  vocab_size: auto # the tokenizer's
  hidden_size: {size.hidden_size}
  num_hidden_layers: {size.layers}
  num_attention_heads: {size.heads}
  num_key_value_heads: {size.kv_heads} # fewer than attention heads: grouped-query attention
  intermediate_size: {size.feed_forward}
  max_position_embeddings: {max(2 * size.sequence_length, 512)}

data: {{path: data/{name}, packing: best_fit, document_mask: true}}

parallel: {{tp: 1, zero_stage: 1}} # data parallel is what is left of the processes

training:
  steps: {steps} # about {steps * size.global_batch_size * size.sequence_length / max(tokens, 1):.1f} times through the text
  sequence_length: {size.sequence_length} # tokens a row
  global_batch_size: {size.global_batch_size} # rows a step, over all processes
  micro_batch_size: auto
  precision: {precision}

optimizer: {{name: adamw, lr: {size.lr:.1e}, betas: [0.9, 0.95], weight_decay: 0.1, max_grad_norm: 1.0}}
lr_scheduler: {{name: cosine, warmup_steps: {max(10, min(2000, steps // 20))}, min_lr_ratio: 0.1}}
checkpoint: {{interval_steps: {every}, keep_last: 2}}
evaluation: {{interval_steps: {every}, max_sequences: 320}}
logging: {{interval_steps: {1 if steps <= 2000 else 10}, wandb: {{mode: auto, project: megatron-lite}}}}
"""


def _text_bytes(file: str) -> int:
    if is_url(file):
        return UNKNOWN_BYTES
    return Path(file).stat().st_size * (COMPRESSION if file.lower().endswith(PACKED) else 1)


def _how_to_cut(file: str) -> tuple[str, int]:
    """(paragraph or line, bytes of each): paragraphs where a good part of the text has blank lines between them."""
    with open_bytes(file) as opened:
        text = opened.read(LOOK_BYTES).replace(b"\r\n", b"\n")
    paragraphs = len([part for part in text.split(b"\n\n") if part.strip()])
    if paragraphs >= max(20, len(text) // 20_000):
        return "paragraph", max(1, len(text) // paragraphs)
    return "line", max(1, len(text) // max(1, text.count(b"\n")))


def _line_bytes(file: str) -> int:
    """The mean length of a line, over the first COUNTED_BYTES."""
    num_bytes = num_lines = 0
    with open_bytes(file) as source:
        while num_bytes < COUNTED_BYTES and (block := source.read(1 << 20)):
            num_bytes, num_lines = num_bytes + len(block), num_lines + block.count(b"\n")
    return max(1, num_bytes // max(1, num_lines))


def _jsonl_field(file: str) -> str:
    """The field with the text in the first record that can be read: `text` or `content`, else the longest string."""
    with open_bytes(file) as lines:
        for line, _ in zip(lines, range(100)):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                return _best_field({key: len(value) for key, value in record.items() if isinstance(value, str)}, file)
    return _best_field({}, file)


def _parquet_field(file: str) -> str:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.parquet.read_schema(file)
    return _best_field(
        {field.name: 0 for field in schema if pyarrow.types.is_string(field.type) or pyarrow.types.is_large_string(field.type)}, file
    )


def _best_field(lengths: dict[str, int], file: str) -> str:
    for name in ("text", "content", "body"):
        if name in lengths:
            return name
    if not lengths:
        raise ConfigError([Fault("--text", file, "records with a field of text", "no record at its beginning has one")])
    return max(lengths, key=lambda name: lengths[name])
