"""Whether a request can run: refused with a reason before it takes any memory."""

from dataclasses import dataclass

from diffray.components.model import ModelSpec
from diffray.components.policy import Policy
from diffray.components.sequence import Sequence
from diffray.workers.messages import Request, Resume


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can hold and what its model is, for those who must judge without it."""

    spec: ModelSpec
    context: int  # positions of the longest canvas
    max_num_seqs: int
    num_pages: int  # that can be handed out
    page_size: int
    eos_token_ids: tuple[int, ...]
    mask_token_id: int

    def pages(self, sequence: Sequence, stop: int) -> int:
        """Return how many K/V pages the first `stop` positions take; a guided one needs two."""
        return -(-stop // self.page_size) * (2 if sequence.guided else 1)


def check(request: Request, limits: Limits) -> Sequence:
    """Return the request as a sequence, or refuse it with a reason."""
    spec, params = limits.spec, request.params
    if not request.prompt and not request.suffix:
        raise ValueError("the prompt is empty; give it at least one token")
    if request.suffix and spec.block_causal:
        raise ValueError(
            "a suffix does not fit this model: its attention is block-causal, so what is written "
            "cannot see what follows; use a model whose attention is bidirectional"
        )
    _check_ids(request, limits)
    end_ids = (*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids))
    sequence = Sequence(
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
    )
    _check_choice(sequence, limits)
    if sequence.length > limits.context:
        suffix = f", suffix ({len(request.suffix)})" if request.suffix else ""
        raise ValueError(
            f"prompt ({len(request.prompt)} tokens){suffix} and max_tokens ({params.max_tokens}) "
            f"need {sequence.length} positions, but the context has {limits.context}; "
            "shorten one of them"
        )
    pages = limits.pages(sequence, sequence.length)
    if pages > limits.num_pages:
        raise ValueError(
            f"the request needs {pages} K/V pages, but the pool has {limits.num_pages}; "
            "shorten it or give the engine more K/V memory"
        )
    if request.resume is not None:
        _resume(sequence, request.resume)
    return sequence


def _check_ids(request: Request, limits: Limits) -> None:
    params, size = request.params, limits.spec.vocab_size
    resumed = request.resume.ids if request.resume is not None else ()
    for token_id in (
        *request.prompt,
        *request.suffix,
        *resumed,
        *params.stop_token_ids,
        *params.logit_bias,
        *params.bad_token_ids,
        *params.allowed_token_ids,
        *params.diffusion.zero_confidence_token_ids,
    ):
        if not 0 <= token_id < size:
            raise ValueError(f"token id {token_id} is not in the vocabulary (0 to {size - 1})")


def _check_choice(sequence: Sequence, limits: Limits) -> None:
    """Refuse a request that leaves no token to write a text with."""
    params, size = sequence.params, limits.spec.vocab_size
    never = {limits.mask_token_id, *sequence.end_ids, *params.bad_token_ids}
    left = len(set(params.allowed_token_ids) - never) if params.allowed_token_ids else size
    if not left or len(never) == size:
        raise ValueError(
            "allowed_token_ids and bad_token_ids leave no token to write but the mask and end "
            "tokens; allow at least one more"
        )


def _resume(sequence: Sequence, resume: Resume) -> None:
    """Make a new sequence stand where another stood; refuses where none can have stood."""
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
