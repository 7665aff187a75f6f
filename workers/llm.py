"""The whole engine in this process: from prompts to text, offline or streamed."""

from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from pydantic import ValidationError
from tqdm.auto import tqdm

from diffray.components.config import explain
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.kernels.noise import derived_seed
from diffray.workers.engine import Request, Update
from diffray.workers.output import CompletionOutput, Delta, RequestOutput
from diffray.workers.setup import Setup, build_engine
from diffray.workers.text import Messages, TextStream

Prompt = str | Items[int]


class DiffusionLLM:
    """A diffusion language model, batched, in this process.

    `model` is a folder or a Hugging Face hub id. `mask_token_id` and `eos_token_id` are needed only
    where the checkpoint does not tell them. `diffusion` holds the defaults of all requests. At most
    `max_num_seqs` requests run together, each with at most `max_model_len` positions;
    `kv_cache_memory` (bytes) bounds their K/V. `steps_per_round` denoising steps run without
    looking at their result.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        mask_token_id: int | None = None,
        eos_token_id: int | Items[int] | None = None,
        diffusion: DiffusionParams | dict[str, Any] | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 16,
        kv_cache_memory: int | None = None,
        page_size: int = 16,
        chunk: int = 512,
        steps_per_round: int = 1,
    ) -> None:
        if steps_per_round < 1:
            raise ValueError(f"steps_per_round must be at least 1 (given: {steps_per_round})")
        self._default = _diffusion(diffusion)
        setup = Setup(
            dtype=dtype,
            device=device,
            mask_token_id=mask_token_id,
            eos_token_id=eos_token_id,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_memory=kv_cache_memory,
            page_size=page_size,
            chunk=chunk,
        )
        self.engine, self.tokenizer = build_engine(model, setup)
        self._steps = steps_per_round
        self._next_uid = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Let go of the weights and the K/V memory; the object cannot be used afterwards."""
        del self.engine

    def generate(
        self,
        prompts: Prompt | Items[Prompt],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or many, in their order; a prompt is a text or a list of token ids.

        `params` is one for all or one for each.
        """
        several = _as_list(prompts)
        return self._run([self._encode(p) for p in several], several, params, use_tqdm)

    def chat(
        self,
        messages: Messages | Items[Messages],
        params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, in the checkpoint's chat format."""
        conversations: list[Messages] = (
            [messages] if messages and isinstance(messages[0], dict) else list(messages)  # type: ignore[list-item,arg-type]
        )
        encoded = [self._encode_chat(c) for c in conversations]
        return self._run(encoded, [None] * len(encoded), params, use_tqdm)

    def stream(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None
    ) -> Iterator[Delta]:
        """Yield the answer to one prompt or conversation as it becomes final."""
        jobs = self._submit([self._encode_any(prompt)], [params or SamplingParams()])
        try:
            while jobs:
                for update in self.engine.step(self._steps):
                    job = jobs[update.uid]
                    before, known = len(job.stream.text), len(job.choice.token_ids)
                    self._apply(job, update)
                    choice = job.choice
                    text, ids = job.stream.text[before:], choice.token_ids[known:]
                    if text or ids or choice.finish_reason:
                        yield Delta(choice.index, text, ids, choice.finish_reason)
                    if choice.finish_reason:
                        del jobs[update.uid]
        finally:
            self._cancel(jobs)

    def watch(
        self, prompt: Prompt | Messages, params: SamplingParams | None = None
    ) -> Iterator[list[int | None]]:
        """Yield the canvas after every denoising step: token ids, None where it is masked."""
        params = params or SamplingParams()
        jobs = self._submit([self._encode_any(prompt)], [params.model_copy(update={"n": 1})])
        (uid,) = jobs
        try:
            while jobs:
                updates = self.engine.step(1)
                job = jobs[uid]
                for update in updates:
                    self._apply(job, update)
                if job.choice.finish_reason:
                    jobs.clear()
                    yield list(job.choice.token_ids)
                else:
                    yield self.engine.canvas(uid)
        finally:
            self._cancel(jobs)

    # Jobs: one engine request each, so several for n > 1.

    def _run(
        self,
        encoded: list[tuple[int, ...]],
        prompts: Items[Prompt | None],
        params: SamplingParams | Items[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = _one_each(params, len(encoded))
        jobs = self._submit(encoded, each)
        outputs = [
            RequestOutput(prompt if isinstance(prompt, str) else None, list(ids), [])
            for prompt, ids in zip(prompts, encoded, strict=True)
        ]
        for job in jobs.values():
            outputs[job.number].outputs.append(job.choice)
        # Shown only for work that takes longer than a few seconds.
        progress = tqdm(total=len(jobs), unit="seq", delay=3, disable=not use_tqdm)
        try:
            while jobs:
                for update in self.engine.step(self._steps):
                    self._apply(jobs[update.uid], update)
                    if jobs[update.uid].choice.finish_reason:
                        del jobs[update.uid]
                        progress.update()
        finally:
            self._cancel(jobs)
            progress.close()
        return outputs

    def _submit(
        self, encoded: list[tuple[int, ...]], each: list[SamplingParams]
    ) -> dict[int, "_Job"]:
        """Queue all requests, or none if one of them is refused."""
        jobs: dict[int, _Job] = {}
        requests: list[Request] = []
        for number, (ids, wish) in enumerate(zip(encoded, each, strict=True)):
            full = wish.model_copy(update={"diffusion": wish.diffusion.over(self._default)})
            if full.stop and self.tokenizer is None:
                raise ValueError("stop strings need a tokenizer, and the checkpoint has none")
            for index in range(full.n):
                seed = derived_seed(full.seed, index)
                own = full.model_copy(update={"seed": seed})
                request = Request(self._next_uid + len(requests), ids, own)
                self.engine.check(request)
                requests.append(request)
                choice = CompletionOutput(index)
                if full.logprobs:
                    choice.logprobs, choice.steps = [], []
                stream = TextStream(
                    self.tokenizer,
                    full.stop,
                    full.include_stop_str_in_output,
                    full.skip_special_tokens,
                )
                jobs[request.uid] = _Job(number, own, choice, stream)
        self._next_uid += len(requests)
        for request in requests:
            self.engine.add(request)
        return jobs

    def _apply(self, job: "_Job", update: Update) -> None:
        """Take over an update into the job's choice; ends the request at a stop string."""
        choice, stream = job.choice, job.stream
        ids = update.ids
        # An end token is the last of its update; it is counted, and is no text.
        is_text = update.stop_id is None or job.params.include_stop_str_in_output
        stream.push(ids if is_text else ids[:-1])
        if stream.stopped is not None:
            ids = ids[: len(stream.ids) - len(choice.token_ids)]
            choice.finish_reason, choice.stop_reason = "stop", stream.stopped
            self.engine.cancel(update.uid)
        elif update.finish_reason:
            stream.finish()
            choice.finish_reason, choice.stop_reason = update.finish_reason, update.stop_id
        choice.token_ids += ids
        choice.text = stream.text
        choice.forwards = update.forwards
        if choice.logprobs is not None and choice.steps is not None:
            choice.logprobs += update.logprobs[: len(ids)]
            choice.steps += update.steps[: len(ids)]

    def _cancel(self, jobs: dict[int, "_Job"]) -> None:
        for uid in jobs:
            self.engine.cancel(uid)

    # Prompts.

    def _encode_any(self, prompt: Prompt | Messages) -> tuple[int, ...]:
        if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
            return self._encode_chat(prompt)  # type: ignore[arg-type]
        return self._encode(prompt)  # type: ignore[arg-type]

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(int(token) for token in prompt)
        return tuple(self._need_tokenizer().encode(prompt))

    def _encode_chat(self, messages: Messages) -> tuple[int, ...]:
        return tuple(self._need_tokenizer().encode_chat(messages))

    def _need_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError("the checkpoint has no tokenizer.json; give prompts as token ids")
        return self.tokenizer


@dataclass(slots=True)
class _Job:
    number: int  # of the prompt it answers
    params: SamplingParams
    choice: CompletionOutput
    stream: TextStream


def _as_list(prompts: Prompt | Items[Prompt]) -> list[Prompt]:
    """Return several prompts: a text or a flat list of ids is one."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(
    params: SamplingParams | Items[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise ValueError(f"{len(params)} SamplingParams for {count} prompts; give one, or one each")
    return list(params)


def _diffusion(given: DiffusionParams | dict[str, Any] | None) -> DiffusionParams:
    if isinstance(given, DiffusionParams):
        return given
    try:
        return DiffusionParams(**(given or {}))
    except ValidationError as error:
        raise ValueError(explain(error)) from None
