"""A model with its tokenizer: text in, text out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from data_pipeline.errors import Fault
from megatron_lite.inference.beam import BeamOptions, Finish
from megatron_lite.inference.generate import Generation, generate_beams, start_sampling
from megatron_lite.inference.given import count_faults, refuse, stops_of, text_faults, texts_of
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

    def decode(self, ids: Sequence[int], /, *, after: Sequence[int] = ()) -> str:
        """The text of ids that go on from those of `after`."""
        ...

    def texts(self, ids: Sequence[int], /, *, after: Sequence[int] = ()) -> list[str]:
        """Of each id alone."""
        ...

    def stream(self, *, after: Sequence[int] = ()) -> TextStream:
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
    text: str  # what the id alone decodes to, behind what stood before it
    logprob: float | None  # in nats, given all before it; None: nothing stood before it


@dataclass(frozen=True)
class LanguageModel:
    """A model, its tokenizer, and the ids that begin and end documents. The prompts of an encoder-decoder are sources."""

    model: Decoder
    tokenizer: Tokenizer
    begin_id: int | None  # put before every text, as in training
    stop_ids: tuple[int, ...]
    step: int | None = None  # updates that made it

    def generate(self, prompt: str = "", *, max_new_tokens: int = 100, stop: Sequence[str] | str = (), **sampling: Any) -> str:
        """The text that follows a prompt; `sampling` are SamplingOptions' (temperature, top_k, top_p, min_p, penalties, seed)."""
        return self.answers([prompt], max_new_tokens=max_new_tokens, stop=stop, sampling=SamplingOptions(**sampling))[0][0].text

    def stream(self, prompt: str = "", *, max_new_tokens: int = 100, stop: Sequence[str] | str = (), **sampling: Any) -> Iterator[str]:
        """The same text in pieces of whole characters, as they come."""
        refuse(text_faults({"prompt": prompt}) + count_faults("max_new_tokens", max_new_tokens, least=0))
        ids, options, pieces = self._prompt(prompt), SamplingOptions(**sampling), list[str]()
        row = _Row(self.tokenizer.stream(after=self._before(ids)), stop, pieces.append)
        if self._has_no_answer(prompt):
            return
        steps = start_sampling(
            self.model,
            [ids],
            max_new_tokens=max_new_tokens,
            sampling=options,
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
        prompts: Sequence[str] | str,
        *,
        max_new_tokens: int = 100,
        sampling: SamplingOptions | None = None,
        stop: Sequence[str] | str = (),
        n: int = 1,
        logprobs: bool = False,
        on_text: Callable[[int, str], None] | None = None,
    ) -> list[list[Answer]]:
        """n samples of each prompt. Sample j of prompt i has the seed of `sampling` + i * n + j, and is the same whatever else is
        asked for. `on_text(i * n + j, piece)` hears whole characters as they come. A string is one prompt; a blank source has empty
        answers, of which the model knows nothing. Collective over tp."""
        prompts, options = texts_of(prompts, "prompt"), sampling or SamplingOptions()
        refuse(count_faults("n", n, least=1) + count_faults("max_new_tokens", max_new_tokens, least=0))
        count, ids = len(prompts) * n, [self._prompt(prompt) for prompt in prompts]
        rows = [_Row(self.tokenizer.stream(after=self._before(ids[number // n])), stop, _told(on_text, number)) for number in range(count)]
        asked = [number for number in range(count) if not self._has_no_answer(prompts[number // n])]
        made = start_sampling(
            self.model,
            [ids[number // n] for number in asked],
            max_new_tokens=max_new_tokens,
            sampling=[replace(options, seed=options.seed + number) for number in asked],
            begin_id=self.begin_id,
            stop_ids=self.stop_ids,
            on_token=lambda place, token: rows[asked[place]].hear(token),
            logprobs=logprobs,
            num_ids=self.tokenizer.num_ids,
        ).finish()
        for row in rows:
            row.finish()
        found = [Answer(prompts[number // n], "", [], "stop", seed=options.seed + number) for number in range(count)]
        for number, each in zip(asked, made):
            found[number] = self._answer(prompts[number // n], rows[number].text, each, options.seed + number, logprobs)
        return [found[first : first + n] for first in range(0, count, n)]

    def best(
        self, prompts: Sequence[str] | str, *, max_new_tokens: int = 100, beams: BeamOptions | None = None, stop: Sequence[str] | str = ()
    ) -> list[list[Answer]]:
        """The n best answers to each prompt by beam search, best first, each cut at the first stop string: beams end at stop
        tokens only. A string is one prompt; a blank source has n empty answers."""
        prompts, stop, beams = texts_of(prompts, "prompt"), stops_of(stop), beams or BeamOptions()
        refuse(count_faults("max_new_tokens", max_new_tokens, least=0))
        asked = {number: self._prompt(prompt) for number, prompt in enumerate(prompts) if not self._has_no_answer(prompt)}
        found = generate_beams(
            self.model,
            list(asked.values()),
            max_new_tokens=max_new_tokens,
            beams=beams,
            begin_id=self.begin_id,
            stop_ids=self.stop_ids,
            num_ids=self.tokenizer.num_ids,
        )
        answers = [
            [] if number in asked else [Answer(prompt, "", [], "stop") for _ in range(beams.n_best)]
            for number, prompt in enumerate(prompts)
        ]
        for number, hypotheses in zip(asked, found):
            prompt, before = prompts[number], self._before(asked[number])
            for each in hypotheses:
                cut = StopStrings(stop)
                text = cut.feed(self.tokenizer.decode(each.tokens, after=before))
                text += cut.finish()
                finish: Finish = "stop" if cut.stopped else each.finish
                answers[number].append(Answer(prompt, text, each.tokens, finish, score=each.score, logprob=each.logprob))
        return answers

    def logprobs(self, text: str, *, prompt: str = "") -> list[TokenLogprob]:
        """Of each token of the text, given the prompt and what stands before it. Prompt and text are encoded apart. An encoder-decoder's
        text ends with its stop token, as its answers do."""
        return self.scores([text], prompts=[prompt])[0]

    def scores(self, texts: Sequence[str] | str, *, prompts: Sequence[str] | str | None = None) -> list[list[TokenLogprob]]:
        """Likewise of several texts at once, with a prompt each, which an encoder-decoder needs. Collective over tp."""
        texts = texts_of(texts, "text")
        prompts = [""] * len(texts) if prompts is None else texts_of(prompts, "prompt")
        if len(prompts) != len(texts):
            refuse([Fault("prompts", f"{len(prompts)} prompts", f"one for each of the {len(texts)} texts")])
        want = "a source with something in it, as this is a translator"
        refuse([Fault(f"prompt {row}", prompt, want) for row, prompt in enumerate(prompts) if self._has_no_answer(prompt)])
        given = [self._prompt(prompt) for prompt in prompts]
        ids = [self._ids(text) + self._end for text in texts]
        known = score(self.model, given, ids, begin_id=self.begin_id)
        return [
            [TokenLogprob(*each) for each in zip(tokens, self.tokenizer.texts(tokens, after=self._before(before)), logprobs)]
            for before, tokens, logprobs in zip(given, ids, known)
        ]

    def token_texts(self, answer: Answer) -> list[str]:
        """What each of its tokens alone decodes to, behind what stood before it."""
        return self.tokenizer.texts(answer.tokens, after=self._before(self._prompt(answer.prompt)))

    @property
    def translates(self) -> bool:
        """Whether an answer stands for itself and does not go on from its prompt."""
        return isinstance(self.model, Seq2Seq)

    @property
    def _end(self) -> list[int]:
        """What ends a source, and a target, in training."""
        return [self.stop_ids[0]] if self.translates and self.stop_ids else []

    def _has_no_answer(self, prompt: str) -> bool:
        return self.translates and not prompt.strip()

    def _before(self, prompt: list[int]) -> list[int]:
        """The ids that an answer's text goes on from."""
        return [] if self.translates else prompt

    def _prompt(self, text: str) -> list[int]:
        return self._ids(text) + self._end

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text)]

    def _answer(self, prompt: str, text: str, made: Generation, seed: int, logprobs: bool) -> Answer:
        total = sum(made.logprobs) + (made.end_logprob or 0.0) if logprobs else None
        return Answer(prompt, text, made.tokens, made.finish, seed=seed, logprob=total, logprobs=made.logprobs)


class _Row:
    """One answer's text as its tokens come."""

    def __init__(self, stream: TextStream, stops: Sequence[str] | str, tell: Callable[[str], None] | None) -> None:
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
