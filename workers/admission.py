"""Checks whether a request can run, and refuses it with a reason before it takes any memory."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from diffray.components.config import InvalidField
from diffray.components.grammar.automaton import UNREACHABLE, Automaton
from diffray.components.model import ModelSpec
from diffray.components.policy import Policy
from diffray.components.sequence import Sequence
from diffray.kernels.noise import derived_seed
from diffray.workers.messages import Footprint, Request, Resume


@dataclass(frozen=True, slots=True)
class Limits:
    """An engine's capacity and its model's facts, for processes that have no engine."""

    spec: ModelSpec
    context: int  # positions of the longest canvas
    max_num_seqs: int
    num_pages: int  # that can be handed out
    page_size: int
    eos_token_ids: tuple[int, ...]
    mask_token_id: int
    shares_prefixes: bool = False

    def footprint(self, sequence: Sequence) -> Footprint:
        return Footprint(
            pages=self.pages(sequence, sequence.kv_stop),
            most=self.pages(sequence, sequence.length),
            block=sequence.policy.block_length if self._may_share(sequence) else 0,
        )

    def _may_share(self, sequence: Sequence) -> bool:
        return self.shares_prefixes and sequence.policy.cache.keeps_prefix and not sequence.guided

    def pages(self, sequence: Sequence, stop: int) -> int:
        """Return how many K/V pages the first `stop` positions take; a guided one needs two."""
        return -(-stop // self.page_size) * (2 if sequence.guided else 1)


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can run, and what was found out about it; ready for a scheduler."""

    request: Request
    limits: Limits
    footprint: Footprint
    restarts: bool

    @property
    def uid(self) -> int:
        return self.request.uid

    @property
    def prompt(self) -> tuple[int, ...]:
        return self.request.prompt

    @property
    def cache_salt(self) -> str:
        return self.request.cache_salt

    @property
    def resume(self) -> Resume | None:
        return self.request.resume

    @property
    def max_tokens(self) -> int:
        return self.request.params.max_tokens

    @property
    def content(self) -> int:
        params = self.request.params.model_dump_json(exclude={"seed"})
        return hash((self.prompt, self.request.suffix, params, self.request.grammar))

    def new_sequence(self) -> Sequence:
        """Return a new sequence, so that the request may run more than once."""
        sequence = _sequence(self.request, self.limits)
        if self.request.resume is not None:
            _resume(sequence, self.request.resume)
        return sequence

    def resumed(self, resume: Resume | None) -> "CheckedRequest":
        return check_request(replace(self.request, resume=resume), self.limits)


def check_request(request: Request, limits: Limits) -> CheckedRequest:
    """Check a request once, where it arrives; raises ValueError with a reason."""
    return _checked(request, check(request, limits), limits)


def _checked(request: Request, sequence: Sequence, limits: Limits) -> CheckedRequest:
    soft = sequence.policy.iteration.soft
    return CheckedRequest(request, limits, limits.footprint(sequence), restarts=soft)


def check_choices(request: Request, limits: Limits, uid: Callable[[], int]) -> list[CheckedRequest]:
    """Return an engine request for each of the `n` choices, with seeds of their own.

    They differ in their uid and seed alone, so one check is enough.
    """
    params = request.params
    seed = secrets.randbits(63) if params.seed is None else params.seed
    choices: list[CheckedRequest] = []
    for index in range(params.n):
        own = params.model_copy(update={"seed": derived_seed(seed, index)})
        each = replace(request, uid=uid(), params=own)
        sequence = _sequence(each, limits) if choices else check(each, limits)
        choices.append(_checked(each, sequence, limits))
    return choices


def check(request: Request, limits: Limits) -> Sequence:
    """Return the request as a sequence, or refuse it with a reason."""
    spec, params = limits.spec, request.params
    if not request.prompt and not request.suffix:
        raise InvalidField("the prompt is empty; give it at least one token", "prompt")
    if request.suffix and spec.block_causal:
        raise InvalidField(
            "a suffix does not fit this model: its attention is block-causal, so the text "
            "cannot depend on what follows; use a model with bidirectional attention",
            "suffix",
        )
    _check_ids(request, limits)
    sequence = _sequence(request, limits)
    _check_choice(sequence, limits)
    _check_grammar(sequence)
    if sequence.length > limits.context:
        suffix = f", suffix ({len(request.suffix)})" if request.suffix else ""
        raise InvalidField(
            f"prompt ({len(request.prompt)} tokens){suffix} and max_tokens ({params.max_tokens}) "
            f"need {sequence.length} positions, but the context has {limits.context}; "
            "shorten one of them",
            "max_tokens",
        )
    pages = limits.pages(sequence, sequence.length)
    if pages > limits.num_pages:
        raise InvalidField(
            f"the request needs {pages} K/V pages, but the pool has {limits.num_pages}; "
            "shorten it or give the engine more K/V memory",
            "max_tokens",
        )
    if request.resume is not None:
        _resume(sequence, request.resume)
    return sequence


def _sequence(request: Request, limits: Limits) -> Sequence:
    spec, params = limits.spec, request.params
    end_ids = (*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids))
    return Sequence(
        uid=request.uid,
        prompt=request.prompt,
        params=params,
        policy=Policy.resolve(params.diffusion, spec),
        block_causal=spec.block_causal,
        logit_shift=spec.logit_shift,
        end_ids=frozenset(end_ids),
        suffix=request.suffix,
        watch=request.watch,
        cache_salt=request.cache_salt,
        automaton=_automaton(request, limits),
    )


def _automaton(request: Request, limits: Limits) -> Automaton | None:
    """Return the automaton of the tokens that the request allows."""
    if not request.grammar:
        return None
    params = request.params
    banned = {limits.mask_token_id, *params.bad_token_ids}
    if params.allowed_token_ids:
        allowed = {*params.allowed_token_ids, *limits.eos_token_ids}
        banned |= set(range(limits.spec.vocab_size)) - allowed
    return _restricted(request.grammar, frozenset(banned))


@lru_cache(64)
def _restricted(grammar: bytes, banned: frozenset[int]) -> Automaton:
    return Automaton.from_bytes(grammar).without(banned)


def _check_ids(request: Request, limits: Limits) -> None:
    params, size = request.params, limits.spec.vocab_size
    resumed = request.resume.ids if request.resume is not None else ()
    for name, ids in (
        ("prompt", request.prompt),
        ("suffix", request.suffix),
        ("resume", resumed),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("bad_token_ids", params.bad_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("diffusion.zero_confidence_token_ids", params.diffusion.zero_confidence_token_ids),
    ):
        for token_id in ids:
            if not 0 <= token_id < size:
                raise InvalidField(
                    f"token id {token_id} is not in the vocabulary (0 to {size - 1})", name
                )


def _check_choice(sequence: Sequence, limits: Limits) -> None:
    """Refuse a request that leaves no token to choose from."""
    params, size = sequence.params, limits.spec.vocab_size
    never = {limits.mask_token_id, *sequence.end_ids, *params.bad_token_ids}
    left = len(set(params.allowed_token_ids) - never) if params.allowed_token_ids else size
    if not left or len(never) == size:
        raise InvalidField(
            "allowed_token_ids and bad_token_ids leave no token except the mask and end "
            "tokens; allow at least one more",
            "allowed_token_ids",
        )


def _check_grammar(sequence: Sequence) -> None:
    """Refuse what no text of the grammar fulfils."""
    automaton, params = sequence.automaton, sequence.params
    if automaton is None:
        return
    for name in ("ignore_eos", "min_tokens"):
        if getattr(params, name):
            raise InvalidField(
                f"{name} does not go with structured outputs, which end where they are complete",
                name,
            )
    if automaton.shortest > params.max_tokens:
        raise InvalidField(
            f"structured outputs: the shortest text takes {automaton.shortest} tokens, end token "
            f"included, and max_tokens is {params.max_tokens}"
            if automaton.shortest < UNREACHABLE
            else "structured outputs: no text is allowed by them and by the allowed tokens",
            "max_tokens" if automaton.shortest < UNREACHABLE else "structured_outputs",
        )


def _resume(sequence: Sequence, resume: Resume) -> None:
    """Move a new sequence to the state of a resumed request; refuse an impossible state."""
    ids, (blocks, steps) = resume.ids, resume.progress
    sequence.resume(ids, (blocks, steps), resume.forwards)
    if sequence.emitted == sequence.params.max_tokens and sequence.end_id is None:
        raise ValueError("resume: all tokens were reported, so there is nothing left to do")
    if sequence.end_id is not None and sequence.policy.iteration.early_stop:
        raise ValueError("resume: the end token was reported, so there is nothing left to do")
    reported = sequence.start - sequence.prompt_len
    if (
        not 0 <= blocks < sequence.num_blocks
        or not max(reported, 0) <= len(ids) <= sequence.params.max_tokens
        or (steps < blocks if blocks else steps)
        or not sequence.end_ids.isdisjoint(ids[:-1])
    ):
        raise ValueError(
            f"resume: {len(ids)} tokens in which {blocks} blocks were finished in {steps} steps do "
            "not fit the request; take Resume.after() of all its updates"
        )
