"""Turns prompts and parameters into engine requests, all checked before any of them starts."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

from diffray.cluster.frontend.bad_words import with_bad_tokens
from diffray.cluster.frontend.given import Given, Reader
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.adapters import LoadedAdapters
from diffray.workers.admission import CheckedRequest, check_choices
from diffray.workers.limits import Limits
from diffray.workers.messages import Request

Compile = Callable[[StructuredOutputs, int | None], bytes]  # given the length of slots, if any


class RequestMaker:
    """Makes requests with increasing uids; `default` fills in diffusion parameters left out."""

    def __init__(
        self,
        reader: Reader,
        default: DiffusionParams,
        limits: Limits,
        adapters: LoadedAdapters,
        compiler: Compile,
    ) -> None:
        self._reader, self._default, self._limits = reader, default, limits
        self._adapters, self._compile = adapters, compiler
        self._uids: Iterator[int] = count()

    def requests(
        self, given: Given, params: SamplingParams, watch: bool = False
    ) -> list[CheckedRequest]:
        """Return an engine request for each choice; raise ValueError if it cannot run."""
        tokenizer = self._reader.given
        if params.stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and the checkpoint has none")
        params = with_bad_tokens(params, tokenizer).model_copy(
            update={"diffusion": params.diffusion.over(self._default)}
        )
        grammar = b""
        if params.structured_outputs is not None:
            _ = self._reader.tokenizer  # without one there are no texts
            grammar = self._compile(params.structured_outputs, params.diffusion.slots)
        request = Request(
            0, given.prompt, params, given.suffix, watch, images=given.images, grammar=grammar
        )
        request = self._adapters.given_to(request)
        return check_choices(request, self._limits, partial(next, self._uids))
