"""The OpenAI-compatible service without HTTP: JSON objects in, JSON objects or an ApiError out.

A server mounts it with `build_api`; a batch calls it as it is.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, TypeVar
from uuid import uuid4

from diffray.cluster.api.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    StreamOptions,
    TokenizeBody,
    parse,
)
from diffray.cluster.api.chat_prompt import chat_text
from diffray.cluster.api.defaults import GenerationDefaults
from diffray.cluster.api.errors import ApiError, as_api_error, invalid, unsupported
from diffray.cluster.api.metrics import Metrics, Snapshot, render
from diffray.cluster.api.params_builder import ParamsBuilder
from diffray.cluster.api.parsed_request import Ask, Prompt, make_choices, refuse_too_many_logprobs
from diffray.cluster.api.responses import Answer, ChatAnswer, CompletionAnswer, Json
from diffray.cluster.api.run import Runner
from diffray.cluster.api.streaming import stream, whole
from diffray.cluster.api.templates import Templates
from diffray.cluster.api.tokens import TokenTexts
from diffray.cluster.control.engine_client import EngineClient, EngineFailed, Load
from diffray.components.policy import DiffusionParams
from diffray.workers.text import Tokenizer

_LONG_TEXT: Final = 10_000  # characters; tokenizing more would delay all streams
_CHEAP_TEXT: Final = 2**16  # characters; up to this length errors give the exact number of tokens
_MOST_CHOICES: Final = 1024  # of one request
_SOON_S: Final = 1.0  # for an engine to report its load

Result = TypeVar("Result")
Others = Callable[[], Awaitable[list[Snapshot]]]  # the metrics of a model's other replicas


class Service:
    """One model under one or several names, answered by one engine.

    `diffusion` and `defaults` are the defaults of requests; `deadline` is the maximum number of
    seconds of a choice. Requests may set a priority under the scheduling policy "priority". With
    several replicas, `replica` names this one, and `others` returns the metrics of the others.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        names: Sequence[str],
        *,
        diffusion: DiffusionParams | None = None,
        defaults: GenerationDefaults | None = None,
        deadline: float | None = None,
        replica: str = "",
        others: Others | None = None,
        scheduling_policy: str = "fcfs",
    ) -> None:
        if not names:
            raise ValueError("a served model needs at least one name")
        self.engine, self.tokenizer, self.names = engine, tokenizer, tuple(names)
        self.metrics = Metrics(self.names[0], replica)
        self._replica, self._others = replica, others
        self._diffusion = diffusion or DiffusionParams()
        self._defaults = defaults or GenerationDefaults()
        self._scheduling_policy = scheduling_policy
        self._runner = Runner(engine, self.metrics, deadline)
        self._texts = TokenTexts(tokenizer)
        self._templates = Templates()
        self._created = int(time.time())
        self._last_load = Load()

    def start(self) -> None:
        """Start the process for which the first chat would otherwise wait."""
        if self.tokenizer is not None and self.tokenizer.fast.chat_template:
            self._templates.start()

    def close(self) -> None:
        """Stop the service; it answers no more chats."""
        self._templates.close()

    # Answers.

    async def chat(self, body: object) -> Json:
        """Answer a conversation: the body and the answer of POST /v1/chat/completions."""
        asked = parse(ChatBody, body)
        return await whole(self._runner, *await self._chat(asked))

    async def complete(self, body: object) -> Json:
        """Answer prompts: the body and the answer of POST /v1/completions."""
        asked = parse(CompletionBody, body)
        return await whole(self._runner, *await self._completion(asked))

    async def stream_chat(self, body: object) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a conversation's answer; closing the generator cancels it."""
        asked = parse(ChatBody, body)
        ask, answer = await self._chat(asked)
        async with aclosing(stream(self._runner, ask, answer, self.tokenizer)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def stream_completion(self, body: object) -> AsyncGenerator[Json, None]:
        """Yield the chunks of the answers to prompts; closing the generator cancels them."""
        asked = parse(CompletionBody, body)
        ask, answer = await self._completion(asked)
        async with aclosing(stream(self._runner, ask, answer, self.tokenizer)) as chunks:
            async for chunk in chunks:
                yield chunk

    # Tokens.

    async def tokenize(self, body: object) -> Json:
        asked = parse(TokenizeBody, body)
        self._named(asked.model)
        tokenizer = self._need_tokenizer()
        if (asked.prompt is None) == (asked.messages is None):
            raise invalid("send either prompt or messages", "prompt")
        if asked.messages is not None:
            text = await chat_text(asked.messages, asked, tokenizer, self._templates)
            special = False
        else:
            text, special = asked.prompt or "", True
        if asked.add_special_tokens is not None:
            special = asked.add_special_tokens
        (ids,) = await self._encode([text], special)
        strings = tokenizer.fast.convert_ids_to_tokens(ids) if asked.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": self.engine.limits.context,
            "tokens": ids,
            "token_strs": strings,
        }

    async def detokenize(self, body: object) -> Json:
        asked = parse(DetokenizeBody, body)
        self._named(asked.model)
        tokenizer, size = self._need_tokenizer(), self.engine.limits.spec.vocab_size
        for token in asked.tokens:
            if not 0 <= token < size:
                raise invalid(
                    f"token id {token} is not in the vocabulary (0 to {size - 1})", "tokens"
                )
        text = await _aside(len(asked.tokens), tokenizer.decode, asked.tokens, False)
        return {"prompt": text}

    def tokenizer_info(self) -> Json:
        """Return the tokenizer's settings for clients, with vLLM's names."""
        fast = self._need_tokenizer().fast
        special = fast.special_tokens_map
        return {
            "tokenizer_class": type(fast).__name__,
            "model_max_length": self.engine.limits.context,
            "chat_template": fast.get_chat_template() if fast.chat_template else None,
            **{name: special.get(name) for name in ("bos_token", "eos_token", "pad_token")},
            **special,
        }

    # About the model and the engine.

    def models(self) -> Json:
        return {"object": "list", "data": [self.model(name) for name in self.names]}

    def model(self, name: str) -> Json:
        return {
            "id": self._named(name),
            "object": "model",
            "created": self._created,
            "owned_by": "diffray",
            "root": self.names[0],
            "parent": None,
            "max_model_len": self.engine.limits.context,
        }

    async def load(self) -> Load:
        """Return the engine's load; the last known one if it does not answer."""
        with suppress(EngineFailed):
            self._last_load = await self.engine.load()
        return self._last_load

    async def prometheus(self, *, vllm_names: bool = False) -> bytes:
        """Return the metrics of this replica and the others, as Prometheus reads them."""
        others = await self._others() if self._others is not None else []
        own = await self.snapshot()
        snapshots = [own, *(each for each in others if each.replica != own.replica)]
        return render(snapshots, vllm_names=vllm_names)

    async def snapshot(self) -> Snapshot:
        """Return this replica's metrics; the engine's last known ones if it is slow."""
        load = self._last_load
        with suppress(TimeoutError):
            load = await asyncio.wait_for(self.load(), _SOON_S)
        return Snapshot(self._replica, self.metrics.families(load, self.engine.limits))

    # Internals.

    async def _chat(self, body: ChatBody) -> tuple[Ask, Answer]:
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
        model, tokenizer = self._named(body.model), self._need_tokenizer()
        if body.tool_choice not in (None, "none"):
            raise unsupported("tool_choice", 'send "none": no answer is read for calls')
        if body.tools and body.tool_choice is None:
            raise invalid(
                'tools need tool_choice: "none": the template shows them to the model, but '
                "no answer is read for calls",
                "tools",
            )
        text = await chat_text(body.messages, body, tokenizer, self._templates)
        (ids,) = await self._encode([text], body.add_special_tokens, "messages")
        ask = await self._ask(body, model, [Prompt(tuple(ids))], "chatcmpl")
        return ask, ChatAnswer(ask, body, self._texts)

    async def _completion(self, body: CompletionBody) -> tuple[Ask, Answer]:
        if body.echo and body.logprobs is not None:
            raise invalid(
                "echo does not go with logprobs: a prompt's tokens have none in a diffusion model",
                "echo",
            )
        if len(body.prompt) * body.n > _MOST_CHOICES:
            raise invalid(
                f"n ({body.n}) for each of {len(body.prompt)} prompts is more than "
                f"{_MOST_CHOICES} choices; send several requests",
                "n",
            )
        model = self._named(body.model)
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        encoded = iter(await self._encode(texts, body.add_special_tokens) if texts else ())
        prompts = []
        for prompt in body.prompt:
            if isinstance(prompt, str):
                prompts.append(Prompt(tuple(next(encoded)), prompt))
            else:
                prompts.append(Prompt(tuple(prompt), self._echo_of(prompt) if body.echo else None))
        suffix: list[int] = []
        if body.suffix is not None:
            (suffix,) = await self._encode([body.suffix], False, "suffix")
        ask = await self._ask(body, model, prompts, "cmpl", tuple(suffix))
        return ask, CompletionAnswer(ask, body, self._texts)

    async def _ask(
        self,
        body: ChatBody | CompletionBody,
        model: str,
        prompts: list[Prompt],
        kind: str,
        suffix: tuple[int, ...] = (),
    ) -> Ask:
        """Return the request with its choices, or refuse it."""
        if body.stream_options is not None and not body.stream:
            raise invalid("stream_options needs stream: true", "stream_options")
        if body.priority and self._scheduling_policy == "fcfs":
            raise invalid(
                f"priority is {body.priority}, but this server runs requests first come, first "
                "served; leave it out, or start the server with --scheduling-policy priority",
                "priority",
            )
        if body.stop and self.tokenizer is None:
            raise invalid("stop strings need a tokenizer, and the checkpoint has none", "stop")
        limits, options = self.engine.limits, body.stream_options or StreamOptions()
        wishes = ParamsBuilder(limits, self.tokenizer, self._diffusion, self._defaults)
        try:
            bad_ids = tuple(wishes.bad_ids(body.bad_words))
            params = []
            for prompt in prompts:
                params.append(wishes.params(body, len(prompt.ids) + len(suffix), bad_ids))
                await asyncio.sleep(0)  # there may be a thousand, and others need the event loop
            if body.logprobs is not None and body.logprobs is not False:
                refuse_too_many_logprobs(params)
            choices = await make_choices(
                prompts,
                params,
                limits,
                self.tokenizer,
                suffix=suffix,
                watch=options.include_canvas,
                cache_salt=body.cache_salt,
            )
        except ValueError as error:
            raise as_api_error(error) from None
        ends = frozenset(limits.eos_token_ids) - frozenset(body.stop_token_ids)
        name = f"{kind}-{body.request_id or uuid4().hex}"
        return Ask(body, model, prompts, choices, ends, name)

    def _named(self, name: str | None) -> str:
        """Return the requested model's name; there is one model, under several names."""
        if name is not None and name not in self.names:
            raise ApiError(
                404,
                f"The model `{name[:100]}` does not exist; this is `{self.names[0]}`.",
                param="model",
                code="model_not_found",
            )
        return name or self.names[0]

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise invalid("the checkpoint has no tokenizer.json; send prompts as token ids")
        return self.tokenizer

    async def _encode(
        self, texts: list[str], special: bool, param: str = "prompt"
    ) -> list[list[int]]:
        """Return the ids of some texts; refuse texts that cannot fit before tokenizing them."""
        tokenizer, context = self._need_tokenizer(), self.engine.limits.context
        longest = max(map(len, texts))
        if longest > _CHEAP_TEXT and longest > context * tokenizer.longest:
            raise ApiError(
                400,
                f"This model's maximum context length is {context} tokens. However, {param} is "
                f"a text of {longest} characters, which are at least "
                f"{longest // tokenizer.longest} tokens. Please reduce its length.",
                param=param,
                code="context_length_exceeded",
            )
        try:
            return await _aside(
                sum(map(len, texts)), lambda: [tokenizer.encode(text, special) for text in texts]
            )
        except ValueError as error:
            raise invalid(f"{param}: {error}", param) from None

    def _echo_of(self, ids: list[int]) -> str:
        limits = self.engine.limits
        if len(ids) > limits.context or not all(0 <= i < limits.spec.vocab_size for i in ids):
            return ""  # the engine's own check refuses them
        return self.tokenizer.decode(ids) if self.tokenizer is not None else ""


async def _aside(size: int, work: Callable[..., Result], *given: Any) -> Result:
    """Return the result of the work, in a thread if it may take long."""
    if size < _LONG_TEXT:
        return work(*given)
    return await asyncio.to_thread(work, *given)
