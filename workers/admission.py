"""Whether a request can run: refused with a reason before it takes any memory."""

from dataclasses import dataclass

from diffray.components.model import ModelSpec
from diffray.components.policy import Policy
from diffray.components.sequence import Sequence
from diffray.workers.messages import Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can hold and what its model is, for those who must judge without it."""

    spec: ModelSpec
    context: int  # positions of the longest canvas
    max_num_seqs: int
    num_pages: int  # that can be handed out
    page_size: int
    eos_token_ids: tuple[int, ...]

    def pages(self, sequence: Sequence, stop: int) -> int:
        """Return how many K/V pages the first `stop` positions take; a guided one needs two."""
        return -(-stop // self.page_size) * (2 if sequence.guided else 1)


def check(request: Request, limits: Limits) -> Sequence:
    """Return the request as a sequence, or refuse it with a reason."""
    spec, params = limits.spec, request.params
    if not request.prompt:
        raise ValueError("the prompt is empty; give it at least one token")
    for token_id in (*request.prompt, *params.stop_token_ids, *params.logit_bias):
        if not 0 <= token_id < spec.vocab_size:
            raise ValueError(
                f"token id {token_id} is not in the vocabulary (0 to {spec.vocab_size - 1})"
            )
    end_ids = (*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids))
    sequence = Sequence(
        uid=request.uid,
        prompt=request.prompt,
        params=params,
        policy=Policy.resolve(params.diffusion, spec),
        block_causal=spec.block_causal,
        end_ids=frozenset(end_ids),
    )
    if sequence.length > limits.context:
        raise ValueError(
            f"prompt ({len(request.prompt)} tokens) and max_tokens ({params.max_tokens}) need "
            f"{sequence.length} positions, but the context has {limits.context}; "
            "shorten one of them"
        )
    pages = limits.pages(sequence, sequence.length)
    if pages > limits.num_pages:
        raise ValueError(
            f"the request needs {pages} K/V pages, but the pool has {limits.num_pages}; "
            "shorten it or give the engine more K/V memory"
        )
    return sequence
