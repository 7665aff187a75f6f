"""The OpenAI-compatible service without HTTP: JSON objects in, JSON objects or an ApiError out.

A server mounts it with `build_api`; a batch calls it directly.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from diffray.cluster.api.answers import Answer, ChatAnswer, CompletionAnswer
from diffray.cluster.api.bodies import (
    ChatBody,
    CompletionBody,
    GenerationBody,
)
from diffray.cluster.api.choices import Choice, Prompt, Runner
from diffray.cluster.api.errors import ApiError, Json, as_api_error, invalid, no_such_model
from diffray.cluster.api.fields import parse
from diffray.cluster.api.metrics import Metrics, Snapshot, render
from diffray.cluster.api.operations import OPERATIONS, OneEngine, Operated
from diffray.cluster.api.params_builder import ParamsBuilder
from diffray.cluster.api.prompts import PromptReader, RemoteImages
from diffray.cluster.api.served import QUESTIONS
from diffray.cluster.api.settings import GenerationDefaults
from diffray.cluster.api.tokens import Tokens
from diffray.cluster.control.engine_client import EngineClient, EngineFailed, Load
from diffray.cluster.control.grammar_pool import GrammarPool
from diffray.cluster.frontend.given import bad_tokens, with_bad_tokens
from diffray.cluster.frontend.likelihood import Scorer
from diffray.cluster.frontend.output import Accepted, Followed, Job, RequestOutput
from diffray.cluster.frontend.prompts import check_default
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams, accepted_by
from diffray.workers.adapters import LoadedAdapters
from diffray.workers.admission import check_choices
from diffray.workers.messages import Request

log = logging.getLogger(__name__)
BACKGROUND: Final = 2**20  # the priority of batches' requests, behind all others
_MOST_LOGPROBS: Final = 2**18  # of one request: its answer is built and sent as a whole
_draw_uid: Final = partial(secrets.randbits, 53)  # not counted: engines outlive this process
_SOON_S: Final = 1.0  # for an engine to report its load

_ANSWERS: Final[dict[type[GenerationBody], type[Answer]]] = {
    ChatBody: ChatAnswer,
    CompletionBody: CompletionAnswer,
}

Others = Callable[[], Awaitable[list[Snapshot] | None]]  # the metrics of a model's other replicas


class Service:
    """One model under one or several names, answered by one engine.

    `diffusion` and `defaults` are the defaults of requests; `deadline` is the maximum number of
    seconds per choice. Requests may set a priority under the scheduling policy "priority". With
    several replicas, `replica` names this one, `others` returns the metrics of the others, and
    `operated` carries out an operator's requests on all of them, instead of the engine alone.
    Requests may name one of `adapters` as their model, and URLs of images for `remote_images` to
    fetch; by default neither. `description` and `examples` (prompts to try) describe the model.
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
        operated: Operated | None = None,
        adapters: LoadedAdapters | None = None,
        scheduling_policy: str = "fcfs",
        description: str = "",
        examples: Sequence[str] = (),
        remote_images: RemoteImages | None = None,
    ) -> None:
        if not names:
            raise ValueError("a served model needs at least one name")
        self.engine, self.tokenizer, self.names = engine, tokenizer, tuple(names)
        self.metrics = Metrics(self.names[0], replica)
        self._replica, self._others, self._scheduling_policy = replica, others, scheduling_policy
        self.adapters = adapters or LoadedAdapters()
        self._operated = operated or OneEngine(engine, self.adapters)
        usual = diffusion or DiffusionParams(), defaults or GenerationDefaults()
        check_default(usual[0], engine.limits.spec)
        self._params = ParamsBuilder(engine.limits, tokenizer, *usual)
        self._about: Json = {"description": description or None, "examples": list(examples)}
        self._about |= {
            "accepts": accepted_by(engine.limits.spec, masked=engine.limits.mask_token_id >= 0)
        }
        self._runner = Runner(engine, self.metrics, deadline)
        self._tokens = Tokens(tokenizer, engine.limits)
        self._prompts = PromptReader(
            self._tokens, engine.limits.spec.sight, remote_images or RemoteImages()
        )
        self._grammars = GrammarPool(tokenizer, engine.limits)
        self._created, self._last_load = int(time.time()), Load()

    def close(self) -> None:
        """End the process that compiles structured outputs."""
        self._grammars.close()

    # Answers.

    async def chat(self, body: object) -> Json:
        """Answer a conversation: the body and the answer of POST /v1/chat/completions."""
        return await self.whole(ChatBody, body)

    async def complete(self, body: object) -> Json:
        """Answer prompts: the body and the answer of POST /v1/completions."""
        return await self.whole(CompletionBody, body)

    async def in_background(self, kind: type[GenerationBody], given: object) -> Json:
        """Answer a request of a batch: after all others, however long that takes."""
        return await self._whole(kind, given, replace(self._runner, deadline=None), BACKGROUND)

    async def whole(self, kind: type[GenerationBody], given: object) -> Json:
        """Answer a request of one of the APIs."""
        return await self._whole(kind, given, self._runner)

    async def _whole(self, kind: Any, given: object, runner: Runner, behind: int = 0) -> Json:
        answer = await self._begin(parse(kind, given))
        if answer.body.stream:
            raise invalid("streaming is not supported here; leave stream out", "stream")
        priority = behind + max(answer.body.priority, 0) if behind else answer.body.priority
        for choices in (answer.scored, answer.choices):
            async with aclosing(runner.deltas(choices, priority)) as deltas:
                async for _ in deltas:
                    pass
        return answer.whole()

    async def stream(self, kind: type[GenerationBody], given: object) -> AsyncGenerator[Json, None]:
        """Yield the chunks of an answer; closing the generator cancels it."""
        answer = await self._begin(parse(kind, given))
        async with aclosing(self._runner.deltas(answer.choices, answer.body.priority)) as deltas:
            async for choice, delta in deltas:
                for chunk in answer.chunks(choice, delta):
                    yield chunk
        for chunk in answer.last_chunks():
            yield chunk

    async def follow(
        self, asked: str | list[int] | list[Json], params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Followed, None]:
        """Yield an Accepted, deltas and the RequestOutput; closing the generator cancels it."""
        self._refuse_priority(priority)
        is_chat = isinstance(asked, list) and bool(asked) and isinstance(asked[0], dict)
        kind = ChatBody if is_chat else CompletionBody
        (prompt,) = await self._prompts.prompts(parse(kind, {kind.prompt_field: asked}))
        if params.stop and self.tokenizer is None:
            raise invalid("stop strings need a tokenizer, and the checkpoint has none", "stop")
        grammar, diffusion = b"", params.diffusion.over(self._params.diffusion)
        if params.structured_outputs is not None:
            given = "structured_outputs", params.structured_outputs, diffusion
            grammar = await self._params.grammar(self._grammars, *given)
        params = params.model_copy(update={"diffusion": diffusion})
        try:
            params = with_bad_tokens(params, self.tokenizer)
            request = Request(0, prompt.ids, params, images=prompt.images, grammar=grammar)
            request = self.adapters.given_to(request)
            checked = check_choices(request, self.engine.limits, _draw_uid)
        except ValueError as error:
            raise as_api_error(error) from None
        choices = []
        for index, each in enumerate(checked):
            job = Job(index, each.request.params, self.tokenizer, follow=True, depth=each.depth)
            choices.append(Choice(index, prompt, each, job))
        yield Accepted(len(prompt.ids), [each.num_blocks for each in checked])
        async with aclosing(self._runner.deltas(choices, priority)) as deltas:
            async for _, delta in deltas:
                yield delta
        text = asked if isinstance(asked, str) else None
        yield RequestOutput(text, list(prompt.ids), [each.job.result() for each in choices])

    # Questions and operations.

    async def ask(self, path: str, given: object) -> Json:
        """Answer a question about tokens, or do what an operator asks for."""
        endpoint = (QUESTIONS | OPERATIONS)[path]
        body = parse(endpoint.given, given)
        self._named(body.model)
        if path in QUESTIONS:
            return await endpoint.carry_out(self._prompts, body)
        try:
            return await endpoint.carry_out(self._operated, body)
        except ValueError as error:
            raise as_api_error(error) from None

    # About the model and the engine.

    async def models(self) -> Json:
        names, load = (*self.names, *self.adapters.names), await self._recent_load()
        return {"object": "list", "data": [self.describe(name, load) for name in names]}

    async def model(self, name: str) -> Json:
        return self.describe(name, await self._recent_load())

    def describe(self, name: str, load: Load) -> Json:
        """Return the description of the model under one of its names, or of an adapter."""
        return {
            "id": self._named(name),
            "object": "model",
            "created": self._created,
            "owned_by": "diffray",
            "root": self.names[0],
            "parent": self.names[0] if name in self.adapters.names else None,
            "weight_version": load.weights_version,
            **self._params.about(),
            **self._about,
        }

    async def health(self) -> Json:
        await self.engine.check_health()
        return {}

    async def load(self) -> Load:
        """Return the engine's load; the last known one if it does not answer."""
        with suppress(EngineFailed):
            self._last_load = await self.engine.load()
        return self._last_load

    async def prometheus(self, *, vllm_names: bool = False) -> bytes:
        """Return the metrics of this replica and the others, in Prometheus' format."""
        others = await self._others() if self._others is not None else None
        own = await self.snapshot()
        snapshots = [own, *(each for each in others or () if each.replica != own.replica)]
        return render(snapshots, vllm_names=vllm_names)

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that was refused or failed, unless it is counted already."""
        if not error.counted:
            error.counted = True  # so that an ingress does not count it too
            self.metrics.count("request_refused", label=str(error.status))

    async def snapshot(self) -> Snapshot:
        """Return this replica's metrics; the engine's last known ones if it is slow."""
        load = await self._recent_load()
        return Snapshot(self._replica, self.metrics.families(load, self.engine.limits))

    async def _recent_load(self) -> Load:
        with suppress(TimeoutError):
            return await asyncio.wait_for(self.load(), _SOON_S)
        return self._last_load

    # Internals.

    async def _begin(self, body: GenerationBody) -> Answer:
        """Return an answer whose choices are yet to run, or refuse the request."""
        model = self._named(body.model)
        self._refuse_priority(body.priority)
        try:
            prompts = await self._prompts.prompts(body)
            choices = await self._choices(body, prompts)
            scores = isinstance(body, CompletionBody) and body.scores_prompt
            scored = await self._scored(body, prompts) if scores else []
        except ValueError as error:
            refusal = as_api_error(error)
            if refusal.param in ("prompt", "answer"):
                refusal.param = body.prompt_field
            if refusal.param == "structured_outputs" and body.structured is not None:
                refusal.param = body.structured[0]
            raise refusal from None
        answer = _ANSWERS[type(body)](model, body, choices, self._tokens)
        answer.scored = scored
        if answer.warnings:
            log.warning("%s: %s", answer.id, "; ".join(answer.warnings))
        return answer

    def _refuse_priority(self, priority: int) -> None:
        if priority and self._scheduling_policy == "fcfs":
            raise invalid(
                f"priority is {priority}, but this server runs requests first come, first "
                "served; leave it out, or start the server with --scheduling-policy priority",
                "priority",
            )

    async def _choices(self, body: GenerationBody, prompts: list[Prompt]) -> list[Choice]:
        """Return the choices of all prompts, or refuse them all."""
        bad = bad_tokens(body.bad_words, self.tokenizer)
        grammar = b""
        if body.structured is not None:
            diffusion = self._params.over_default(body)
            grammar = await self._params.grammar(self._grammars, *body.structured, diffusion)
        watch = body.stream_options is not None and body.stream_options.include_canvas
        choices: list[Choice] = []
        logprobs = 0
        for prompt in prompts:
            taken = len(prompt.ids) + len(prompt.suffix)
            params = self._params.params(body, taken, bad, grammar)
            logprobs += params.n * params.max_tokens * (1 + params.top_logprobs)
            if body.num_logprobs is not None:
                self._refuse_many(logprobs, "choices x max_tokens")
            request = Request(
                uid=0,
                prompt=prompt.ids,
                params=params,
                suffix=prompt.suffix,
                watch=watch,
                images=prompt.images,
                cache_salt=body.cache_salt,
                grammar=grammar,
            )
            request = self.adapters.given_to(request, body.model)
            for index, checked in enumerate(check_choices(request, self.engine.limits, _draw_uid)):
                job = Job(index, checked.request.params, self.tokenizer, depth=checked.depth)
                choices.append(Choice(len(choices), prompt, checked, job))
            await asyncio.sleep(0)  # with a thousand prompts, others must get their turn
        return choices

    async def _scored(self, body: GenerationBody, prompts: list[Prompt]) -> list[Choice]:
        """Return choices whose answer is all of a prompt but its first token."""
        limits, given = self.engine.limits, [each for each in prompts if len(each.ids) > 1]
        scorer = Scorer.for_prompts(limits.spec, body.num_logprobs or 0)
        asked = body.n * sum(len(each.ids) for each in given) * (1 + scorer.top_logprobs)
        self._refuse_many(asked, "n x tokens of the prompts")
        choices = list[Choice]()
        for prompt in given:
            params = scorer.params(len(prompt.ids) - 1)
            request = Request(0, prompt.ids[:1], params, cache_salt=body.cache_salt)
            request = self.adapters.given_to(replace(request, answer=prompt.ids[1:]), body.model)
            (checked,) = check_choices(request, limits, _draw_uid)
            job = Job(0, params, self.tokenizer)
            choices.append(Choice(len(choices), prompt, checked, job))
            await asyncio.sleep(0)
        return choices

    def _refuse_many(self, logprobs: int, tokens: str) -> None:
        if logprobs > _MOST_LOGPROBS:
            raise invalid(
                f"this asks for more than {_MOST_LOGPROBS} log-probabilities ({tokens} x (1 + "
                "top_logprobs)); lower one or send several requests",
                "logprobs",
            )

    def _named(self, name: str | None) -> str:
        """Return the requested model's name, by default its first; refuse unknown names."""
        if name is not None and name not in self.names and name not in self.adapters.names:
            raise no_such_model(name, [self.names[0], *self.adapters.names])
        return name or self.names[0]
