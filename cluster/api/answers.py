"""Answers in OpenAI's format, whole and in chunks, with optional extensions for diffusion."""

import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from functools import cached_property
from typing import Any, ClassVar
from uuid import uuid4

import diffray
from diffray.cluster.api.bodies import ChatBody, CompletionBody, GenerationBody, StreamOptions
from diffray.cluster.api.choices import Choice
from diffray.cluster.api.errors import Json
from diffray.cluster.api.logprobs import Columns, as_number, scored
from diffray.cluster.api.params_builder import long_canvas
from diffray.cluster.api.tokens import Tokens
from diffray.cluster.frontend.output import Canvas, CompletionOutput, Delta
from diffray.components.grammar.tool_calls import OPEN, CallParser

Part = CompletionOutput | Delta  # the tokens of a choice: all, or new ones


class Answer(ABC):
    """What answers to chats and completions have in common."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    id_prefix: ClassVar[str]

    def __init__(
        self, model: str, body: GenerationBody, choices: list[Choice], tokens: Tokens
    ) -> None:
        self.model, self.body, self.choices = model, body, choices
        self._tokens, self._options = tokens, body.stream_options or StreamOptions()
        self.id = f"{self.id_prefix}-{body.request_id or uuid4().hex}"
        self._created = int(time.time())
        self._begun: set[int] = set()  # indices of choices with an opening chunk
        self.scored: list[Choice] = []  # of prompts, if their log-probabilities are asked for
        self.warnings = self._untold = [*self._lowered(), *long_canvas(body, choices[0].checked)]

    def whole(self) -> Json:
        """Return the answer when all choices are complete."""
        made = []
        for choice in self.choices:
            about = self._about_tokens(choice, choice.output)
            made.append(self._complete(choice) | self._ending(choice) | about)
        return self._envelope(self.kind, made) | self._totals()

    def chunks(self, choice: Choice, delta: Delta) -> Iterator[Json]:
        """Yield the chunks for a choice's new final tokens."""
        if choice.index not in self._begun:
            self._begun.add(choice.index)
            yield from self._opening(choice)
        if delta.canvas is not None:
            yield self._chunk() | {"diffusion": self._view(choice, delta.canvas, delta.forwards)}
        about = self._about_tokens(choice, delta)
        pieces = list(self._pieces(choice, delta))
        if about and (delta.token_ids or delta.shown) and not pieces:  # text may be held back
            pieces = [self._piece(choice, "")]
        for number, piece in enumerate(pieces):
            yield self._chunk(piece | about if number == 0 else piece)
        if delta.finish_reason is not None:
            yield self._chunk(self._last_piece(choice) | self._ending(choice))

    def last_chunks(self) -> Iterator[Json]:
        """Yield the chunks that follow those of all choices."""
        if self._options.include_usage:
            yield self._chunk() | self._totals()

    @abstractmethod
    def _opening(self, choice: Choice) -> Iterator[Json]:
        """Yield the chunks before a choice's first piece."""

    def _pieces(self, choice: Choice, delta: Delta) -> Iterator[Json]:
        """Yield the pieces of a choice for its new final tokens."""
        if delta.text:
            yield self._piece(choice, delta.text)

    @abstractmethod
    def _piece(self, choice: Choice, text: str) -> Json: ...

    @abstractmethod
    def _last_piece(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _complete(self, choice: Choice) -> Json: ...

    @abstractmethod
    def _logprobs(self, choice: Choice, part: Part) -> Json: ...

    def _ending(self, choice: Choice) -> Json:
        made: Json = {
            "finish_reason": choice.output.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if choice.output.depth is not None:
            made["structured_outputs"] = {"exact": False, "depth": choice.output.depth}
        return made

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.model,
            "system_fingerprint": f"diffray-{diffray.__version__}",
            "choices": choices,
            **self._told(),
        }

    def _told(self) -> Json:
        """Return the warnings, if there are any: once, with what is sent first."""
        told, self._untold = self._untold, []
        return {"warnings": told} if told else {}

    def _lowered(self) -> Iterator[str]:
        """Yield a sentence for each prompt after which fewer tokens fit than were asked for."""
        wanted = self.body.wanted_tokens or 0
        first = [choice for choice in self.choices if choice.output.index == 0]  # of each prompt
        for number, choice in enumerate(first):
            taken, left = len(choice.prompt.ids), choice.checked.max_tokens
            if wanted > left:
                which = f"prompt {number}" if len(first) > 1 else "the prompt"
                yield (
                    f"max_tokens is lowered from {wanted} to {left}: {which} has {taken} tokens, "
                    f"and the context {taken + left}"
                )

    def _chunk(self, *choices: Json) -> Json:
        made = self._envelope(self.chunk_kind, list(choices))
        if self._options.continuous_usage_stats:
            made["usage"] = self._usage()
        elif self._options.include_usage:
            made["usage"] = None
        return made

    def _usage(self) -> Json:
        """Return the token counts so far, with end tokens, without those after a stop string."""
        first = [choice for choice in self.choices if choice.output.index == 0]  # of each prompt
        prompt = sum(len(choice.prompt.ids) for choice in first)
        completion = sum(len(choice.output.token_ids) for choice in self.choices)
        details: Json = {"cached_tokens": sum(choice.output.cached_tokens for choice in first)}
        if any(choice.output.approximate for choice in self.choices):
            details["approximate"] = True
        return {
            "prompt_tokens": prompt,
            "prompt_tokens_details": details,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _totals(self) -> Json:
        usage = self._usage()
        forwards = sum(choice.output.forwards for choice in self.choices)
        rate = round(usage["completion_tokens"] / max(forwards, 1), 3)
        return {"usage": usage, "diffusion": {"forwards": forwards, "tokens_per_forward": rate}}

    def _about_tokens(self, choice: Choice, part: Part) -> Json:
        """Return what the request asks for about tokens, besides their text."""
        made: Json = {}
        if self.body.num_logprobs is not None:
            made["logprobs"] = self._logprobs(choice, part)
            if part.fields is not None:
                made["fields"] = {path: asdict(each) for path, each in part.fields.items()}
        if self.body.return_token_ids:
            made["token_ids"] = part.token_ids
        if self.body.return_trajectory:
            made["trajectory"] = {
                "token_ids": part.token_ids,
                "steps": part.steps,
                "logprobs": [as_number(each) for each in part.logprobs or []],
                "weight_version": choice.job.choice.weights_version,
            }
        return made

    def _view(self, choice: Choice, canvas: Canvas[int], forwards: int) -> Json:
        """Return a canvas after a forward: its tokens, their texts, and the whole text."""
        return {
            "index": choice.index,
            "forwards": forwards,
            "canvas": canvas,
            "drafts": canvas.drafts,
            "tokens": [None if token is None else self._tokens[token][0] for token in canvas],
            "text": self._tokens.of_canvas(canvas),
        }

    def _prompt_ids(self, choice: Choice) -> Json:
        ids = list(choice.prompt.ids)
        return {"prompt_token_ids": ids} if self.body.return_token_ids else {}


class ChatAnswer(Answer):
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    id_prefix = "chatcmpl"
    body: ChatBody

    @cached_property
    def _parsers(self) -> dict[int, CallParser]:
        return defaultdict(CallParser)

    @cached_property
    def _calls(self) -> Counter[int]:
        """The number of calls so far in each choice's stream."""
        return Counter()

    def whole(self) -> Json:
        return super().whole() | self._prompt_ids(self.choices[0])

    def _opening(self, choice: Choice) -> Iterator[Json]:
        opening = _choice(choice, delta={"role": "assistant", "content": ""})
        yield self._chunk(opening) | self._prompt_ids(choice)

    def _pieces(self, choice: Choice, delta: Delta) -> Iterator[Json]:
        if not self.body.calls:
            yield from super()._pieces(choice, delta)
            return
        parser = self._parsers[choice.index]
        parts = [*parser.feed(delta.text)]
        if delta.finish_reason is not None:
            parts += parser.end()
        for part in parts:
            if part.kind == "content":
                yield self._piece(choice, part.text)
                continue
            call: Json = {"function": {part.kind: part.text}}
            if part.kind == "name":
                self._calls[choice.index] += 1
                call = {"id": self._call_id(choice, self._calls[choice.index]), "type": "function"}
                call["function"] = {"name": part.text, "arguments": ""}
            call["index"] = self._calls[choice.index] - 1
            yield _choice(choice, delta={"tool_calls": [call]})

    def _call_id(self, choice: Choice, number: int) -> str:
        return f"call_{self.id.removeprefix('chatcmpl-')[:24]}{choice.index}_{number}"

    def _piece(self, choice: Choice, text: str) -> Json:
        return _choice(choice, delta={"content": text})

    def _ending(self, choice: Choice) -> Json:
        ending = super()._ending(choice)
        called = self.body.calls and OPEN in choice.output.text
        if called and ending["finish_reason"] == "stop" and self.body.named_tool is None:
            ending["finish_reason"] = "tool_calls"  # for a named function OpenAI has stop
        return ending

    def _last_piece(self, choice: Choice) -> Json:
        return _choice(choice, delta={})

    def _complete(self, choice: Choice) -> Json:
        message = {"role": "assistant", "content": choice.output.text, "refusal": None}
        if self.body.calls:
            message |= self._parsed(choice)
        return _choice(choice, message=message)

    def _parsed(self, choice: Choice) -> Json:
        """Return an answer's text and its calls separately."""
        parser, content = CallParser(), ""
        calls: list[Json] = []
        for part in [*parser.feed(choice.output.text), *parser.end()]:
            if part.kind == "content":
                content += part.text
            elif part.kind == "name":
                function = {"name": part.text, "arguments": ""}
                number = len(calls) + 1
                calls.append({"id": self._call_id(choice, number), "type": "function"})
                calls[-1]["function"] = function
            else:
                calls[-1]["function"]["arguments"] += part.text
        if not calls:
            return {"content": content}
        return {"content": content or None, "tool_calls": calls}

    def _logprobs(self, choice: Choice, part: Part) -> Json:
        content = [
            self._entry(token, logprob) | {"top_logprobs": [self._entry(*each) for each in top]}
            for token, logprob, top in scored(choice.output, part.shown)
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        text, spelled = self._tokens[token]
        return {"token": text, "logprob": as_number(logprob), "bytes": spelled}


class CompletionAnswer(Answer):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    body: CompletionBody

    @cached_property
    def _offsets(self) -> list[int]:
        """Where the next token's text begins in each choice's text."""
        return [len(choice.prompt.before) for choice in self.choices]

    def _opening(self, choice: Choice) -> Iterator[Json]:
        if choice.prompt.before or self.body.return_token_ids:
            yield self._chunk(self._piece(choice, choice.prompt.before) | self._prompt_ids(choice))

    def _piece(self, choice: Choice, text: str) -> Json:
        return _choice(choice, text=text)

    def _last_piece(self, choice: Choice) -> Json:
        return _choice(choice, text=choice.prompt.after)

    def _complete(self, choice: Choice) -> Json:
        text = choice.prompt.before + choice.output.text + choice.prompt.after
        return _choice(choice, text=text) | self._prompt_ids(choice)

    def _logprobs(self, choice: Choice, part: Part) -> Json:
        columns = Columns(self._tokens, self._offsets[choice.index])
        if self.body.scores_prompt:
            columns.offset = 0
            columns.add(choice.prompt.ids[0], None, [])
            for of_prompt in self.scored:
                if of_prompt.prompt is choice.prompt:
                    for found in scored(of_prompt.output):
                        columns.add(*found)
            columns.offset = len(choice.prompt.before)
        # With a prompt's all are told, so that clients which asked for one more token find it last.
        places = None if self.body.scores_prompt else part.shown
        for found in scored(choice.output, places):
            columns.add(*found)
        self._offsets[choice.index] = columns.offset
        return columns.lists


def _choice(choice: Choice, **content: Any) -> Json:
    return {"index": choice.index, **content, "logprobs": None, "finish_reason": None}
