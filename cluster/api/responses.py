"""OpenAI's answers, whole and in chunks, and optional extensions for diffusion."""

from itertools import groupby
from typing import Any, Protocol

from diffray.cluster.api.bodies import ChatBody, CompletionBody
from diffray.cluster.api.parsed_request import Ask
from diffray.cluster.api.run import Choice
from diffray.cluster.api.tokens import TokenTexts
from diffray.workers.output import Delta
from diffray.workers.text import Tokenizer

MASK = "\N{LIGHT SHADE}"  # how a masked position is shown
_LEAST = -9999.0  # JSON has neither infinity nor NaN; vLLM uses the same value

Json = dict[str, Any]


class Answer(Protocol):
    """One of the two shapes, chat or completion."""

    @property
    def kind(self) -> str:
        """The object's name."""
        ...

    @property
    def chunk_kind(self) -> str: ...

    @property
    def tells_tokens(self) -> bool:
        """Whether tokens are sent even while their text is held back."""
        ...

    def opening(self, choice: Choice) -> Json | None:
        """Return the first chunk of a choice's stream."""
        ...

    def piece(self, choice: Choice, delta: Delta, start: int) -> Json:
        """Return the chunk of a choice's tokens from `start` on."""
        ...

    def ending(self, choice: Choice) -> Json: ...

    def whole(self, choice: Choice) -> Json: ...


class ChatAnswer:
    """chat.completion and its chunks."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, ask: Ask, body: ChatBody, texts: TokenTexts) -> None:
        self._ask, self._body, self._texts = ask, body, texts
        self.tells_tokens = body.logprobs or body.return_token_ids or body.return_trajectory

    def opening(self, choice: Choice) -> Json:
        return self._chunk(choice, {"role": "assistant", "content": ""})

    def piece(self, choice: Choice, delta: Delta, start: int) -> Json:
        made = self._chunk(choice, {"content": delta.text})
        stop = start + len(delta.token_ids)
        if self._body.logprobs:
            made["logprobs"] = self._logprobs(choice, start, stop)
        return made | _extras(self._body, choice, start, stop)

    def ending(self, choice: Choice) -> Json:
        return self._chunk(choice, {}) | _ending(self._ask, choice)

    def whole(self, choice: Choice) -> Json:
        count = len(choice.output.token_ids)
        message = {"role": "assistant", "content": choice.output.text, "refusal": None}
        logprobs = self._logprobs(choice, 0, count) if self._body.logprobs else None
        made = {"index": choice.index, "message": message, "logprobs": logprobs}
        return made | _ending(self._ask, choice) | _extras(self._body, choice, 0, count)

    def _chunk(self, choice: Choice, delta: Json) -> Json:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: Choice, start: int, stop: int) -> Json:
        ids, logprobs = choice.output.token_ids, choice.output.logprobs or []
        tops = choice.output.top_logprobs
        content = []
        for at in range(start, stop):
            top = tops[at] if tops else []
            entry = self._entry(ids[at], logprobs[at])
            content.append(entry | {"top_logprobs": [self._entry(*each) for each in top]})
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        text, spelled = self._texts[token]
        return {"token": text, "logprob": _number(logprob), "bytes": spelled}


class CompletionAnswer:
    """text_completion; chunks have the same name."""

    kind = chunk_kind = "text_completion"

    def __init__(self, ask: Ask, body: CompletionBody, texts: TokenTexts) -> None:
        self._ask, self._body, self._texts = ask, body, texts
        wants = body.logprobs is not None, body.return_token_ids, body.return_trajectory
        self.tells_tokens = any(wants)
        self._offsets = [len(self._echo(choice)) for choice in ask.choices]

    def opening(self, choice: Choice) -> Json | None:
        echo = self._echo(choice)
        if not echo and not self._body.return_token_ids:
            return None
        made = self._chunk(choice, echo)
        if self._body.return_token_ids:
            made["prompt_token_ids"] = list(choice.request.prompt)
        return made

    def piece(self, choice: Choice, delta: Delta, start: int) -> Json:
        made = self._chunk(choice, delta.text)
        stop = start + len(delta.token_ids)
        if self._body.logprobs is not None:
            made["logprobs"] = self._logprobs(choice, start, stop)
        return made | _extras(self._body, choice, start, stop)

    def ending(self, choice: Choice) -> Json:
        return self._chunk(choice, self._suffix()) | _ending(self._ask, choice)

    def whole(self, choice: Choice) -> Json:
        count = len(choice.output.token_ids)
        text = self._echo(choice) + choice.output.text + self._suffix()
        made = self._chunk(choice, text) | _ending(self._ask, choice)
        if self._body.logprobs is not None:
            made["logprobs"] = self._logprobs(choice, 0, count)
        if self._body.return_token_ids:
            made["prompt_token_ids"] = list(choice.request.prompt)
        return made | _extras(self._body, choice, 0, count)

    def _echo(self, choice: Choice) -> str:
        return (self._ask.prompts[choice.prompt].text or "") if self._body.echo else ""

    def _suffix(self) -> str:
        return (self._body.suffix or "") if self._body.echo else ""

    def _chunk(self, choice: Choice, text: str) -> Json:
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}

    def _logprobs(self, choice: Choice, start: int, stop: int) -> Json:
        """Return parallel lists; an offset is the start of a token's text in the choice's text."""
        ids, logprobs = choice.output.token_ids, choice.output.logprobs or []
        tops = choice.output.top_logprobs
        made: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for at in range(start, stop):
            text = self._texts[ids[at]][0]
            made["tokens"].append(text)
            made["token_logprobs"].append(_number(logprobs[at]))
            made["text_offset"].append(self._offsets[choice.index])
            self._offsets[choice.index] += len(text)
            top = tops[at] if tops else []
            best = {self._texts[token][0]: _number(logprob) for token, logprob in top}
            made["top_logprobs"].append(best)
        return made


def canvas_view(index: int, canvas: list[int | None], tokenizer: Tokenizer | None) -> Json:
    """Return a choice's canvas as it is now: ids, null where masked, and the text with masks."""
    text = ""
    if tokenizer is not None:
        for masked, run in groupby(canvas, key=lambda token: token is None):
            ids = list(run)
            shown = [token for token in ids if token is not None]
            text += MASK * len(ids) if masked else tokenizer.decode(shown)
    return {"index": index, "canvas": canvas, "text": text}


def _number(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST


def _ending(ask: Ask, choice: Choice) -> Json:
    return {"finish_reason": choice.output.finish_reason, "stop_reason": ask.stop_reason(choice)}


def _extras(body: ChatBody | CompletionBody, choice: Choice, start: int, stop: int) -> Json:
    """Return the optional extensions: token ids, and their steps and forwards."""
    made: Json = {}
    output = choice.output
    if body.return_token_ids:
        made["token_ids"] = output.token_ids[start:stop]
    if body.return_trajectory:
        made["trajectory"] = {
            "token_ids": output.token_ids[start:stop],
            "steps": (output.steps or [])[start:stop],
            "logprobs": [_number(each) for each in (output.logprobs or [])[start:stop]],
        }
    return made
