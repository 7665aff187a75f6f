"""What can be combined with a canvas of noise, whose tokens all become final together."""

from typing import TYPE_CHECKING

from diffray.components.config import InvalidField

if TYPE_CHECKING:
    from diffray.components.decoder import Decoder
    from diffray.components.iterations import Iteration
    from diffray.components.sequence import Sequence


def check_parts(iteration: "Iteration", decoder: "Decoder", plain: str, *, encodes: bool) -> None:
    """Refuse an iteration that does not fit the model, and decoders that handle only masks.

    `plain` is the default iteration of models that denoise masks.
    """
    if iteration.renoises != encodes:
        raise InvalidField(
            f"iteration {iteration.kind!r} does not fit this model: it denoises "
            + ("canvases of noise; use 'renoise'" if encodes else f"masks; use {plain!r}"),
            "diffusion.iteration",
        )
    if iteration.renoises and decoder.kind != "entropy_bound":
        raise InvalidField(
            f"decoder {decoder.kind!r} does not go with iteration {iteration.kind!r}; use "
            "'entropy_bound'",
            "diffusion.decoder",
        )


def check_request(sequence: "Sequence") -> None:
    """Refuse options that need final tokens in a canvas, or that the model's sampler lacks."""
    params = sequence.params
    penalties = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
    for name, given, what in (
        ("top_p", params.top_p < 1, "top_p does"),
        ("top_k", params.top_k > 0, "top_k does"),
        ("min_p", params.min_p > 0, "min_p does"),
        ("repetition_penalty", penalties != (0, 0, 1), "penalties do"),
        ("no_repeat_ngram_size", params.no_repeat_ngram_size > 0, "no_repeat_ngram_size does"),
        (
            "diffusion.zero_confidence_token_ids",
            bool(params.diffusion.zero_confidence_token_ids),
            "zero_confidence_token_ids do",
        ),
        ("bad_words", bool(params.bad_token_sequences), "bad_words of several tokens do"),
        ("structured_outputs", sequence.automaton is not None, "structured outputs do"),
    ):
        if given:
            raise InvalidField(
                f"{what} not go with iteration {sequence.policy.iteration.kind!r}, the only one "
                "of this model; leave it out",
                name,
            )
