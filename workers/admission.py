"""Checks whether a request can run, and refuses it with a reason before it takes any memory."""

import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain

from diffray.components.canvas import Canvas
from diffray.components.compatibility import Asked, check_pairs, reads_back
from diffray.components.config import InvalidField
from diffray.components.drafted_canvas import DraftedCanvas
from diffray.components.given_canvas import GivenCanvas, GivenDrafts
from diffray.components.grammar.automaton import UNREACHABLE, Automaton
from diffray.components.grammar.bad_words import avoiding, restricted
from diffray.components.grammar.template import Template
from diffray.components.images import images_of
from diffray.components.lora import LoRA
from diffray.components.params import SamplingParams
from diffray.components.pinned_canvas import PinnedCanvas, slots_stop
from diffray.components.policy import Policy
from diffray.components.sequence import Sequence
from diffray.kernels.noise import derived_seed
from diffray.workers.limits import Limits
from diffray.workers.messages import Footprint, Request, Resume


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can run, with what the scheduler needs to know about it."""

    request: Request
    limits: Limits
    footprint: Footprint
    restarts: bool
    num_blocks: int
    block_positions: int  # of its first block
    depth: int | None  # how deep a grammar's texts may nest; None: no limit

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
    def lora(self) -> LoRA | None:
        return self.request.lora

    @property
    def resume(self) -> Resume | None:
        return self.request.resume

    @property
    def max_tokens(self) -> int:
        return self.request.params.max_tokens

    @property
    def content(self) -> int:
        params = self.request.params.model_dump_json(exclude={"seed"})
        asked = self.request
        parts = asked.suffix, asked.images, asked.grammar, asked.lora, asked.answer, asked.places
        return hash((self.prompt, params, *parts))

    def new_sequence(self) -> Sequence:
        """Return a new sequence on each call, because the request may run more than once."""
        sequence = _sequence(self.request, self.limits)
        if self.request.resume is not None:
            _resume(sequence, self.request.resume)
        return sequence

    def resumed(self, resume: Resume | None) -> "CheckedRequest":
        return check_request(replace(self.request, resume=resume), self.limits)


def check_request(request: Request, limits: Limits) -> CheckedRequest:
    """Check a request once, on arrival; raise ValueError with a reason if it cannot run."""
    return _checked(request, check(request, limits), limits)


def _checked(request: Request, sequence: Sequence, limits: Limits) -> CheckedRequest:
    footprint = limits.footprint(sequence)
    depth = None if sequence.automaton is None else sequence.automaton.depth
    return CheckedRequest(
        request,
        limits,
        footprint,
        restarts=sequence.restarts,
        num_blocks=sequence.canvas.num_blocks,
        block_positions=sequence.block.length,
        depth=depth,
    )


def check_choices(request: Request, limits: Limits, uid: Callable[[], int]) -> list[CheckedRequest]:
    """Return an engine request for each of the `n` choices, each with its own seed.

    They differ only in uid and seed, so one check is enough.
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
    params = request.params
    if not request.prompt and not request.suffix:
        raise InvalidField("the prompt is empty; give it at least one token", "prompt")
    _check_ids(request, limits)
    if limits.mask_token_id in request.answer:
        raise InvalidField("a mask token has no log-probability; leave it out", "answer")
    sequence = _sequence(request, limits)
    if request.suffix and sequence.policy.causal_length:
        raise InvalidField(
            "a suffix does not fit here: attention is block-causal, so the text cannot depend on "
            "what follows; use a model with bidirectional attention",
            "suffix",
        )
    _check_choice(sequence, limits)
    automaton = sequence.automaton is not None
    check_pairs(Asked(sequence.policy, params, bool(request.suffix), automaton))
    _check_order(sequence)
    if request.grammar:
        _check_grammar(sequence)
    grows, canvas = sequence.policy.canvas_length > 0, sequence.canvas
    needed = max(canvas.most_length, canvas.limit) if grows else canvas.length
    if needed > limits.context:
        suffix = f", suffix ({len(request.suffix)})" if request.suffix else ""
        raise InvalidField(
            f"prompt ({len(request.prompt)} tokens){suffix} and max_tokens ({params.max_tokens}) "
            f"need {needed} positions, but the context has {limits.context}; "
            "shorten one of them",
            "max_tokens",
        )
    pages = limits.pages(sequence, needed)
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
    eos_ids = () if params.ignore_eos else limits.eos_token_ids
    end_ids = frozenset((*params.stop_token_ids, *eos_ids))
    template = _template(request, limits)
    pinned = 0 if template is None else slots_stop(template.cells)
    policy = Policy.resolve(params.diffusion, spec, pinned, suffix=bool(request.suffix))
    automaton = _automaton(request, limits, end_ids)
    if policy.iteration.drafts and limits.mask_token_id < 0:
        raise InvalidField(
            f"iteration {policy.iteration.kind!r} needs a mask token, which this model has not; "
            "start with --mask-token-id, as the adapter's authors say",
            "diffusion.iteration",
        )
    if policy.iteration.drafts and reads_back(Asked(policy, params, automaton=bool(automaton))):
        policy = replace(policy, block_length=1)  # logits hang on the drafts before them
    # A block of one has no masks; an adapter that the request gives to its masks is their own.
    masks = policy.iteration.strided and policy.block_length > 1
    taken = request.lora is not None and policy.iteration.adapts_drafts
    context = limits.positions(guided=params.diffusion.cfg_scale > 0)
    parts = request.prompt, request.suffix, params.max_tokens, policy, spec, context
    if template is not None:
        canvas: Canvas = PinnedCanvas(*parts, template)
    elif request.answer and policy.iteration.next_token:
        canvas = GivenDrafts(*parts, request.answer)
    elif request.answer:
        canvas = GivenCanvas(*parts, request.answer, frozenset(request.places))
    else:
        canvas = (DraftedCanvas if policy.iteration.drafts else Canvas)(*parts)
    return Sequence(
        uid=request.uid,
        params=params,
        canvas=canvas,
        end_ids=end_ids,
        watch=request.watch,
        cache_salt=request.cache_salt,
        lora=request.lora,
        drafter=limits.drafter if masks and not taken else None,
        automaton=automaton,
        images=images_of(request.prompt, request.images, spec.sight),
    )


def _automaton(request: Request, limits: Limits, end_ids: frozenset[int]) -> Automaton | None:
    """Return the automaton of the tokens that the request allows; None if it needs none."""
    params = request.params
    avoided = params.bad_token_sequences
    if params.diffusion.canvas == "pinned" or not (request.grammar or avoided):
        return None
    if request.grammar:
        banned = _banned(request, limits, limits.eos_token_ids)
        return restricted(request.grammar, banned, avoided)
    early = end_ids if params.min_tokens else frozenset[int]()
    return avoiding(avoided, _banned(request, limits, end_ids), early, limits.spec.vocab_size)


def _template(request: Request, limits: Limits) -> Template | None:
    """Return a pinned canvas's template; its slots take only the tokens that the request allows."""
    params = request.params
    if params.diffusion.canvas != "pinned":
        return None
    if not request.grammar:
        raise InvalidField(
            "diffusion.canvas 'pinned' needs structured outputs to fill in: a JSON schema or a "
            "choice",
            "diffusion.canvas",
        )
    return Template.from_bytes(request.grammar, _banned(request, limits, limits.eos_token_ids))


def _banned(request: Request, limits: Limits, ends: Iterable[int]) -> frozenset[int]:
    params = request.params
    banned = {limits.mask_token_id, *params.bad_token_ids}
    if params.allowed_token_ids:
        banned |= set(range(limits.spec.vocab_size)) - {*params.allowed_token_ids, *ends}
    return frozenset(banned)


def _check_ids(request: Request, limits: Limits) -> None:
    params, size = request.params, limits.spec.vocab_size
    resumed = request.resume.ids if request.resume is not None else ()
    for name, ids in (
        ("prompt", request.prompt),
        ("suffix", request.suffix),
        ("resume", resumed),
        ("answer", request.answer),
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias),
        ("bad_token_ids", params.bad_token_ids),
        ("bad_token_sequences", chain.from_iterable(params.bad_token_sequences)),
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


def _check_order(sequence: Sequence) -> None:
    """Refuse options that need all text before a token to be final, if blocks are longer than 1."""
    length = sequence.policy.block_length
    if sequence.params.no_repeat_ngram_size and length > 1:
        raise InvalidField(
            "no_repeat_ngram_size needs diffusion.block_length 1: in a longer block "
            f"(here {length}) a token is chosen before those in front of it are final",
            "no_repeat_ngram_size",
        )


def _check_grammar(sequence: Sequence) -> None:
    """Refuse parameters that no text of the grammar satisfies."""
    automaton, params = sequence.automaton, sequence.params
    for name in ("ignore_eos", "min_tokens"):
        if getattr(params, name):
            raise InvalidField(
                f"{name} does not go with structured outputs, which end where they are complete",
                name,
            )
    if isinstance(sequence.canvas, PinnedCanvas):
        _check_template(sequence.canvas.template, params)
    elif automaton is not None and automaton.shortest > params.max_tokens:
        raise InvalidField(
            f"structured outputs: the shortest text takes {automaton.shortest} tokens, end token "
            f"included, and max_tokens is {params.max_tokens}"
            if automaton.shortest < UNREACHABLE
            else "structured outputs: the allowed tokens leave no text that satisfies them",
            "max_tokens" if automaton.shortest < UNREACHABLE else "structured_outputs",
        )


def _check_template(template: Template, params: SamplingParams) -> None:
    size = len(template.cells)
    if size > params.max_tokens:
        raise InvalidField(
            f"the pinned canvas has {size} positions, end token included, and max_tokens is "
            f"{params.max_tokens}; raise it, or lower diffusion.slot_length",
            "max_tokens",
        )
    for number, slot in enumerate(template.slots):
        if slot.automaton.shortest - 1 > template.cells.count(-1 - number):
            raise InvalidField(
                f"the allowed tokens leave no value for {slot.path!r}", "structured_outputs"
            )
    pinned = {cell for cell in template.cells[:-1] if cell >= 0}
    refused = pinned.intersection(params.bad_token_ids)
    if params.allowed_token_ids:
        refused |= pinned.difference(params.allowed_token_ids)
    if refused:
        raise InvalidField(
            f"token {min(refused)} stands on the pinned canvas; allow it",
            "allowed_token_ids" if params.allowed_token_ids else "bad_token_ids",
        )


def _resume(sequence: Sequence, resume: Resume) -> None:
    """Bring a new sequence to the state of a resumed request; refuse an impossible state."""
    ids, (blocks, steps) = resume.ids, resume.progress
    unfit = ValueError(
        f"resume: {len(ids)} tokens, with {blocks} blocks finished in {steps} steps, do not "
        "fit the request; use Resume.after() with all its updates"
    )
    if not 0 <= blocks <= sequence.canvas.num_blocks:
        raise unfit
    sequence.resume(ids, (blocks, steps), resume.forwards)
    if sequence.reported.tokens == sequence.params.max_tokens and sequence.reported.end_id is None:
        raise ValueError("resume: all tokens were reported, so there is nothing left to do")
    if sequence.reported.end_id is not None and sequence.policy.iteration.early_stop:
        raise ValueError("resume: the end token was reported, so there is nothing left to do")
    # A pinned answer is reported as a whole, however many literals its first blocks are.
    reported = 0 if sequence.canvas.shrinks else sequence.block.start - sequence.canvas.prompt_len
    if (
        blocks == sequence.canvas.num_blocks
        or not max(reported, 0) <= len(ids) <= sequence.params.max_tokens
        or (steps < blocks if blocks else steps)
        or not sequence.end_ids.isdisjoint(ids[:-1])
    ):
        raise unfit
