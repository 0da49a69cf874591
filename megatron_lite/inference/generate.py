"""Text from prompts: one forward over the prompts, then one a token."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data_pipeline.errors import Fault
from megatron_lite.inference.beam import BeamOptions, Finish, Hypothesis, Limit, beam_search
from megatron_lite.inference.logits import known_ids, log_normaliser
from megatron_lite.inference.prompts import require_prompts
from megatron_lite.inference.rows import DecoderRows, DecodingRows
from megatron_lite.inference.sampling import History, SamplingOptions, choose, draw
from megatron_lite.models.decoder import Decoder
from megatron_lite.models.seq2seq import Seq2Seq


@dataclass
class Generation:
    """What follows one prompt."""

    tokens: list[int] = field(default_factory=list)  # without the stop token
    finish: Finish = "length"
    logprobs: list[float] = field(default_factory=list)  # of each token as the model gives them, in nats, where asked for
    end_logprob: float | None = None  # likewise of the stop token, if one came


Heard = Callable[[int, int], bool | None]  # (row, token) as it comes; True: the row ends with it


@dataclass(frozen=True)
class Sampling:
    """Answers on their way: each step of an iteration gives one token to every row that goes on."""

    answers: list[Generation]  # which grow
    steps: Iterator[None]

    def __iter__(self) -> Iterator[None]:
        return self.steps

    def finish(self) -> list[Generation]:
        for _ in self.steps:
            pass
        return self.answers


@torch.inference_mode()
def start_sampling(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingOptions | Sequence[SamplingOptions] | None = None,
    begin_id: int | None = None,
    stop_ids: Collection[int] = (),
    on_token: Heard | None = None,
    logprobs: bool = False,
    num_ids: int | None = None,
) -> Sampling:
    """Read each prompt (token ids; of any lengths), and go on from it, as if it were alone, as the result is iterated. Collective over
    tp: all ranks give the same. Of an encoder-decoder, prompts are sources, their ends included, and `begin_id`, which it needs,
    begins each answer.

    `begin_id` is put before every prompt: what training put before a document. `sampling` is one for all rows or one a row
    (give rows different seeds for different samples). A row ends at a stop token, when `on_token(row, id)`, which hears every
    token as it comes, says True, after max_new_tokens, or when prompt and answer fill max_position_embeddings: there is no
    sliding window. Ids from `num_ids` on, which the tokenizer does not know, are never drawn, unless they end a row. Raises ConfigError
    for prompts that are empty, too long or have ids outside the vocabulary.
    """
    options = list(sampling) if isinstance(sampling, Sequence) else [sampling or SamplingOptions()] * len(prompts)
    faults = _counts("sampling", options, prompts) + _length(max_new_tokens)
    require_prompts(model, prompts, begin_id=begin_id, faults=faults)
    texts, sources = _texts(model, prompts, begin_id)
    if not texts or not max_new_tokens:
        return Sampling([Generation() for _ in texts], iter(()))
    rows = DecoderRows(model, texts, more=max_new_tokens, sources=sources)
    history = None
    if any(each.remembers for each in options):
        history = History.of(prompts if sources is None else [[]] * len(prompts), model.config.vocabulary, rows.logits.device)
    limits = _limits(model, texts, max_new_tokens)
    answers = [Generation(finish=limit.finish) for limit in limits]
    steps = sample(
        rows,
        rows.logits,
        answers,
        limits=limits,
        options=options,
        history=history,
        stop_ids=stop_ids,
        on_token=on_token,
        logprobs=logprobs,
        num_ids=num_ids,
    )
    return Sampling(answers, steps)


@torch.inference_mode()
def sample(
    rows: DecodingRows,
    logits: Tensor,
    answers: list[Generation],
    *,
    limits: Sequence[Limit],
    options: Sequence[SamplingOptions],
    history: History | None = None,
    stop_ids: Collection[int] = (),
    on_token: Heard | None = None,
    logprobs: bool = False,
    num_ids: int | None = None,
) -> Iterator[None]:
    """Draw each row's tokens from the logits [B, V] that follow what it has read, and put them into its answer; a pause after each
    token. `history` is needed where an option remembers."""
    running = list(range(len(answers)))  # by their place in the batch
    while True:
        draws = [draw(options[row].seed, len(answers[row].tokens)) for row in running]
        on_device = torch.tensor(draws, dtype=torch.float64, device=logits.device)
        chosen = rows.agreed(choose(known_ids(logits, num_ids, stop_ids), [options[row] for row in running], on_device, history))
        known = (logits.gather(-1, chosen[:, None]).double() - log_normaliser(logits)).flatten().tolist() if logprobs else None
        going: list[int] = []
        for place, (row, token) in enumerate(zip(running, chosen.tolist())):
            answer = answers[row]
            if token in stop_ids:
                answer.finish = "stop"
                answer.end_logprob = None if known is None else known[place]
                continue
            answer.tokens.append(token)
            if known is not None:
                answer.logprobs.append(known[place])
            if on_token is not None and on_token(row, token):
                answer.finish = "stop"
            elif len(answer.tokens) < limits[row].tokens:
                going.append(place)
        yield
        if not going:
            return
        if history is not None:
            history.add(chosen)
        if len(going) < len(running):
            kept = torch.tensor(going, device=logits.device)
            rows.reorder(kept)
            chosen, running = chosen[kept], [running[place] for place in going]
            history = history.keep(kept) if history is not None else None
        logits = rows.step(chosen)


@torch.inference_mode()
def generate_beams(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    beams: BeamOptions | None = None,
    begin_id: int | None = None,
    stop_ids: Collection[int] = (),
    num_ids: int | None = None,
) -> list[list[Hypothesis]]:
    """The n best answers to each prompt by beam search, best first. Everything else as in `start_sampling`."""
    require_prompts(model, prompts, begin_id=begin_id, faults=_length(max_new_tokens))
    texts, sources = _texts(model, prompts, begin_id)
    if not texts or not max_new_tokens:
        return [[Hypothesis([], 0.0, 0.0, "length")] for _ in texts]
    rows = DecoderRows(model, texts, more=max_new_tokens, sources=sources)
    limits = _limits(model, texts, max_new_tokens)
    return beam_search(rows, rows.logits, limits=limits, options=beams or BeamOptions(), stop_ids=stop_ids, num_ids=num_ids)


def _limits(model: Decoder, texts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Limit]:
    """The last position of the context still predicts a token."""
    left = [model.config.max_position_embeddings - len(text) + 1 for text in texts]
    return [Limit(max_new_tokens, "length") if max_new_tokens <= most else Limit(most, "context") for most in left]


def _counts(name: str, given: Sequence[object], prompts: Sequence[object]) -> list[Fault]:
    if len(given) == len(prompts):
        return []
    return [Fault(name, f"{len(given)} options", f"one, or one for each of the {len(prompts)} prompts")]


def _length(max_new_tokens: int) -> list[Fault]:
    return [Fault("max_new_tokens", max_new_tokens, "a count from 0")] if max_new_tokens < 0 else []


def _texts(model: Decoder, prompts: Sequence[Sequence[int]], begin_id: int | None) -> tuple[list[list[int]], list[list[int]] | None]:
    """What the model reads of each prompt: (texts, None), or of an encoder-decoder (the beginnings of its answers, sources)."""
    start = [] if begin_id is None else [begin_id]
    if isinstance(model, Seq2Seq):
        return [start for _ in prompts], [list(prompt) for prompt in prompts]
    return [[*start, *prompt] for prompt in prompts], None
