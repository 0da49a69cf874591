"""A model with its tokenizer: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from megatron_lite.inference.beam import BeamOptions, Finish
from megatron_lite.inference.generate import Generation, generate_beams, start_sampling
from megatron_lite.inference.sampling import SamplingOptions
from megatron_lite.inference.score import score
from megatron_lite.inference.stops import StopStrings
from megatron_lite.models.decoder import Decoder
from megatron_lite.models.seq2seq import Seq2Seq


class TextStream(Protocol):
    def feed(self, id: int, /) -> str: ...

    def finish(self) -> str: ...


class Tokenizer(Protocol):
    """Text to ids, without any that begin or end it, and back."""

    @property
    def num_ids(self) -> int:
        """Ids from there on have no text."""
        ...

    def encode(self, text: str, /) -> Any: ...

    def decode(self, ids: Sequence[int], /) -> str: ...

    def stream(self) -> TextStream:
        """Decodes ids that come one at a time, into whole characters."""
        ...


@dataclass(frozen=True)
class Answer:
    """What follows a prompt."""

    prompt: str
    text: str  # up to a stop string, if one came
    tokens: list[int]  # without the stop token; with those of a stop string
    finish: Finish  # a stop token or string came; as many tokens as asked for; the context is full
    seed: int | None = None  # that gives this answer again; None: of beam search
    score: float | None = None  # of beam search: logprob / tokens ^ length_penalty
    logprob: float | None = None  # of beam search, and where asked for: of the tokens and of the stop token, if one came, in nats
    logprobs: list[float] = field(default_factory=list)  # of each token, where asked for


@dataclass(frozen=True)
class TokenLogprob:
    token: int
    text: str  # what the id alone decodes to
    logprob: float | None  # in nats, given all before it; None: nothing stood before it


@dataclass(frozen=True)
class LanguageModel:
    """A model, its tokenizer, and the ids that begin and end documents. The prompts of an encoder-decoder are sources."""

    model: Decoder
    tokenizer: Tokenizer
    begin_id: int | None  # put before every text, as in training
    stop_ids: tuple[int, ...]
    step: int | None = None  # updates that made it

    def generate(self, prompt: str = "", *, max_new_tokens: int = 100, stop: Sequence[str] = (), **sampling: Any) -> str:
        """The text that follows a prompt; `sampling` are SamplingOptions' (temperature, top_k, top_p, min_p, penalties, seed)."""
        return self.answers([prompt], max_new_tokens=max_new_tokens, stop=stop, sampling=SamplingOptions(**sampling))[0][0].text

    def stream(self, prompt: str = "", *, max_new_tokens: int = 100, stop: Sequence[str] = (), **sampling: Any) -> Iterator[str]:
        """The same text in pieces of whole characters, as they come."""
        pieces: list[str] = []
        row = _Row(self.tokenizer.stream(), stop, pieces.append)
        steps = start_sampling(
            self.model,
            [self._prompt(prompt)],
            max_new_tokens=max_new_tokens,
            sampling=SamplingOptions(**sampling),
            begin_id=self.begin_id,
            stop_ids=self.stop_ids,
            on_token=lambda _, token: row.hear(token),
            num_ids=self.tokenizer.num_ids,
        )
        for _ in steps:
            yield from pieces
            pieces.clear()
        row.finish()
        yield from pieces

    def answers(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 100,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] = (),
        n: int = 1,
        logprobs: bool = False,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[list[Answer]]:
        """n samples of each prompt. Sample j of prompt i has the seed of `sampling` + i * n + j, and is the same whatever else is
        asked for. `on_text(i * n + j, piece)` hears whole characters as they come. Collective over tp."""
        options = sampling or SamplingOptions()
        count = len(prompts) * n
        rows = [_Row(self.tokenizer.stream(), stop, _told(on_text, number)) for number in range(count)]
        made = start_sampling(
            self.model,
            [ids for prompt in prompts for ids in [self._prompt(prompt)] * n],
            max_new_tokens=max_new_tokens,
            sampling=[replace(options, seed=options.seed + number) for number in range(count)],
            begin_id=self.begin_id,
            stop_ids=self.stop_ids,
            on_token=lambda number, token: rows[number].hear(token),
            logprobs=logprobs,
            num_ids=self.tokenizer.num_ids,
        ).finish()
        for row in rows:
            row.finish()
        found = [
            self._answer(prompts[number // n], rows[number].text, each, options.seed + number, logprobs) for number, each in enumerate(made)
        ]
        return [found[first : first + n] for first in range(0, count, n)]

    def best(
        self, prompts: Sequence[str], *, max_new_tokens: int = 100, beams: BeamOptions | None = None, stop: Sequence[str] = ()
    ) -> list[list[Answer]]:
        """The n best answers to each prompt by beam search, best first, each cut at the first stop string: beams end at stop
        tokens only."""
        ids = [self._prompt(prompt) for prompt in prompts]
        found = generate_beams(
            self.model,
            ids,
            max_new_tokens=max_new_tokens,
            beams=beams,
            begin_id=self.begin_id,
            stop_ids=self.stop_ids,
            num_ids=self.tokenizer.num_ids,
        )
        answers: list[list[Answer]] = []
        for prompt, hypotheses in zip(prompts, found):
            answers.append([])
            for each in hypotheses:
                cut = StopStrings(stop)
                text = cut.feed(self.tokenizer.decode(each.tokens))
                text += cut.finish()
                finish: Finish = "stop" if cut.stopped else each.finish
                answers[-1].append(Answer(prompt, text, each.tokens, finish, score=each.score, logprob=each.logprob))
        return answers

    def logprobs(self, text: str, *, prompt: str = "") -> list[TokenLogprob]:
        """Of each token of the text, given the prompt and what stands before it. Prompt and text are encoded apart. An encoder-decoder's
        text ends with its stop token, as its answers do."""
        return self.scores([text], prompts=[prompt])[0]

    def scores(self, texts: Sequence[str], *, prompts: Sequence[str] | None = None) -> list[list[TokenLogprob]]:
        """Likewise of several texts at once. Collective over tp."""
        given = [self._prompt(prompt) for prompt in prompts or [""] * len(texts)]
        ids = [self._ids(text) + self._end for text in texts]
        known = score(self.model, given, ids, begin_id=self.begin_id)
        return [
            [TokenLogprob(token, self.tokenizer.decode([token]), logprob) for token, logprob in zip(tokens, logprobs)]
            for tokens, logprobs in zip(ids, known)
        ]

    @property
    def translates(self) -> bool:
        """Whether an answer stands for itself and does not go on from its prompt."""
        return isinstance(self.model, Seq2Seq)

    @property
    def _end(self) -> list[int]:
        """What ends a source, and a target, in training."""
        return [self.stop_ids[0]] if self.translates and self.stop_ids else []

    def _prompt(self, text: str) -> list[int]:
        return self._ids(text) + self._end

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]

    def _answer(self, prompt: str, text: str, made: Generation, seed: int, logprobs: bool) -> Answer:
        total = sum(made.logprobs) + (made.end_logprob or 0.0) if logprobs else None
        return Answer(prompt, text, made.tokens, made.finish, seed=seed, logprob=total, logprobs=made.logprobs)


class _Row:
    """One answer's text as its tokens come."""

    def __init__(self, stream: TextStream, stops: Sequence[str], tell: Callable[[str], None] | None) -> None:
        self._stream, self._stops, self._tell = stream, StopStrings(stops), tell
        self.text = ""

    def hear(self, token: int) -> bool:
        """Whether a stop string ends it."""
        self._show(self._stops.feed(self._stream.feed(token)))
        return self._stops.stopped

    def finish(self) -> None:
        """Bytes that make no character, and what looked like the beginning of a stop string."""
        self._show(self._stops.feed(self._stream.finish()) + self._stops.finish())

    def _show(self, text: str) -> None:
        self.text += text
        if text and self._tell is not None:
            self._tell(text)


def _told(on_text: Callable[[int, str], None] | None, number: int) -> Callable[[str], None] | None:
    return None if on_text is None else lambda piece: on_text(number, piece)
