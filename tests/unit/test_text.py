"""If these fail, text in and text out of a model is not what its tokens say: from Python, or from `mlite generate` and `score`."""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import megatron_lite
from data_pipeline.errors import CheckpointError, ConfigError, DataError
from data_pipeline.tokenizer.byte_level import bytes_tokenizer_json
from data_pipeline.tokenizer.encode import Encoder
from launcher.cli import app
from launcher.console import escape_unprintable
from megatron_lite.checkpoint.save import save_checkpoint
from megatron_lite.checkpoint.slices import model_slices
from megatron_lite.inference.beam import BeamOptions
from megatron_lite.inference.generate import start_sampling
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.inference.text import LanguageModel
from megatron_lite.models.build import build_model
from megatron_lite.parallel.groups import ProcessGroups
from tests.checkpoint_fakes import run_state
from tests.data_fixtures import tiny_dataset
from tests.huggingface_cases import MODELS, export, trained

CONFIG = MODELS["gqa"].model_copy(update={"vocab_size": 257, "max_position_embeddings": 48})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder as training leaves it: bytes are its tokens, 256 ends a document and begins one."""
    folder = tmp_path_factory.mktemp("runs") / "a"
    data = tiny_dataset(folder / "data")
    state = run_state(1, model=CONFIG.model_dump(mode="json"), tokenizer_hash=data.tokenizer_hash)
    save_checkpoint(
        folder / "checkpoints", step=1, slices=model_slices(trained(CONFIG)), groups=ProcessGroups.single(), attempt=1, state=state
    )
    tree = {
        "run": {"name": "a", "dir": str(folder)},
        "data": {"path": str(folder / "data")},
        "model": CONFIG.model_dump(mode="json"),
        "training": {"steps": 1, "sequence_length": 16},
        "lr_scheduler": {"warmup_steps": 0},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    shutil.copyfile(data.tokenizer_path, folder / "tokenizer.json")
    (folder / "generation_config.json").write_text(json.dumps({"bos_token_id": 256, "eos_token_id": 256}))
    return folder


@pytest.fixture(scope="module")
def model(run: Path) -> LanguageModel:
    return megatron_lite.load(run)


def said(*words: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def lines(*words: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in said(*words).splitlines()]


def test_load_finds_what_is_there(run: Path, model: LanguageModel, tmp_path: Path) -> None:
    """A run, a checkpoint and the Hugging Face folder of the same weights write and score alike; so does a run without its own
    tokenizer, by its data's."""
    checkpoint = run / "checkpoints" / "step_00000001"
    exported = export(checkpoint, tmp_path / "hf")
    for name in ("tokenizer.json", "generation_config.json"):
        shutil.copyfile(run / name, exported / name)
    older = tmp_path / "older"
    shutil.copytree(run / "checkpoints", older / "checkpoints")
    shutil.copyfile(run / "config.yaml", older / "config.yaml")
    want = model.generate("the ", temperature=0, max_new_tokens=8)
    assert (model.step, model.begin_id, model.stop_ids) == (1, 256, (256,))
    for path in (checkpoint, exported, older):
        loaded = megatron_lite.load(path)
        assert loaded.generate("the ", temperature=0, max_new_tokens=8) == want
        assert loaded.logprobs("and") == model.logprobs("and")
    with pytest.raises(ConfigError, match=r"megatron_lite\.load"):
        said("generate", str(exported))


def test_load_refuses_what_is_not_there(run: Path, tmp_path: Path) -> None:
    """A folder that is nothing, a run without a checkpoint, and one whose tokenizer is another."""
    with pytest.raises(ConfigError, match="a run folder, one of its checkpoints, or a Hugging Face folder"):
        megatron_lite.load(tmp_path)
    (tmp_path / "config.yaml").write_text("data: {}\n")
    with pytest.raises(CheckpointError, match="no checkpoint yet"):
        megatron_lite.load(tmp_path)
    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    (tmp_path / "tokenizer.json").write_text(bytes_tokenizer_json() + " ")
    with pytest.raises(DataError, match=r"no tokenizer\.json"):
        megatron_lite.load(tmp_path)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        megatron_lite.lode  # type: ignore[attr-defined]  # noqa: B018


def test_streams_are_the_text(model: LanguageModel) -> None:
    """B006: the pieces of a stream are whole characters, together the decoded tokens; bytes that are none are U+FFFD."""
    for seed in range(4):
        pieces = list(model.stream("naïve", max_new_tokens=30, seed=seed))
        answer = model.answers(["naïve"], max_new_tokens=30, sampling=SamplingOptions(seed=seed))[0][0]
        assert (
            "".join(pieces) == answer.text == model.tokenizer.decode(answer.tokens) == model.generate("naïve", max_new_tokens=30, seed=seed)
        )
        heard: list[str] = []
        model.answers(
            ["naïve"], max_new_tokens=30, sampling=SamplingOptions(seed=seed), on_text=lambda _, piece, heard=heard: heard.append(piece)
        )
        assert heard == pieces


def test_stop_strings_end_an_answer(model: LanguageModel) -> None:
    """The text before a stop string that lies across tokens is kept; in streams, samples and beams nothing of it is seen."""
    options = SamplingOptions(temperature=0)
    whole = model.generate("the ", max_new_tokens=30, temperature=0)
    stop = whole[5:8]
    want = whole[: whole.index(stop)]
    answer, other = model.answers(["the ", "of and"], max_new_tokens=30, sampling=options, stop=[stop, "never there"])
    assert answer[0].text == want and answer[0].finish == "stop" and len(answer[0].tokens) < 30
    assert other[0].text == model.generate("of and", max_new_tokens=30, temperature=0, stop=[stop])
    assert "".join(model.stream("the ", max_new_tokens=30, temperature=0, stop=[stop])) == want
    best = model.best(["the "], max_new_tokens=20, beams=BeamOptions(num_beams=2))[0][0]
    cut = model.best("the ", max_new_tokens=20, beams=BeamOptions(num_beams=2), stop=best.text[2:4])[0][0]
    assert cut.text == best.text[: best.text.index(best.text[2:4])] and cut.finish == "stop" and cut.score == best.score


def test_samples_have_seeds_of_their_own(model: LanguageModel) -> None:
    """n samples differ, and each comes again by the seed that it names, alone or among others."""
    options = SamplingOptions(seed=5, top_k=50)
    found = model.answers(["the ", "of"], max_new_tokens=10, sampling=options, n=3)
    assert [[each.seed for each in answers] for answers in found] == [[5, 6, 7], [8, 9, 10]]
    assert len({each.text for answers in found for each in answers}) == 6
    for answers in found:
        for each in answers:
            assert each.seed is not None
            assert model.generate(each.prompt, max_new_tokens=10, seed=each.seed, top_k=50) == each.text


def test_scores_are_the_models(model: LanguageModel) -> None:
    """Log-probabilities of a text are those of full forwards, and those of the tokens that were drawn; a batch changes nothing."""
    made = model.answers(["the "], max_new_tokens=9, sampling=SamplingOptions(temperature=0), logprobs=True)[0][0]
    again = model.model, model.tokenizer.encode("the ").tolist()
    tokens = start_sampling(
        again[0], [again[1]], max_new_tokens=9, begin_id=256, sampling=SamplingOptions(temperature=0), logprobs=True
    ).finish()[0]
    assert made.tokens == tokens.tokens and made.logprobs == tokens.logprobs and made.logprob == pytest.approx(sum(made.logprobs))
    text = "a text of its own"
    apart, together = model.logprobs(text, prompt="the "), model.scores([text, "x", ""], prompts=["the ", "", ""])
    assert [each.logprob for each in together[0]] == pytest.approx([each.logprob for each in apart], abs=1e-5)
    assert [each.text for each in apart] == list(text) and len(together[1]) == 1 and together[2] == []
    whole = model.logprobs("the " + text)
    assert [each.logprob for each in whole[4:]] == pytest.approx([each.logprob for each in apart], abs=1e-5)
    drawn = [(token, logprob) for token, logprob in zip(made.tokens, made.logprobs) if token < 128]
    if len(drawn) == 9:
        assert [each.logprob for each in model.logprobs(made.text, prompt="the ")] == pytest.approx(made.logprobs, abs=1e-5)
    with pytest.raises(ConfigError, match=r"text 1: got '49 tokens to read', wanted at most max_position_embeddings \(48\)"):
        model.scores(["", "x" * 49])


def test_a_vocabulary_may_be_larger_than_the_tokenizers(model: LanguageModel) -> None:
    """B136: padded to a published size; what is drawn has text, by every way."""
    config = model.model.config.model_copy(update={"vocab_size": 5_000})
    wide = LanguageModel(build_model(config, ProcessGroups.single(), seed=3), model.tokenizer, 256, (256,))
    assert wide.generate("the ", max_new_tokens=20, temperature=9.0) == "".join(wide.stream("the ", max_new_tokens=20, temperature=9.0))
    (best,) = wide.best(["the "], max_new_tokens=9)[0]
    assert all(token < model.tokenizer.num_ids for token in best.tokens)
    ends = LanguageModel(wide.model, model.tokenizer, 256, (4_000,))  # an end that tokenizer.json itself does not have
    drawn = ends.answers(["the "], max_new_tokens=1, n=2_000, sampling=SamplingOptions(temperature=1e9))[0]
    assert all(token < 257 for each in drawn for token in each.tokens) and "stop" in {each.finish for each in drawn}


def test_a_text_without_a_beginning(model: LanguageModel) -> None:
    """Where nothing stands before the first token it has no log-probability."""
    bare = LanguageModel(model.model, model.tokenizer, None, (256,))
    assert [each.logprob is None for each in bare.logprobs("ab")] == [True, False] and bare.logprobs("a")[0].logprob is None


def test_generate_prints_what_python_says(run: Path, model: LanguageModel, tmp_path: Path) -> None:
    """`mlite generate` with prompts, files of both kinds, samples and beams."""
    greedy = ("--temperature", "0", "--max-tokens", "6")
    text = model.generate("the ", temperature=0, max_new_tokens=6)
    assert said("generate", str(run), "-p", "the ", *greedy) == f"the {text}\n"
    (tmp_path / "p.txt").write_text("\ufeffthe \n\nof\n")  # what stands before it is a byte order mark
    (tmp_path / "p.jsonl").write_text('\ufeff{"prompt": "the ", "id": 7}\n\n{"prompt": ""}\n{"prompt": " "}\n')
    found = lines("generate", str(run), "--file", str(tmp_path / "p.jsonl"), "--json", "--logprobs", "--batch-size", "1", *greedy)
    assert [line["prompt"] for line in found] == ["the ", "", " "] and found[0]["id"] == 7 and found[0]["text"] == text
    assert found[0]["finish"] == "length" and found[0]["step"] == 1 and found[0]["tokens"] == 6
    assert [line["seed"] for line in found] == [0, 1, 2] and len(found[0]["logprobs"]) == 6
    assert said("generate", str(run), "--file", str(tmp_path / "p.txt"), *greedy).startswith(f"the {text}\n---\nof")
    sampled = lines("generate", str(run), "-p", "the ", "-n", "2", "--json", "--seed", "3", "--max-tokens", "6", "--stop", "zzz")
    assert [(line["sample"], line["seed"]) for line in sampled] == [(0, 3), (1, 4)]
    assert sampled[1]["text"] == model.generate("the ", max_new_tokens=6, seed=4, temperature=0.8)
    searched = lines("generate", str(run), "-p", "the ", "--beams", "3", "-n", "2", "--json", "--max-tokens", "6")
    best = model.best(["the "], max_new_tokens=6, beams=BeamOptions(num_beams=3, n_best=2))[0]
    assert [line["text"] for line in searched] == [each.text for each in best] and searched[0]["score"] == best[0].score


def test_an_interactive_prompt(
    run: Path, model: LanguageModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each line is a prompt of its own, answered before the next is read; one that is too long or no text ends nothing."""
    from launcher.commands.generate import Asked, generate_text

    shown = io.StringIO()
    typed = b"\xef\xbb\xbfthe \n" + b"x" * 48 + b"\n\xff\nof\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
    monkeypatch.setattr(sys, "stdout", shown)
    generate_text(run, [], records=None, interactive=True, asked=Asked(6), sampling={"temperature": 0.0})
    wanted = [model.generate(prompt, temperature=0, max_new_tokens=6) for prompt in ("the ", "of")]
    assert shown.getvalue() == f"the {wanted[0]}\nof{wanted[1]}\n"
    too_long, no_text = capsys.readouterr().err.splitlines()
    assert "prompt 0: got '49 tokens'" in too_long and r"no text in utf-8 ('\udcff')" in no_text


def test_score_prints_what_python_says(run: Path, model: LanguageModel) -> None:
    """`mlite score` of texts and of standard input: sums, perplexity, bits per byte, and each token's."""
    (line,) = lines("score", str(run), "-t", "naïve", "--tokens", "-p", "the ")
    want = model.logprobs("naïve", prompt="the ")
    total = sum(each.logprob or 0.0 for each in want)
    assert line["logprob"] == pytest.approx(total) and line["tokens"] == 6
    assert line["bits_per_byte"] == pytest.approx(-total / 6 / 0.6931471805599453)
    assert line["perplexity"] == pytest.approx(2 ** line["bits_per_byte"]) and len(line["logprobs"]) == 6
    typed = '{"text": "of", "prompt": "the ", "n": 2}\n{"text": ""}\n{"text": " "}\n'
    result = CliRunner().invoke(app, ["score", str(run), "--file", "-"], input=typed)
    read, empty, space = map(json.loads, result.stdout.splitlines())
    assert empty == {"text": "", "tokens": 0, "logprob": 0, "step": 1} and space["tokens"] == 1
    assert read["n"] == 2 and read["logprob"] == pytest.approx(sum(each.logprob or 0.0 for each in model.logprobs("of", prompt="the ")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--beams", "2", "--top-k", "3"], "--top-k: got 3"),
        (["--length-penalty", "2"], "--length-penalty: got 2.0"),
        (["--beams", "2", "--early-stopping", "soon"], "--early-stopping: got 'soon'"),
        (["--beams", "2", "-n", "3"], r"--samples: got 3, wanted a count from 1 to that of --beams \(2\)"),
        (["-p", "a\udcffb", "--stop", "\ud800"], r"--prompt: got 'a\\udcffb', wanted text that UTF-8(.|\n)*--stop: got '\\ud800'"),
        (["parallel.tp=2"], "torchrun --nproc-per-node 2 -m launcher.cli generate .*, or use tp 1"),
        (["--logprobs"], "--logprobs: got True"),
        (["-p", "x", "-i"], "--prompt and --interactive: got 'both'"),
        (["--stop", ""], "--stop: got ''"),
        (["--min-p", "2"], "min_p: got 2"),
        (["-p", "x" * 48], r"prompt 0: got '49 tokens', wanted at most max_position_embeddings \(48\)"),
    ],
)
def test_options_that_cannot_be_are_refused(run: Path, words: list[str], message: str) -> None:
    """By name, and what can do nothing beside another option, too; nothing is printed before."""
    result = CliRunner().invoke(app, ["generate", str(run), *words])
    assert isinstance(result.exception, ConfigError) and re.search(message, str(result.exception)) and not result.stdout


def test_bad_files_are_refused(run: Path, tmp_path: Path) -> None:
    """A file that isn't there, a line that is no object, one without its text: exit code 3, with the line."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "x"}\n{"text": "y"}\n')
    with pytest.raises(DataError, match='line 2: not an object with a text under "prompt"'):
        said("generate", str(run), "--file", str(bad))
    bad.write_text('{"text": "x", "prompt": null}\n')
    with pytest.raises(DataError, match='line 1: what is under "prompt" is no text'):
        said("score", str(run), "--file", str(bad))
    bad.write_text('{"text": "half a pair: \\ud83d"}\n')
    with pytest.raises(DataError, match='line 1: not an object with a text under "text"'):
        said("score", str(run), "--file", str(bad))
    bad.write_text("x\n")
    with pytest.raises(DataError, match="line 1: no JSON"):
        said("score", str(run), "--file", str(bad))
    bad.write_bytes(b'{"text": "x"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match="line 2: no text in utf-8"):
        said("score", str(run), "--file", str(bad))
    result = CliRunner().invoke(app, ["generate", str(run), "--file", "-"], input=b"abc\n\xff\n")
    assert isinstance(result.exception, DataError) and "standard input, line 2: no text in utf-8" in str(result.exception)
    with pytest.raises(DataError, match="can't be read"):
        said("generate", str(run), "--file", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="--text: got None"):
        said("score", str(run))


def test_the_context_ends_an_answer(model: LanguageModel) -> None:
    """Prompt and answer fill the context, then the answer ends and says so; nothing slides."""
    answer = model.answers(["x" * 40], max_new_tokens=100, sampling=SamplingOptions(temperature=0))[0][0]
    assert answer.finish == "context" and len(answer.tokens) == 48 - 41 + 1
    assert torch.is_inference_mode_enabled() is False and isinstance(model.tokenizer, Encoder)


def test_what_is_no_text_and_no_count_is_refused(model: LanguageModel) -> None:
    """From Python; and a string is one prompt, one text, one stop string, never its characters."""
    assert [each[0].prompt for each in model.answers("ab", max_new_tokens=1)] == ["ab"] and len(model.scores("ab")) == 1
    with pytest.raises(ConfigError, match=r"prompt 1: got '\\ud800', wanted text that UTF-8 can spell"):
        model.answers(["a", "\ud800"])
    with pytest.raises(ConfigError, match=r"prompt: got '\\ud800'"):
        next(model.stream("\ud800"))
    with pytest.raises(ConfigError, match="text 0: got 3, wanted text"):
        model.scores([3])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="prompts: got '2 prompts', wanted one for each of the 1 texts"):
        model.scores(["a"], prompts=["x", "y"])
    for stop in ("", ["a", ""], ["\udcff"], [3]):
        with pytest.raises(ConfigError, match="stop: got"):
            model.best("a", stop=stop)  # type: ignore[arg-type]
    for name, value in {"n": 0, "max_new_tokens": 2.5}.items():
        with pytest.raises(ConfigError, match=f"{name}: got {value}, wanted a count from"):
            model.answers(["a"], **{name: value})  # type: ignore[arg-type]


def test_output_is_never_lost_to_an_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a terminal can't spell is spelled out, and JSON stays the same JSON."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    escape_unprintable()
    print('"naïve 🙂 \ud83d"', flush=True)
    assert written.getvalue() == b'"na\\u00efve \\ud83d\\ude42 \\ud83d"\n'
