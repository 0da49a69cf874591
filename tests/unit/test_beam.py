"""If these fail, beam search returns other hypotheses, or other scores, than the best that it should have found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data_pipeline.errors import ConfigError
from megatron_lite.inference.beam import BeamOptions, Hypothesis, Limit, beam_search
from megatron_lite.inference.generate import generate_beams, start_sampling
from megatron_lite.inference.kv_cache import KVCache
from megatron_lite.inference.sampling import SamplingOptions
from tests.huggingface_cases import MODELS, checkpoint, export, trained

Next = Callable[[tuple[int, ...]], Tensor]  # logits [V] after a text


class Said:
    """Rows whose next logits are a function of what was said: no model, no cache."""

    def __init__(self, after: Next, prompts: Sequence[Sequence[int]]) -> None:
        self.after, self.texts = after, [tuple(prompt) for prompt in prompts]

    @property
    def logits(self) -> Tensor:
        return torch.stack([self.after(text) for text in self.texts])

    def step(self, tokens: Tensor) -> Tensor:
        self.texts = [(*text, int(token)) for text, token in zip(self.texts, tokens, strict=True)]
        return self.logits

    def reorder(self, rows: Tensor) -> None:
        self.texts = [self.texts[int(row)] for row in rows]

    def agreed(self, choice: Tensor) -> Tensor:
        return choice


def search(after: Next, prompts: Sequence[Sequence[int]], *, limit: int, stop: Sequence[int], **options: Any) -> list[list[Hypothesis]]:
    rows = Said(after, prompts)
    limits = [Limit(limit, "length")] * len(prompts)
    return beam_search(rows, rows.logits, limits=limits, options=BeamOptions(**options), stop_ids=stop)


def by_chance(vocabulary: int, sharpness: float = 1.5) -> Next:
    def after(text: tuple[int, ...]) -> Tensor:
        seed = int.from_bytes(bytes(each % 256 for each in text), "little") % (2**63)
        return sharpness * torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed))

    return after


def logprob(after: Next, prompt: Sequence[int], answer: Sequence[int]) -> float:
    text, total = tuple(prompt), 0.0
    for token in answer:
        total += float(after(text).double().log_softmax(-1)[token])
        text = (*text, token)
    return total


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5, 2.0])
def test_brute_force(length_penalty: float) -> None:
    """Invariant 6: over a vocabulary of 6, with room for every hypothesis, the best are those of trying all of them."""
    after, stop, limit, prompt = by_chance(6), 5, 4, (3, 1)
    scored = []
    for length in range(1, limit + 1):
        for answer in itertools.product(range(6), repeat=length):
            if stop not in answer[:-1] and (answer[-1] == stop or length == limit):
                total = logprob(after, prompt, answer)
                scored.append((total / length**length_penalty, [token for token in answer if token != stop], total))
    scored.sort(key=lambda each: -each[0])
    found = search(
        after, [prompt], limit=limit, stop=[stop], num_beams=6**limit, n_best=20, length_penalty=length_penalty, early_stopping="never"
    )[0]
    assert [each.tokens for each in found] == [tokens for _, tokens, _ in scored[:20]]
    assert [each.score for each in found] == pytest.approx([score for score, _, _ in scored[:20]], abs=1e-6)
    assert [each.logprob for each in found] == pytest.approx([total for _, _, total in scored[:20]], abs=1e-6)
    assert {each.finish for each in found} == {"stop", "length"}


def test_one_beam_is_greedy() -> None:
    """A search of width 1 takes the most probable token each time."""
    after = by_chance(20)
    text: tuple[int, ...] = (4,)
    for _ in range(8):
        text = (*text, int(after(text).argmax()))
    assert search(after, [(4,)], limit=8, stop=[], num_beams=1)[0][0].tokens == list(text[1:])


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_a_stop_ends_a_hypothesis(early_stopping: bool | str) -> None:
    """B131: with the stop token best at the second step and second best elsewhere, each hypothesis ends at its first, none is
    lost or changed later, and scores are those of the tokens."""

    def after(text: tuple[int, ...]) -> Tensor:
        logits = by_chance(12)(text)
        logits[7] = float(logits.max()) + (1.0 if len(text) == 2 else -0.1)
        return logits

    found = search(after, [(1,)], limit=6, stop=[7], num_beams=3, n_best=3, early_stopping=early_stopping)[0]
    assert len(found) == 3 and [each.score for each in found] == sorted((each.score for each in found), reverse=True)
    for each in found:
        said = [*each.tokens, *([7] if each.finish == "stop" else [])]
        assert 7 not in each.tokens and math.isfinite(each.score)
        assert each.logprob == pytest.approx(logprob(after, (1,), said), abs=1e-6)
        assert each.score == pytest.approx(each.logprob / len(said), abs=1e-9)
    assert found[0].finish == "stop"


def test_rows_do_not_see_each_other() -> None:
    """B130: four prompts of different lengths, alone and together, with limits of their own: the same hypotheses and scores."""
    from megatron_lite.models.build import build_model
    from megatron_lite.parallel.groups import ProcessGroups

    config = MODELS["gqa"].model_copy(update={"init": MODELS["gqa"].init.model_copy(update={"std": 0.15})})
    model = build_model(config, ProcessGroups.single(), seed=3, dtype=torch.float64)
    prompts = [[5], [8, 2, 60, 4], list(range(25)), [3, 9]]
    for early_stopping in (False, True):
        known = {"max_new_tokens": 10, "stop_ids": [11, 12], "begin_id": 1}
        beams = BeamOptions(num_beams=3, n_best=3, early_stopping=early_stopping)
        together = generate_beams(model, prompts, beams=beams, **known)  # type: ignore[arg-type]
        for prompt, answers in zip(prompts, together):
            alone = generate_beams(model, [prompt], beams=beams, **known)[0]  # type: ignore[arg-type]
            assert [each.tokens for each in answers] == [each.tokens for each in alone]
            assert [each.score for each in answers] == pytest.approx([each.score for each in alone], abs=1e-5)
        assert {each.finish for each in together[2]} <= {"context", "stop"} and len(together[2][0].tokens) <= 7


@pytest.mark.parametrize(
    ("num_beams", "length_penalty", "early_stopping", "stop_ids"),
    [
        (4, 1.0, False, range(8, 16)),
        (3, 0.6, True, [11, 40]),
        (5, 2.0, "never", [11]),
        (4, -1.0, False, [40]),
        (2, 0.0, "never", [11, 12, 13]),
        (3, -0.7, "never", [11]),
    ],
)
def test_transformers_finds_the_same(
    tmp_path_factory: pytest.TempPathFactory, num_beams: int, length_penalty: float, early_stopping: Any, stop_ids: Sequence[int]
) -> None:
    """On the same weights in float64, 20 random prompts of unequal lengths for each of six ways to search: the same hypotheses
    in the same order, as many as there are beams, and the same scores."""
    ours, theirs = _both(tmp_path_factory)
    generator = torch.Generator().manual_seed(num_beams)
    lengths = torch.randint(1, 12, (20,), generator=generator).tolist()
    prompts = [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]
    beams = BeamOptions(num_beams, length_penalty, early_stopping, n_best=num_beams)
    found = generate_beams(ours, prompts, max_new_tokens=12, beams=beams, stop_ids=stop_ids)
    longest = max(lengths)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - length) + [1] * length for length in lengths])
    options = {
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "num_return_sequences": num_beams,
    }
    made = theirs.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=list(stop_ids),
        pad_token_id=stop_ids[0],
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    said = made.sequences[:, longest:].view(20, num_beams, -1).tolist()
    ended = 0
    for answers, wanted, scores in zip(found, said, made.sequences_scores.view(20, num_beams).tolist()):
        for answer, want, score in zip(answers, wanted, scores):
            whole = [*answer.tokens, *([want[len(answer.tokens)]] if answer.finish == "stop" else [])]
            assert whole == want[: len(whole)] and set(want[len(whole) :]) <= {stop_ids[0]}
            assert answer.finish == ("stop" if whole[-1] in stop_ids else "length")
            assert answer.score == pytest.approx(score, rel=1e-6, abs=2e-5)  # theirs are summed in fp32
            ended += answer.finish == "stop"
    assert 0 < ended < 20 * num_beams or length_penalty != 1.0


_CACHE: dict[str, Any] = {}


def _both(folders: pytest.TempPathFactory) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM

    if not _CACHE:
        folder: Path = folders.mktemp("beam")
        model = trained(MODELS["gqa"], noise=0.15)
        theirs = AutoModelForCausalLM.from_pretrained(export(checkpoint(folder, model), folder / "hf"), dtype=torch.float64)
        _CACHE.update(ours=model.double(), theirs=theirs)
    return _CACHE["ours"], _CACHE["theirs"]


def test_the_cache_is_reordered() -> None:
    """Rows taken several times, left out or swapped have exactly what was stored for them; free room is not copied."""
    for rows in ([1, 1, 0], [0, 2, 1], [0, 1, 2], [2], [0, 1, 2, 2, 0]):
        cache = KVCache(6)
        cache.extend_positions(torch.arange(4).expand(3, 4))
        keys, values = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5)
        cache.extend(0, keys, values)
        cache.reorder(torch.tensor(rows))
        new = torch.randn(len(rows), 2, 1, 5)
        assert cache.extend_positions(torch.full((len(rows), 1), 4)).tolist() == [[0, 1, 2, 3, 4]] * len(rows)
        got = cache.extend(0, new, new)
        assert torch.equal(got[0], torch.cat([keys[rows], new], dim=2)) and torch.equal(got[1], torch.cat([values[rows], new], dim=2))


def test_few_tokens_and_many_beams() -> None:
    """More beams than the vocabulary has tokens: no hypothesis twice, none that can't be."""
    after = by_chance(3)
    found = search(after, [(0,)], limit=2, stop=[2], num_beams=8, n_best=8, early_stopping=True)[0]
    assert sorted(each.tokens for each in found) == [[], [0], [0, 0], [0, 1], [1], [1, 0], [1, 1]]
    assert all(math.isfinite(each.score) for each in found)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_beams", 0),
        ("n_best", 5),
        ("n_best", 0),
        ("length_penalty", math.nan),
        ("early_stopping", "maybe"),
        ("num_beams", 2.5),
        ("num_beams", "4"),
        ("length_penalty", "x"),
    ],
)
def test_bad_values_are_refused(field: str, value: object) -> None:
    """Refused with the field's name."""
    with pytest.raises(ConfigError, match=f"{field}: got"):
        BeamOptions(**{field: value})  # type: ignore[arg-type]


def test_greedy_and_one_beam_of_a_model_agree() -> None:
    """The two loops read the same rows."""
    model = trained(MODELS["mqa-tied"])
    prompts = [[3, 4], [7, 8, 9, 10, 2]]
    greedy = start_sampling(model, prompts, max_new_tokens=9, sampling=SamplingOptions(temperature=0)).finish()  # type: ignore[arg-type]
    beams = generate_beams(model, prompts, max_new_tokens=9, beams=BeamOptions(num_beams=1))  # type: ignore[arg-type]
    assert [each.tokens for each in greedy] == [best.tokens for (best,) in beams]
