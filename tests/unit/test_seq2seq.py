"""If this fails, the encoder-decoder is not the model that the maths describes, or reads sentences that aren't its pair's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from data_pipeline.errors import ConfigError
from megatron_lite.inference.beam import BeamOptions
from megatron_lite.inference.generate import generate_beams, start_sampling
from megatron_lite.inference.kv_cache import KVCache
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.inference.score import score
from megatron_lite.inference.text import LanguageModel
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch, DropoutKey, Source
from megatron_lite.models.build import build_model
from megatron_lite.models.decoder import ForwardOptions
from megatron_lite.models.seq2seq import Seq2Seq
from megatron_lite.parallel.groups import ProcessGroups
from megatron_lite.sizes import num_parameters
from tests import reference
from tests.logical import assemble, assert_recomputing_changes_nothing, blocks_of, gradient
from tests.tiny_model import TINY
from tests.variations import GEMMA2, VASWANI

PAIRS: dict[str, Any] = {**TINY, "family": "seq2seq"}
VARIANTS: list[dict[str, Any]] = [
    {"tie_word_embeddings": True},  # one matrix for source, target and output
    {"encoder": {"num_hidden_layers": 1, "share_embedding": False}, "tie_word_embeddings": True, "num_key_value_heads": 1},
    {"encoder": {"share_embedding": False}, "position": {"type": "learned"}},
    {"position": {"type": "t5", "relative_attention_num_buckets": 8, "relative_attention_max_distance": 9}, "attention": {"scale": 1.0}},
    {
        "position": {"type": "alibi"},
        "attention": {"scale": "head_temperature", "qk_norm": "layer_norm", "sinks": True, "qkv_bias": True, "o_bias": True},
    },
    {"attention": {"scale": "cosine", "logit_softcapping": 3.0}},
    VASWANI
    | {"position": {"type": "sinusoidal"}, "init": {"scheme": "xavier_uniform"}, "embedding_multiplier": "sqrt_hidden_size"}
    | {"tie_word_embeddings": True},
    GEMMA2
    | {
        "init": {"std": 0.2},
        "residual": {"step_size": "inverse_sqrt_layers", "learned_step_size": "branch"},
        "encoder": {"num_hidden_layers": 1},
    },
]
TARGET_STARTS = [[0, 5, 13], [0, 9]]  # row 0: two pairs and padding on both sides; row 1: one pair, padding in the targets alone
SOURCE_STARTS = [[0, 4, 11], [0]]


def build(**extra: Any) -> Seq2Seq:
    options = ForwardOptions(extra.pop("checkpointing", "none"))
    model = build_model(ModelConfig(**PAIRS | extra), ProcessGroups.single(), seed=1, options=options)
    assert isinstance(model, Seq2Seq)
    return model


def rows(seed: int = 0) -> list[reference.Row]:
    draw = np.random.default_rng(seed)
    inputs, targets, source = draw.integers(0, 64, (2, 16)), draw.integers(0, 64, (2, 16)), draw.integers(0, 64, (2, 12))
    targets[0, 13:] = targets[1, 9:] = -100
    return [reference.Row(inputs[i], targets[i], TARGET_STARTS[i], 3 + i, source[i], SOURCE_STARTS[i]) for i in range(2)]


def batch_of(rows: list[reference.Row]) -> Batch:
    batch = Batch.from_rows(
        np.stack([row.inputs for row in rows]),
        np.stack([row.targets for row in rows]),
        [row.segment_starts for row in rows],
        [row.sample for row in rows],
        document_mask=True,
    )
    return batch.with_source(np.stack([row.source for row in rows if row.source is not None]), [row.source_starts for row in rows])


@pytest.mark.parametrize(
    ("extra", "dropout"),
    zip(VARIANTS, [0.0, *[0.2] * 7]),
    ids=["one", "two", "three, learned", "t5", "alibi", "cosine", "2017", "sandwich, learned steps"],
)
def test_equals_the_plain_model(extra: dict[str, Any], dropout: float) -> None:
    """Loss, logits and every logical gradient, dropout included; and the number of parameters."""
    model = build(hidden_dropout=dropout, attention_dropout=dropout, **extra)
    assert sum(weight.numel() for weight in model.parameters()) == num_parameters(model.config)
    loss, count = model(batch_of(rows()), DropoutKey(9, 5))
    loss.backward()
    weights = {name: tensor.requires_grad_() for name, tensor in assemble([blocks_of(model)]).items()}
    plain = sum(reference.row_loss(weights, model.config, row, step=reference.Step(9, 5)) for row in rows())
    assert int(count) == 22
    assert abs(loss.item() - plain.item()) < 1e-4
    expected = dict(zip(weights, torch.autograd.grad(plain, list(weights.values()))))
    for name, mine in assemble([blocks_of(model, gradient)]).items():
        assert (mine - expected[name]).norm() <= 1e-5 * expected[name].norm(), name


def test_recomputing_changes_nothing() -> None:
    """Loss and gradients are bit-equal, dropout included; the encoder's come through the layers that are computed again."""
    assert_recomputing_changes_nothing(
        lambda checkpointing: build(checkpointing=checkpointing, hidden_dropout=0.2, attention_dropout=0.2), batch_of(rows())
    )


def test_a_pair_sees_itself_alone() -> None:
    """B029 for pairs: another source or target in the row changes nothing, and the source's last word reaches the first target."""
    model, before = build(), rows()
    after = rows()
    assert after[0].source is not None
    after[0].source[:4] += 1
    after[0].source[:4] %= 64
    after[0].inputs[:5] = (after[0].inputs[:5] + 1) % 64
    one, other = model.logits(batch_of(before)), model.logits(batch_of(after))
    assert torch.equal(one[0, 5:13], other[0, 5:13]) and torch.equal(one[1], other[1])
    assert not torch.equal(one[0, :5], other[0, :5])
    changed = rows()
    assert changed[0].source is not None
    changed[0].source[10] = (changed[0].source[10] + 1) % 64  # the last word of the second pair's source
    assert not torch.equal(model.logits(batch_of(changed))[0, 5], one[0, 5])


def test_a_source_s_padding_is_not_seen() -> None:
    """B058: a source of 5 tokens alone, and in a row of 9 before any ids: the same logits, and no gradient for what stands there."""
    model = build(encoder={"share_embedding": False})
    source, targets = [3, 1, 4, 1, 5], np.arange(6)[None]

    def of(padding: list[int]) -> Batch:
        batch = Batch.from_rows(targets, targets, [[0]], [0], document_mask=True)
        return batch.with_source(np.array([source + padding]), [[0, 5] if padding else [0]])

    alone = model.logits(of([]))
    for padding in ([40] * 4, [50, 51, 52, 53]):
        torch.testing.assert_close(model.logits(of(padding)), alone, atol=1e-5, rtol=0)
    model(of([50, 51, 52, 53]))[0].backward()
    assert model.encoder.embedding is not None and model.encoder.embedding.weight.grad is not None
    by_id = model.encoder.embedding.weight.grad.norm(dim=1)
    assert bool((by_id[[1, 3, 4, 5]] > 0).all()) and float(by_id[50:54].max()) == 0.0


@pytest.mark.parametrize("extra", VARIANTS[2:])
def test_cached_decoding_is_the_full_forward(extra: dict[str, Any]) -> None:
    """Token by token after sources of unequal lengths, keys and values of the source made once: the same logits; rows reordered, too."""
    model = build(**extra | {"encoder": {"num_hidden_layers": 1}})
    draw = np.random.default_rng(3)
    lengths, num_targets = [7, 3, 5], 6
    sources, targets = [draw.integers(0, 64, size) for size in lengths], torch.from_numpy(draw.integers(0, 64, (3, num_targets)))
    cache = KVCache(num_targets, memory=model.encode(Source.of(sources)))
    stepped = []
    for place in range(num_targets):
        if place == 3:
            rows = torch.tensor([2, 0, 1])
            cache.reorder(rows)
            targets, sources = targets[rows], [sources[row] for row in rows]
            stepped = [logits[rows] for logits in stepped]
        ids, positions = targets[:, place : place + 1], torch.full((3, 1), place)
        nothing = torch.full_like(ids, -100)
        stepped.append(model.logits(Batch(ids, nothing, positions, None, torch.zeros(3, dtype=torch.int64)), store=cache)[:, 0])
    for row, source in enumerate(sources):
        alone = Batch.from_rows(targets[row : row + 1].numpy(), targets[row : row + 1].numpy(), [[0]], [0], document_mask=True)
        whole = model.logits(alone.with_source(source[None], [[0]]))[0]
        torch.testing.assert_close(torch.stack(stepped, 1)[row], whole, atol=1e-5, rtol=0)


def test_the_loss_is_of_the_targets_as_they_stand() -> None:
    """B062: a target is predicted at the place of the input before it; nothing is shifted again."""
    model = build()
    batch = batch_of(rows())
    logits = model.logits(batch)
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
    assert abs(model(batch)[0].item() - wanted.item()) < 1e-3
    fewer = replace(batch, targets=batch.targets.where(batch.targets < 32, -100))
    assert int(model(fewer)[1]) == int((fewer.targets >= 0).sum())


def test_sources_of_unequal_lengths_are_translated_as_if_alone() -> None:
    """B130: greedy and beam search, in a batch, of equal sources too, give what each source gives by itself; scores are the model's."""
    model = build(init={"std": 0.3})
    draw = np.random.default_rng(5)
    sources = [draw.integers(1, 64, size).tolist() for size in (6, 2, 9)]
    sources.append(sources[0])
    options: dict[str, Any] = {"max_new_tokens": 6, "begin_id": 0, "stop_ids": [7]}
    together = generate_beams(model, sources, beams=BeamOptions(num_beams=3, n_best=2), **options)
    greedy = start_sampling(model, sources, sampling=SamplingOptions(temperature=0.0), **options).finish()
    texts = [[*each[0].tokens, *([7] if each[0].finish == "stop" else [])] for each in together]
    scores = score(model, sources, texts, begin_id=0)  # together, too
    for number, source in enumerate(sources):
        alone = generate_beams(model, [source], beams=BeamOptions(num_beams=3, n_best=2), **options)[0]
        assert [each.tokens for each in alone] == [each.tokens for each in together[number]]
        assert (
            start_sampling(model, [source], sampling=SamplingOptions(temperature=0.0), **options).finish()[0].tokens
            == greedy[number].tokens
        )
        known = score(model, [source], texts[number : number + 1], begin_id=0)[0]
        assert abs(sum(known) - together[number][0].logprob) < 1e-4  # type: ignore[arg-type]
        assert scores[number] == pytest.approx(known, abs=1e-5)


class _Letters:
    """Ids 0.. as single characters."""

    num_ids = 64

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 48 for letter in text]

    def decode(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> str:
        return "".join(chr(48 + token) for token in ids)

    def texts(self, ids: Sequence[int], *, after: Sequence[int] = ()) -> list[str]:
        return [self.decode([token]) for token in ids]

    def stream(self, *, after: Sequence[int] = ()) -> Any:
        return SimpleNamespace(feed=lambda token: self.decode([token]), finish=lambda: "")


def test_an_answer_scored_again_has_the_same_probability() -> None:
    """The end of a target counts, in the text's score as in the beam's and in evaluation; an empty text is its end alone."""
    translator = LanguageModel(build(init={"std": 0.3}), _Letters(), 0, (42,))
    found = translator.best(["?A", "Q", "7c", "be"], max_new_tokens=9, beams=BeamOptions(num_beams=3))
    ended = [each[0] for each in found if each[0].finish == "stop"]
    assert ended
    for best in ended:
        (known,) = translator.scores([best.text], prompts=[best.prompt])
        assert known[-1].token == 42 and sum(each.logprob or 0.0 for each in known) == pytest.approx(best.logprob, abs=1e-5)
    assert [each.token for each in translator.logprobs("", prompt="Q")] == [42]
    with pytest.raises(ConfigError, match=r"prompt 1: got ' ', wanted a source"):
        translator.scores(["a", "b"], prompts=["Q", " "])
    greedy = SamplingOptions(temperature=0)
    drawn = [each for (each,) in translator.answers(["?A", "Q", "7c", "be"], max_new_tokens=9, sampling=greedy, logprobs=True)]
    ended_alike = [each for each in drawn if each.finish == "stop"]
    assert ended_alike
    for each in ended_alike:  # a sample's, a beam's and a score's are one number
        (beam,) = translator.best([each.prompt], max_new_tokens=9, beams=BeamOptions(num_beams=1))[0]
        assert (beam.tokens, beam.logprob) == (each.tokens, pytest.approx(each.logprob, abs=1e-5))
        assert sum(token.logprob or 0.0 for token in translator.logprobs(each.text, prompt=each.prompt)) == pytest.approx(
            beam.logprob, abs=1e-5
        )


def test_an_answer_needs_a_source_and_a_beginning() -> None:
    """Sources that are empty or too long, and ids that don't exist, are named, alike where answers are made and where they are scored."""
    model = build()
    wrong = r"begin_id: got 64, wanted ids from 0 to 63(.|\n)*prompt 1: got 'no tokens'(.|\n)*end-of-document"
    wrong += r"(.|\n)*prompt 2: got '17 tokens', wanted at most max_position_embeddings \(16\)(.|\n)*prompt 3: got -1, wanted ids"
    sources = [[1], [], [3] * 17, [-1]]
    with pytest.raises(ConfigError, match=wrong):
        start_sampling(model, sources, max_new_tokens=2, begin_id=64).finish()
    with pytest.raises(ConfigError, match=wrong):
        score(model, sources, [[2]] * 4, begin_id=64)
    with pytest.raises(ConfigError, match="begin_id: got None"):
        start_sampling(model, [[1]], max_new_tokens=2).finish()
    assert len(score(model, [[3] * 16], [[2] * 16], begin_id=0)[0]) == 16
