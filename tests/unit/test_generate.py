"""If this fails, generated text is not what the model would say."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from data_pipeline.errors import ConfigError
from megatron_lite.inference import rows as reading
from megatron_lite.inference.beam import BeamOptions
from megatron_lite.inference.generate import generate_beams, start_sampling
from megatron_lite.inference.kv_cache import KVCache
from megatron_lite.inference.rows import last_logits
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.layers import matmul
from megatron_lite.layers.kernels import AttentionMask, attention
from megatron_lite.model_config import ModelConfig
from megatron_lite.models.batch import Batch
from megatron_lite.models.build import build_model, ready_to_decode
from megatron_lite.models.decoder import Decoder
from megatron_lite.parallel.groups import ProcessGroups

VOCABULARY = 61
GREEDY = SamplingOptions(temperature=0)
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}


def tiny(*, context: int = 64, **changes: object) -> ModelConfig:
    """A model whose weights are large enough that its logits differ clearly."""
    known = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": context, "init": {"std": 0.15}, **changes}
    return ModelConfig.model_validate(known)


@pytest.fixture(scope="module")
def model() -> Decoder:
    return build_model(tiny(), ProcessGroups.single(), seed=3)


def _prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed + 100 * length)).tolist()


def _batch(ids: Tensor, first: int = 0) -> Batch:
    positions = torch.arange(first, first + ids.shape[1]).expand_as(ids)
    return Batch(ids, torch.full_like(ids, -100), positions, None, torch.zeros(len(ids), dtype=torch.int64))


def _by_full_forwards(model: Decoder, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy decoding without a cache, without a batch."""
    text = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            text.append(int(model.logits(_batch(torch.tensor([text])))[0, -1].argmax()))
    return text[len(prompt) :]


def test_cached_decoding_is_the_full_forward(model: Decoder) -> None:
    """Invariant 6: logits with a cache, whatever the sizes of the parts, equal those of one forward over all."""
    ids = torch.tensor([_prompt(24), _prompt(24, 1)])
    with torch.no_grad():
        whole = model.logits(_batch(ids))
        cache = KVCache(24)
        parts = []
        for first, last in ((0, 5), (5, 6), (6, 7), (7, 15), (15, 17), (17, 24)):
            parts.append(model.logits(_batch(ids[:, first:last], first), store=cache))
    assert torch.allclose(torch.cat(parts, dim=1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["decoder", "seq2seq"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_laid_out_for_decoding_is_the_same_model(family: str, tied: bool) -> None:
    config = tiny(family=family, tie_word_embeddings=tied, attention={"qkv_bias": True, "o_bias": True})
    plain, laid = (build_model(config, ProcessGroups.single(), seed=3) for _ in range(2))
    assert ready_to_decode(laid) is laid and not laid.training
    if matmul._onednn is not None:
        assert laid.lm_head.weight.t().is_contiguous()
    assert (laid.embedding.weight is laid.lm_head.weight) == tied
    for mine, theirs in zip(laid.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    begin = 2 if family == "seq2seq" else None
    prompts = [_prompt(5), _prompt(11)]
    first, second = (
        start_sampling(model, prompts, max_new_tokens=9, sampling=GREEDY, begin_id=begin, logprobs=True).finish() for model in (plain, laid)
    )
    for one, other in zip(first, second, strict=True):
        assert one.tokens == other.tokens and one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_queries_are_the_last_of_the_keys() -> None:
    """B047: with fewer queries than keys the triangle is aligned to the end."""
    values = torch.arange(1.0, 6.0).view(1, 1, 5, 1)
    keys = torch.zeros(1, 1, 5, 1)
    positions = torch.arange(5)[None]
    for masks in ((AttentionMask(), AttentionMask()), tuple(AttentionMask.of_positions(positions[:, 5 - n :], positions) for n in (1, 2))):
        one = attention(torch.ones(1, 1, 1, 1), keys, values, mask=masks[0])
        two = attention(torch.ones(1, 1, 2, 1), keys, values, mask=masks[1])
        assert one.flatten().tolist() == pytest.approx([3.0])
        assert two.flatten().tolist() == pytest.approx([2.5, 3.0])


def test_nan_in_padding_and_free_room(model: Decoder) -> None:
    """B049: NaN in padded places and in the cache's free room reaches no output."""

    class Poisoned(KVCache):
        def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            if self._padding is not None:
                keys, values = (each.masked_fill(self._padding, float("nan")) for each in (keys, values))
            fresh = layer not in self._layers
            found = super().extend(layer, keys, values)
            if fresh:
                for whole in self._layers[layer]:
                    whole[:, :, self.length :] = float("nan")
            return found

    ids = torch.tensor([[0, 0, *_prompt(3)], _prompt(5)])
    positions = torch.tensor([[-2, -1, 0, 1, 2], [0, 1, 2, 3, 4]])
    outputs = []
    with torch.no_grad():
        for store in (KVCache(8), Poisoned(8)):
            logits = last_logits(model, ids, positions, store)
            for step in range(3):
                logits = last_logits(model, logits.argmax(-1, keepdim=True), positions[:, -1:] + 1 + step, store)
            outputs.append(logits)
    assert torch.isfinite(outputs[1]).all() and torch.equal(*outputs)


def test_prompts_of_unequal_lengths(model: Decoder) -> None:
    """B134: a row of a batch says what it says alone, and what full forwards say; whatever the other rows are."""
    prompts = [_prompt(3), _prompt(9), _prompt(1), _prompt(17)]
    together = start_sampling(model, prompts, max_new_tokens=8, sampling=GREEDY).finish()
    for prompt, answer in zip(prompts, together):
        assert (
            answer.tokens
            == start_sampling(model, [prompt], max_new_tokens=8, sampling=GREEDY).finish()[0].tokens
            == _by_full_forwards(model, prompt, 8)
        )
        assert answer.finish == "length"


def test_long_prompts_in_parts(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt goes through the model in parts, with rows that start in any of them."""
    prompts = [_prompt(30), _prompt(2), _prompt(13)]
    want = start_sampling(model, prompts, max_new_tokens=5, sampling=GREEDY).finish()
    for size in (1, 4, 7):
        monkeypatch.setattr(reading, "PREFILL_TOKENS", size)
        assert start_sampling(model, prompts, max_new_tokens=5, sampling=GREEDY).finish() == want


def test_samples_depend_on_their_seed_alone(model: Decoder) -> None:
    """A row's sample is a function of prompt, options and seed: not of its place, its neighbours or what was drawn before."""
    options = [SamplingOptions(seed=seed, temperature=0.8, top_k=20) for seed in (1, 2, 1)]
    prompts = [_prompt(4), _prompt(4), _prompt(11)]
    first = start_sampling(model, prompts, max_new_tokens=12, sampling=options).finish()
    assert start_sampling(model, prompts, max_new_tokens=12, sampling=options).finish() == first
    assert start_sampling(model, prompts[::-1], max_new_tokens=12, sampling=options[::-1]).finish() == first[::-1]
    assert start_sampling(model, prompts[:1], max_new_tokens=12, sampling=options[0]).finish() == first[:1]
    assert first[0].tokens != first[1].tokens
    mixed = start_sampling(model, prompts[:2], max_new_tokens=12, sampling=[GREEDY, options[1]]).finish()
    assert mixed[0].tokens == _by_full_forwards(model, prompts[0], 12) and mixed[1] == first[1]


def test_stop_tokens(model: Decoder) -> None:
    """A row ends before its stop token; the others go on as if nothing had happened."""
    prompts = [_prompt(3), _prompt(9)]
    free = start_sampling(model, prompts, max_new_tokens=10, sampling=GREEDY).finish()
    stop = free[0].tokens[4]
    at = free[0].tokens.index(stop)
    heard: list[tuple[int, int]] = []
    answers = start_sampling(
        model, prompts, max_new_tokens=10, sampling=GREEDY, stop_ids=[stop], on_token=lambda row, token: heard.append((row, token))
    ).finish()
    assert answers[0].tokens == free[0].tokens[:at] and answers[0].finish == "stop"
    other = free[1].tokens
    assert answers[1].tokens == (other[: other.index(stop)] if stop in other else other)
    assert [[token for row, token in heard if row == each] for each in (0, 1)] == [answer.tokens for answer in answers]


@pytest.mark.parametrize("length", [5, 7, 8])
def test_the_context_ends(length: int) -> None:
    """B133: up to and at the last position the cache agrees with full forwards; then the row stops and says why."""
    model = build_model(tiny(context=8), ProcessGroups.single(), seed=3)
    answer, short = start_sampling(model, [_prompt(length), _prompt(2)], max_new_tokens=6, sampling=GREEDY).finish()
    count = 8 - length + 1  # the last position still predicts one token
    assert answer.tokens == _by_full_forwards(model, _prompt(length), count) and answer.finish == "context"
    assert short.tokens == _by_full_forwards(model, _prompt(2), 6) and short.finish == "length"
    with pytest.raises(ConfigError, match=r"prompt 0: got '9 tokens', wanted at most max_position_embeddings \(8\)"):
        start_sampling(model, [_prompt(9)], max_new_tokens=1).finish()


def test_the_begin_token(model: Decoder) -> None:
    """The token that stood before every document in training stands before every prompt; an empty prompt then is legal."""
    begun = start_sampling(model, [[], _prompt(4)], max_new_tokens=4, sampling=GREEDY, begin_id=7).finish()
    assert begun == start_sampling(model, [[7], [7, *_prompt(4)]], max_new_tokens=4, sampling=GREEDY).finish()


def test_bad_prompts_are_refused(model: Decoder) -> None:
    """Every bad prompt is named at once."""
    with pytest.raises(ConfigError, match=r"prompt 0: got 'no tokens'(.|\n)*prompt 2: got 61, wanted ids from 0 to 60"):
        start_sampling(model, [[], [1], [5, 61]], max_new_tokens=1).finish()
    assert [answer.tokens for answer in start_sampling(model, [[1], [2]], max_new_tokens=0).finish()] == [[], []]
    assert start_sampling(model, [], max_new_tokens=3).finish() == []


def test_bf16(model: Decoder) -> None:
    """A model in bf16 decodes: its cache has its dtype, its logits are fp32."""
    half = build_model(tiny(), ProcessGroups.single(), seed=3, dtype=torch.bfloat16)
    assert len(start_sampling(half, [_prompt(3), _prompt(8)], max_new_tokens=5).finish()[0].tokens) == 5


def test_penalties_do_not_see_padding() -> None:
    """B135: with a repetition penalty, an end-of-document id that also begins each text and stands for padding, a short row ends
    as soon in a batch as alone: neither padding nor the begin token is part of what was said."""
    model = build_model(tiny(), ProcessGroups.single(), seed=3)
    for end, lengths in {0: [10, 10, 10], 20: [6, 8, 1], 26: [7, 10, 6], 49: [8, 3, 5]}.items():
        known = {"max_new_tokens": 10, "begin_id": end, "stop_ids": [end]}
        options = SamplingOptions(temperature=0, repetition_penalty=1.5, frequency_penalty=0.3)
        prompts = [_prompt(2), _prompt(14), _prompt(5)]
        together = start_sampling(model, prompts, sampling=options, **known).finish()  # type: ignore[arg-type]
        for prompt, answer in zip(prompts, together):
            assert answer == start_sampling(model, [prompt], sampling=options, **known).finish()[0]  # type: ignore[arg-type]
            assert answer.tokens == _by_hand(model, [end, *prompt], options, end)
        assert [len(answer.tokens) for answer in together] == lengths  # rows leave the batch at different times


def _by_hand(model: Decoder, text: list[int], options: SamplingOptions, end: int) -> list[int]:
    """Greedy with both penalties, from full forwards and the formulas."""
    said: list[int] = []
    while len(said) < 10:
        with torch.no_grad():
            logits = model.logits(_batch(torch.tensor([text + said])))[0, -1]
        for token in {*text[1:], *said}:
            logits[token] = logits[token] / 1.5 if logits[token] > 0 else logits[token] * 1.5
        for token in said:
            logits[token] -= options.frequency_penalty
        token = int(logits.argmax())
        if token == end:
            break
        said.append(token)
    return said


def test_logprobs_are_the_models(model: Decoder) -> None:
    """Log-probabilities of what was drawn are those of a full forward, before temperature, filters and penalties."""
    prompts = [_prompt(3), _prompt(9)]
    options = SamplingOptions(temperature=0.7, top_k=9, presence_penalty=0.5, seed=1)
    for prompt, answer in zip(prompts, start_sampling(model, prompts, max_new_tokens=7, sampling=options, logprobs=True).finish()):
        with torch.no_grad():
            known = model.logits(_batch(torch.tensor([prompt + answer.tokens])))[0].double().log_softmax(-1)
        want = [float(known[len(prompt) - 1 + place, token]) for place, token in enumerate(answer.tokens)]
        assert answer.logprobs == pytest.approx(want, abs=1e-5)


def test_a_stop_tokens_logprob_is_told(model: Decoder) -> None:
    """Of a row that ended with one; it is none of the answer's tokens."""
    free = start_sampling(model, [_prompt(3)], max_new_tokens=5, sampling=GREEDY, logprobs=True).finish()[0]
    at = free.tokens.index(free.tokens[4])
    asked = {"max_new_tokens": 5, "sampling": GREEDY, "stop_ids": [free.tokens[4]]}
    ended = start_sampling(model, [_prompt(3)], logprobs=True, **asked).finish()[0]  # type: ignore[arg-type]
    assert (ended.finish, ended.end_logprob) == ("stop", free.logprobs[at]) and ended.logprobs == free.logprobs[:at]
    assert free.end_logprob is None
    assert start_sampling(model, [_prompt(3)], **asked).finish()[0].end_logprob is None  # type: ignore[arg-type]


def test_ids_without_text_are_never_chosen(model: Decoder) -> None:
    """B136: a published vocabulary is padded far beyond its tokenizer's; logprobs stay the model's."""
    hot, prompts = SamplingOptions(temperature=5.0, repetition_penalty=2.0), [_prompt(4), _prompt(9)]
    asked = {"max_new_tokens": 12, "num_ids": 9}
    drawn = start_sampling(model, prompts, sampling=hot, logprobs=True, **asked).finish()  # type: ignore[arg-type]
    greedy = start_sampling(model, prompts, sampling=GREEDY, **asked).finish()  # type: ignore[arg-type]
    beams = generate_beams(model, prompts, beams=BeamOptions(num_beams=3, n_best=3), **asked)  # type: ignore[arg-type]
    for answers in (drawn, greedy, *beams):
        assert max(token for answer in answers for token in answer.tokens) <= 8
    for prompt, answer in zip(prompts, greedy):
        with torch.no_grad():
            logits = model.logits(_batch(torch.tensor([prompt + answer.tokens])))[0, len(prompt) - 1 : -1]
        assert answer.tokens == logits[:, :9].argmax(dim=-1).tolist()
    with torch.no_grad():
        known = model.logits(_batch(torch.tensor([prompts[0]])))[0, -1].double().log_softmax(-1)
    assert drawn[0].logprobs[0] == pytest.approx(float(known[drawn[0].tokens[0]]), abs=1e-5)
    assert beams[0][0].logprob < 0 and len(start_sampling(model, prompts, max_new_tokens=1, num_ids=500).finish()) == 2


def test_penalties_do_not_see_a_source() -> None:
    """An encoder-decoder's answer may begin with a token of its source, whatever the repetition penalty."""
    small = tiny(family="seq2seq", num_hidden_layers=1)
    both = build_model(small, ProcessGroups.single(), seed=3)
    greedy = start_sampling(both, [_prompt(6)], max_new_tokens=1, begin_id=0, sampling=GREEDY).finish()[0].tokens
    source = [*_prompt(6), *greedy]
    options = SamplingOptions(temperature=0, repetition_penalty=1000.0)
    for text in (source, list(range(VOCABULARY - 1))):
        plain = start_sampling(both, [text], max_new_tokens=1, begin_id=0, sampling=GREEDY).finish()
        assert start_sampling(both, [text], max_new_tokens=1, begin_id=0, sampling=options).finish() == plain
