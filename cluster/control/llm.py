"""The whole engine without a server: from prompts to text, offline or streamed."""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final, Self, Unpack
from weakref import WeakValueDictionary, finalize

from tqdm.auto import tqdm

from diffray.cluster.control.engine_client import WaitingClient
from diffray.cluster.control.engine_config import RanksKeywords, RanksOptions
from diffray.cluster.control.events import Event
from diffray.cluster.control.grammar_pool import GrammarPool
from diffray.cluster.control.llm_changes import EngineChanges
from diffray.cluster.control.llm_likelihood import Likelihoods
from diffray.cluster.control.local import WaitingEngine
from diffray.cluster.control.ranks import WaitingRanks
from diffray.cluster.frontend.given import Given, Reader, RequestMaker
from diffray.cluster.frontend.image_files import Picture
from diffray.cluster.frontend.output import Canvas, Delta, Job, RequestOutput
from diffray.cluster.frontend.prompts import (
    Prompt,
    as_conversations,
    as_diffusion,
    as_list,
    as_params,
    on_pinned_canvas,
)
from diffray.cluster.frontend.text import Messages, Tokenizer
from diffray.components.checkpoints.folder import resolve
from diffray.components.grammar.template import LONGEST
from diffray.components.params import SamplingKeywords, SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.adapters import LoadedAdapters
from diffray.workers.admission import CheckedRequest
from diffray.workers.engine import Engine
from diffray.workers.engine_options import list_options
from diffray.workers.limits import Limits
from diffray.workers.setup import build_engine

_SHUT_DOWN: Final = "this DiffusionLLM has been shut down; make a new one"
_STOPPED: Final = "KeyboardInterrupt: the call was stopped; the model takes the next one"

Params = SamplingParams | Items[SamplingParams] | None
# Whether to show tqdm's bar, or what to call for another one.
Bar = bool | Callable[..., AbstractContextManager[Any]]


class DiffusionLLM(EngineChanges, Likelihoods):
    """A diffusion language model, batched, in this process or on several ranks of a Ray cluster.

    `model` is a folder, a Hugging Face Hub id or a demo's name. `diffusion` holds the defaults of
    all requests. Requests take a SamplingParams, or its fields as keywords. The other options:
    """

    def __init__(
        self,
        model: str,
        *,
        diffusion: DiffusionParams | dict[str, Any] | None = None,
        **options: Unpack[RanksKeywords],
    ) -> None:
        default = as_diffusion(diffusion)
        # CUDA graphs are recorded for the default block length.
        given: dict[str, Any] = {"graph_block_length": default.block_length, **options}
        setup = RanksOptions(**given)
        self.model = model
        self.adapters = LoadedAdapters.of(model, setup.lora_modules, setup.max_lora_rank)
        self._ranks = setup.tensor_parallel_size
        self._engine: Engine | None = None
        self._client: WaitingClient | None
        path = resolve(model)
        if self._ranks == 1:
            self._engine = build_engine(model, setup)
            self._client = WaitingEngine(self._engine, setup.steps_per_round)
        else:
            self._client = ranks = WaitingRanks(model, setup)
            finalize(self, ranks.close)
        self.tokenizer = Tokenizer.load(path, self.limits.mask_token_id)
        self._reader = Reader(self.tokenizer, self.limits.spec.sight)
        self._grammars = GrammarPool(self.tokenizer, self.limits)
        self._maker = RequestMaker(
            self._reader, default, self.limits, self.adapters, self._grammars.compile
        )
        # By the uid of the request; each call owns its jobs, which end with it.
        self._jobs: WeakValueDictionary[int, Job] = WeakValueDictionary()
        self._events: deque[Event] = deque()  # that Ctrl-C kept from being applied

    def __repr__(self) -> str:
        if self._client is None:
            return f"DiffusionLLM({self.model!r}), shut down"
        if self._engine is None:
            return f"DiffusionLLM({self.model!r}, tensor_parallel_size={self._ranks})"
        kv = self._engine.kv  # has the model's dtype
        dtype = str(kv.dtype).removeprefix("torch.")
        return f"DiffusionLLM({self.model!r}, dtype={dtype!r}, device={str(kv.device)!r})"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Free the weights and the K/V memory; the object cannot be used afterwards."""
        client, self._client, self._engine = self._client, None, None
        if client is not None:
            client.close()
            self._grammars.close()

    @property
    def client(self) -> WaitingClient:
        if self._client is None:
            raise ValueError(_SHUT_DOWN)
        return self._client

    @property
    def limits(self) -> Limits:
        """The model's facts and the engine's capacity."""
        return self.client.limits

    @property
    def engine(self) -> Engine:
        """The engine of this process."""
        if self._client is not None and self._engine is None:
            raise ValueError(f"the engine runs in {self._ranks} other processes; use limits")
        if self._engine is None:
            raise ValueError(_SHUT_DOWN)
        return self._engine

    def get_tokenizer(self) -> Any:
        """Return the Hugging Face tokenizer."""
        return self._reader.tokenizer.fast

    def apply_chat_template(self, messages: Messages | Items[Messages], **options: Any) -> Any:
        """Return what the Hugging Face tokenizer's method of this name returns."""
        return self._reader.tokenizer.apply_chat_template(messages, **options)

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        sampling_params: Params = None,
        *,
        images: Items[Items[Picture]] | None = None,
        use_tqdm: Bar = True,
        **options: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in their order.

        A prompt is a text, a list or tensor of token ids, or what a tokenizer returns.
        `sampling_params` is one for all prompts or one for each; or give its fields as keywords.
        `images` holds the images of each prompt, for models that take some. Texts are continued as
        they are: questions to a chat model belong to `chat`.
        """
        several = as_list(prompts)
        params = as_params("generate", sampling_params, options, len(several))
        return self._run(self._reader.prompts(several, images), params, use_tqdm)

    def infill(
        self,
        prefixes: Prompt | Items[Prompt],
        suffixes: Prompt | Items[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        **options: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """Write the text between a prefix and a suffix, or between each of several.

        The gap has exactly `max_tokens` positions, and the model sees where it ends; an end token
        in it ends the text there, unless `ignore_eos`. One of the two may be empty. Models with
        block-causal attention cannot see a suffix, so for them it is an error.
        """
        before, after = as_list(prefixes), as_list(suffixes)
        if len(before) != len(after):
            raise ValueError(f"{len(before)} prefixes for {len(after)} suffixes; give one each")
        params = as_params("infill", sampling_params, options, len(before))
        given = [self._reader.prompt(*both) for both in zip(before, after, strict=True)]
        return self._run(given, params, use_tqdm)

    def chat(
        self,
        messages: str | Messages | Items[str | Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        **options: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """Answer one conversation or many, in the checkpoint's chat format.

        A text is a conversation with one message, the user's.
        """
        several = as_conversations(messages)
        params = as_params("chat", sampling_params, options, len(several))
        return self._run([self._reader.conversation(each) for each in several], params, use_tqdm)

    def decide(
        self,
        records: Items[str],
        outputs: dict[str, Any],
        instruction: str = "",
        sampling_params: Params = None,
        *,
        use_tqdm: Bar = True,
        **options: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """Fill in a JSON schema, or choose, for each record, on a pinned canvas.

        `outputs` are structured outputs: {"json": schema} or {"choice": texts}. The instruction
        comes before each record; with block-causal attention its K/V are shared.
        """
        if sampling_params is None:
            options = {"max_tokens": LONGEST, "logprobs": True, **options}
        params = as_params("decide", sampling_params, options, len(records))
        pinned = [on_pinned_canvas(each, outputs) for each in params]
        chats = [[{"role": "user", "content": f"{instruction} {each}".strip()}] for each in records]
        return self.chat(chats, pinned, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        **options: Unpack[SamplingKeywords],
    ) -> Iterator[Delta]:
        """Yield the answer to one prompt or conversation as it becomes final."""
        (params,) = as_params("stream", sampling_params, options, 1)
        requests = self._requests(self._reader.any(prompt), params)
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
        **options: Unpack[SamplingKeywords],
    ) -> Iterator[Canvas[int]]:
        """Yield the canvas after every denoising step: token ids, None where it is masked.

        The last `drafts` of its tokens are not verified yet.
        With several ranks it is yielded after every round instead (`steps_per_round`).
        """
        (params,) = as_params("watch", sampling_params, options, 1)
        if params.n != 1:
            raise ValueError(f"watch shows one answer; leave n out (given: {params.n})")
        requests = self._requests(self._reader.any(prompt), params, watch=True)
        with self._running([requests]) as jobs:
            (job,) = jobs.values()
            while not job.finished:
                job.canvas = None
                self._advance(1)
                if job.canvas is not None and not job.finished:
                    yield job.canvas
            yield Canvas(job.choice.token_ids)

    def _requests(
        self, given: Given, params: SamplingParams, watch: bool = False
    ) -> list[CheckedRequest]:
        _ = self.client  # after a shutdown there is none
        return self._maker.requests(given, params, watch)

    # Jobs: one engine request each, so several where n > 1.

    def _run(
        self, given: list[Given], params: list[SamplingParams], use_tqdm: Bar
    ) -> list[RequestOutput]:
        # All requests are checked before any starts.
        checked = [self._requests(*both) for both in zip(given, params, strict=True)]
        total = sum(map(len, checked))
        # Shown only for work that takes longer than a few seconds.
        make = use_tqdm if callable(use_tqdm) else partial(tqdm, disable=not use_tqdm)
        with make(total=total, unit="seq", delay=3) as progress, self._running(checked) as jobs:
            outputs = [
                RequestOutput(text, list(prompt), [jobs[each.uid].choice for each in requests])
                for (text, prompt, *_), requests in zip(given, checked, strict=True)
            ]
            while jobs:
                self._advance()
                finished = [uid for uid, job in jobs.items() if job.finished]
                for uid in finished:
                    jobs.pop(uid).result()
                progress.update(len(finished))
        return outputs

    @contextmanager
    def _running(self, prompts: list[list[CheckedRequest]]) -> Iterator[dict[int, Job]]:
        """Queue the requests of prompts and yield their jobs; at the end cancel unfinished ones."""
        jobs: dict[int, Job] = {}
        try:
            for requests in prompts:
                for index, checked in enumerate(requests):
                    job = Job(index, checked.request.params, self.tokenizer, depth=checked.depth)
                    jobs[checked.uid] = self._jobs[checked.uid] = job
                    self.client.submit(checked)
            yield jobs
        except KeyboardInterrupt as interrupt:
            # IPython, so also a notebook, shows this line instead of a traceback.
            interrupt._render_traceback_ = lambda: [_STOPPED]  # type: ignore[attr-defined]
            raise
        finally:
            for uid in jobs:
                self._jobs.pop(uid, None)
            if self._client is not None:
                for uid in jobs:
                    self._client.cancel(uid)
                if not self._jobs:
                    self._client.release()

    def _advance(self, steps: int | None = None) -> None:
        """Wait for the next events, and apply them to the jobs of all calls."""
        client = self.client
        try:
            self._events += client.advance(steps)
        except KeyboardInterrupt as interrupt:
            # Where in a forward Ctrl-C came takes fifty lines to show, and says nothing.
            raise interrupt.with_traceback(None) from None
        while self._events:
            event = self._events.popleft()
            job = self._jobs.get(event.uid)
            if event.update is None:
                if job is None:
                    continue  # its call has ended, because another request failed
                raise RuntimeError(event.reason)
            if job is not None:
                job.apply(event.update)
            if job is None or job.finished:
                client.cancel(event.uid)  # the engine ignores stop strings
                self._jobs.pop(event.uid, None)
        if not self._jobs:
            client.release()
        elif not client.open:
            raise RuntimeError("this answer was lost when another call was interrupted")


list_options(DiffusionLLM, RanksOptions)
