"""The whole engine in this process: from prompts to text, offline or streamed."""

import sys
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from functools import cached_property, partial
from inspect import Parameter, signature
from itertools import count
from typing import Any, NamedTuple, Never, Self, Unpack
from weakref import WeakValueDictionary

from tqdm.auto import tqdm

from diffray.cluster.control.driver import Driver
from diffray.cluster.control.events import Event
from diffray.cluster.control.local import run_here
from diffray.cluster.control.scheduler import Scheduler
from diffray.components.grammar.compile import Grammars, vocabulary_of
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.admission import CheckedRequest, check_choices
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineKeywords, EngineOptions
from diffray.workers.job import Job
from diffray.workers.messages import Request
from diffray.workers.output import Delta, RequestOutput
from diffray.workers.prompts import (
    Prompt,
    as_conversations,
    as_ids,
    as_list,
    as_messages,
    one_each,
    refuse_unknown,
)
from diffray.workers.setup import build_engine
from diffray.workers.text import Messages, Tokenizer


class _Given(NamedTuple):
    """A prompt's text, if it was one, and the tokens before and after those to be generated."""

    text: str | None
    prompt: tuple[int, ...]
    suffix: tuple[int, ...] = ()


class DiffusionLLM:
    """A diffusion language model, batched, in this process.

    `model` is a folder, a Hugging Face Hub id or a demo's name. `diffusion` holds the defaults of
    all requests. The other options are those of `EngineOptions`:
    """

    def __init__(
        self,
        model: str,
        *,
        diffusion: DiffusionParams | dict[str, Any] | None = None,
        **options: Unpack[EngineKeywords],
    ) -> None:
        self._default = _diffusion(diffusion)
        # CUDA graphs are recorded for the default block length.
        given: dict[str, Any] = {"graph_block_length": self._default.block_length, **options}
        setup = EngineOptions(**given)
        self._engine: Engine | None
        self._engine, self.tokenizer = build_engine(model, setup)
        # All requests are one caller's, so none is interrupted for others (no time slices).
        limits = self._engine.limits
        scheduler = Scheduler(
            limits.max_num_seqs, limits.num_pages, sys.maxsize, page_size=limits.page_size
        )
        self._driver = Driver(scheduler, setup.steps_per_round)
        self.model = model
        # By the uid of their request; calls own their jobs, which end with them.
        self._jobs: WeakValueDictionary[int, Job] = WeakValueDictionary()
        self._events: deque[Event] = deque()  # not applied yet if Ctrl-C came first
        self._uids = count()

    def __repr__(self) -> str:
        if self._engine is None:
            return f"DiffusionLLM({self.model!r}), shut down"
        keys = self._engine.kv.keys_LSGD  # stored as the model computes
        dtype = str(keys.dtype).removeprefix("torch.")
        return f"DiffusionLLM({self.model!r}, dtype={dtype!r}, device={str(keys.device)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Free the weights and the K/V memory; the object cannot be used afterwards."""
        self._engine = None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise ValueError("this DiffusionLLM has been shut down; make a new one")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in their order; a prompt is a text or a list of token ids.

        `sampling_params` is one for all or one for each.
        """
        refuse_unknown("generate", unknown)
        given = [self._given(prompt) for prompt in as_list(prompts)]
        return self._run(given, sampling_params, use_tqdm)

    def infill(
        self,
        prefixes: Prompt | Items[Prompt],
        suffixes: Prompt | Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Write the text between a prefix and a suffix, or between each of several.

        The gap has exactly `max_tokens` positions, and the model sees where it ends; an end token
        in it ends the text there, unless `ignore_eos`. One of the two may be empty. Models with
        block-causal attention cannot see a suffix, so for them it is an error.
        """
        refuse_unknown("infill", unknown)
        before, after = as_list(prefixes), as_list(suffixes)
        if len(before) != len(after):
            raise ValueError(f"{len(before)} prefixes for {len(after)} suffixes; give one each")
        given = [self._given(*both) for both in zip(before, after, strict=True)]
        return self._run(given, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Messages | Items[Messages],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **unknown: Never,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, in the checkpoint's chat format."""
        refuse_unknown("chat", unknown)
        given = [self._conversation(each) for each in as_conversations(messages)]
        return self._run(given, sampling_params, use_tqdm)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        **unknown: Never,
    ) -> Iterator[Delta]:
        """Yield the answer to one prompt or conversation as it becomes final."""
        refuse_unknown("stream", unknown)
        params = one_each(sampling_params, 1)[0]
        requests = self._requests(self._given_any(prompt), params)
        with self._running([requests]) as jobs:
            while jobs:
                self._advance()
                for uid, job in list(jobs.items()):
                    delta = job.news()
                    if job.finished:
                        del jobs[uid]
                    if delta is not None:
                        yield delta

    def watch(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        **unknown: Never,
    ) -> Iterator[list[int | None]]:
        """Yield the canvas after every denoising step: token ids, None where it is masked."""
        refuse_unknown("watch", unknown)
        params = one_each(sampling_params, 1)[0]
        if params.n != 1:
            raise ValueError(f"watch shows one answer; leave n out (given: {params.n})")
        requests = self._requests(self._given_any(prompt), params, watch=True)
        with self._running([requests]) as jobs:
            (job,) = jobs.values()
            while not job.finished:
                job.canvas = None
                self._advance(1)
                if job.canvas is not None and not job.finished:
                    yield job.canvas
            yield list(job.choice.token_ids)

    # Jobs: one engine request each, so several where n > 1.

    def _run(
        self,
        given: list[_Given],
        params: SamplingParams | Items[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = one_each(params, len(given))
        # All are checked before any begins.
        checked = [self._requests(*both) for both in zip(given, each, strict=True)]
        total = sum(map(len, checked))
        # Shown only for work that takes longer than a few seconds.
        progress = tqdm(total=total, unit="seq", delay=3, disable=not use_tqdm)
        with progress, self._running(checked) as jobs:
            outputs = [
                RequestOutput(text, list(prompt), [jobs[each.uid].choice for each in requests])
                for (text, prompt, _), requests in zip(given, checked, strict=True)
            ]
            while jobs:
                self._advance()
                finished = [uid for uid, job in jobs.items() if job.finished]
                for uid in finished:
                    del jobs[uid]
                progress.update(len(finished))
        return outputs

    def _requests(
        self, given: _Given, params: SamplingParams, watch: bool = False
    ) -> list[CheckedRequest]:
        """Return an engine request for each choice; raise ValueError if it cannot run."""
        if params.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the checkpoint has none")
        params = params.model_copy(update={"diffusion": params.diffusion.over(self._default)})
        grammar = b""
        if params.structured_outputs is not None:
            grammar = self._grammars.compile(params.structured_outputs)
        request = Request(
            0, given.prompt, params, suffix=given.suffix, watch=watch, grammar=grammar
        )
        return check_choices(request, self.engine.limits, partial(next, self._uids))

    @contextmanager
    def _running(self, prompts: list[list[CheckedRequest]]) -> Iterator[dict[int, Job]]:
        """Queue the choices of prompts and yield their jobs; cancel those that are left."""
        jobs: dict[int, Job] = {}
        try:
            for requests in prompts:
                for index, checked in enumerate(requests):
                    job = Job(index, checked.request.params, self.tokenizer)
                    jobs[checked.uid] = self._jobs[checked.uid] = job
                    self._driver.scheduler.submit(checked, checked.footprint)
            yield jobs
        finally:
            for uid in jobs:
                self._driver.scheduler.cancel(uid)
                self._jobs.pop(uid, None)
            if not self._jobs:
                self._release()

    def _advance(self, steps: int | None = None) -> None:
        """Run one round for the jobs of all calls."""
        self._events += run_here(self.engine, self._driver, steps)
        while self._events:
            event = self._events.popleft()
            if event.update is None:
                raise RuntimeError(event.reason)
            if job := self._jobs.get(event.uid):
                job.apply(event.update)
            if job is None or job.finished:
                self._driver.scheduler.cancel(event.uid)  # the engine ignores stop strings
                self._jobs.pop(event.uid, None)
        if not self._jobs:
            self._release()
        elif not self._driver.scheduler.open:
            raise RuntimeError("this answer was lost when another call was interrupted")

    def _release(self) -> None:
        """Free what requests without a job hold, because there may be no later round."""
        for uid in list(self._driver.scheduler.open):
            self._driver.scheduler.cancel(uid)
        if self._engine is not None:
            run_here(self._engine, self._driver)

    # Prompts.

    def _given_any(self, prompt: Prompt | Messages) -> _Given:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            return self._conversation(prompt)
        return self._given(prompt)

    def _given(self, prompt: object, suffix: object = ()) -> _Given:
        text = prompt if isinstance(prompt, str) else None
        return _Given(text, self._encode(prompt), self._encode(suffix, add_special_tokens=False))

    def _conversation(self, messages: object) -> _Given:
        ids = self._need_tokenizer().encode_chat(as_messages(messages))
        return _Given(None, tuple(ids))

    def _encode(self, prompt: object, add_special_tokens: bool = True) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self._need_tokenizer().encode(prompt, add_special_tokens))
        return as_ids(prompt)

    @cached_property
    def _grammars(self) -> Grammars:
        limits = self.engine.limits
        vocabulary = vocabulary_of(self._need_tokenizer().fast)
        return Grammars(vocabulary, limits.eos_token_ids, limits.spec.vocab_size)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json; give prompts as token ids")
        return self.tokenizer


def _diffusion(given: DiffusionParams | dict[str, Any] | None) -> DiffusionParams:
    if isinstance(given, DiffusionParams):
        return given
    return DiffusionParams(**(given or {}))


def _document(made: type[DiffusionLLM]) -> None:
    """Make `help()` and notebooks list every option with its type, default and meaning."""
    fields, plain = EngineOptions.model_fields, signature(made)
    own = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for name, field in fields.items()
    ]
    made.__signature__ = plain.replace(parameters=own + options)  # type: ignore[attr-defined]
    listed = "".join(f"\n    {name}: {field.description}" for name, field in fields.items())
    made.__doc__ = f"{made.__doc__}{listed}\n    "


_document(DiffusionLLM)
