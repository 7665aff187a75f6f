"""Which options go together, and which fit a model: a table of pairs, then longer reasons."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from diffray.components.cache import CachePolicy
from diffray.components.config import InvalidField
from diffray.components.decoder import Decoder
from diffray.components.decoders.sequential import Sequential
from diffray.components.iterations import Iteration
from diffray.components.model_spec import ModelSpec

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams
    from diffray.components.policy import DiffusionParams, Policy

LONGEST_REMEMBERED: Final = 512  # positions of a block; memory and time grow with its square


class Asked(NamedTuple):
    """A policy, and the rest of a request, which is missing while the policy is resolved."""

    policy: "Policy"
    params: "SamplingParams | None" = None
    suffix: bool = False
    automaton: bool = False  # of a grammar, or of words

    def get(self, name: str) -> object:
        """Return a sampling parameter; None without a request."""
        return getattr(self.params, name, None)

    @property
    def penalties(self) -> bool:
        names = "presence_penalty", "frequency_penalty", "repetition_penalty"
        return self.params is not None and [*map(self.get, names)] != [0, 0, 1]

    @property
    def canvas(self) -> str | None:
        return None if self.params is None else self.params.diffusion.canvas


class Option(NamedTuple):
    """Something that a request may ask for."""

    field: str
    subject: str  # of the sentence "... not go with ..."
    used: Callable[[Asked], object]


OPTIONS: Final = {
    "soft": Option(
        "diffusion.iteration", "iteration {iteration!r} does", lambda a: a.policy.iteration.soft
    ),
    "unforeseen": Option(  # the next steps do not follow from one forward
        "diffusion.decoder",
        "decoder {decoder!r} does",
        lambda a: _unforeseen(a.policy.decoder),
    ),
    "moving window": Option(
        "diffusion.cache", "cache {cache!r} does", lambda a: a.policy.cache.follows_masks
    ),
    "guidance": Option("diffusion.cfg_scale", "cfg_scale does", lambda a: a.policy.cfg_scale > 0),
    "pinned": Option("diffusion.canvas", "canvas 'pinned' does", lambda a: a.canvas == "pinned"),
    "structured": Option(
        "structured_outputs", "structured outputs do", lambda a: a.get("structured_outputs")
    ),
    "words": Option(
        "bad_words", "bad_words of several tokens do", lambda a: a.get("bad_token_sequences")
    ),
    "grammar": Option("structured_outputs", "structured outputs do", lambda a: a.automaton),
    "penalties": Option("repetition_penalty", "penalties do", lambda a: a.penalties),
    "n-grams": Option(
        "no_repeat_ngram_size",
        "no_repeat_ngram_size does",
        lambda a: a.get("no_repeat_ngram_size"),
    ),
    "rankings": Option("top_logprobs", "top_logprobs does", lambda a: a.get("top_logprobs")),
    "top_p": Option("top_p", "top_p does", lambda a: a.get("top_p") not in (None, 1)),
    "top_k": Option("top_k", "top_k does", lambda a: (a.params is not None) and a.params.top_k > 0),
    "min_p": Option("min_p", "min_p does", lambda a: a.get("min_p")),
    "doubted": Option(
        "diffusion.zero_confidence_token_ids",
        "zero_confidence_token_ids do",
        lambda a: a.params is not None and a.params.diffusion.zero_confidence_token_ids,
    ),
    "suffix": Option("suffix", "a suffix does", lambda a: a.suffix),
    "speculation": Option(
        "diffusion.speculation", "speculation does", lambda a: a.policy.speculation
    ),
}


class Rule(NamedTuple):
    """What does not go with something."""

    other: str
    used: Callable[[Asked], object]
    options: tuple[str, ...]
    advice: str


# A token depends on others of its block, or more than a canvas would have to be copied.
_NOT_COPIED: Final = "structured", "words", "grammar", "penalties", "n-grams", "rankings"
TABLE: Final = (
    Rule(
        "diffusion.speculation",
        lambda a: a.policy.speculation,
        ("soft", "unforeseen", "moving window", "guidance", "pinned", *_NOT_COPIED),
        "leave it out, or set speculation to null",
    ),
    # A canvas of noise has no final tokens before its end, and its sampler no filters.
    Rule(
        "iteration {iteration!r}, the only one of this model",
        lambda a: a.policy.iteration.renoises,
        ("guidance", "top_p", "top_k", "min_p", "penalties", "n-grams", "doubted", "words",
         "grammar"),
        "leave it out",
    ),
    Rule(
        "iteration {iteration!r}",
        lambda a: a.policy.iteration.next_token,
        ("guidance", "speculation", "doubted"),
        "leave it out",
    ),
    Rule(
        "iteration {iteration!r}",
        lambda a: a.policy.iteration.soft,
        ("guidance",),
        "leave one of them out",
    ),
    Rule(
        "diffusion.canvas 'pinned'",
        lambda a: a.canvas == "pinned",
        ("suffix", "words", "n-grams"),
        "use another",
    ),
)  # fmt: skip


def check_pairs(asked: Asked) -> None:
    """Refuse options that the table says do not go together."""
    policy = asked.policy
    kinds = {name: getattr(policy, name).kind for name in ("iteration", "decoder", "cache")}
    for rule in TABLE:
        if rule.used(asked):
            for option in (OPTIONS[name] for name in rule.options):
                if option.used(asked):
                    pair = f"{option.subject} not go with {rule.other}".format(**kinds)
                    raise InvalidField(f"{pair}; {rule.advice}", option.field)


def reads_back(asked: Asked) -> bool:
    """Return whether the request's logits depend on the tokens before them in other ways too."""
    return any(OPTIONS[name].used(asked) for name in ("grammar", "penalties", "n-grams"))


def _unforeseen(decoder: Decoder) -> bool:
    remembers = decoder.gain() is not None
    return decoder.edits or remembers or decoder.measures


def grown_by(params: "DiffusionParams", decoder: Decoder, spec: ModelSpec, *, causal: bool) -> int:
    """Return the masks of a growing canvas; 0 if it does not grow."""
    if params.canvas_length is None:
        by_default = params.canvas is None and not decoder.counts_canvas
        grows = not causal and (params.canvas == "growing" or by_default)
        return spec.canvas_length if grows else 0
    if causal:
        raise InvalidField(
            "canvas_length does not fit here: attention is block-causal, so a block never sees "
            "those after it; leave it out",
            "diffusion.canvas_length",
        )
    if params.canvas in ("fixed", "pinned"):
        raise InvalidField(
            f"canvas_length is about a growing canvas, and this one is {params.canvas!r}; leave "
            "one of them out",
            "diffusion.canvas_length",
        )
    return params.canvas_length


def check_model(
    iteration: Iteration, decoder: Decoder, cache: CachePolicy, spec: ModelSpec, *, causal: bool
) -> None:
    """Refuse parts that do not fit the model."""
    if iteration.kind not in spec.iterations:
        raise InvalidField(
            f"iteration {iteration.kind!r} does not fit this model; use "
            f"{' or '.join(map(repr, spec.iterations))}",
            "diffusion.iteration",
        )
    if iteration.renoises and decoder.kind != "entropy_bound":
        raise InvalidField(
            f"decoder {decoder.kind!r} does not go with iteration {iteration.kind!r}; use "
            "'entropy_bound'",
            "diffusion.decoder",
        )
    if not (cache.block_causal if causal else cache.bidirectional):
        own = causal == spec.block_causal
        raise InvalidField(
            f"cache {cache.kind!r} does not fit {'this model' if own else iteration.kind}: "
            + (
                "its attention is block-causal, so finished blocks never change; "
                "use 'exact' or 'none'"
                if causal
                else "its attention is bidirectional, so no K/V is ever exact; "
                "use 'dual', 'vicinity', 'prefix' or 'none'"
            ),
            "diffusion.cache",
        )


def check_together(iteration: Iteration, decoder: Decoder, cache: CachePolicy, length: int) -> None:
    """Refuse parts of a policy that do not go together."""
    alone, strided = iteration.kind == "autoregressive", iteration.strided
    for name, differs in (("decoder", decoder != Sequential()), ("block_length", length > 1)):
        if differs and (alone or (strided and name == "decoder")):
            raise InvalidField(
                f"{name} does not go with iteration {iteration.kind!r}, which "
                + ("accepts what it verified" if strided else "writes one token at each step")
                + "; leave it out",
                f"diffusion.{name}",
            )
    if iteration.drafts and (_unforeseen(decoder) or decoder.counts_canvas):
        raise InvalidField(
            f"decoder {decoder.kind!r} does not go with iteration {iteration.kind!r}, whose drafts "
            "it cannot accept; use 'threshold' or 'sequential'",
            "diffusion.decoder",
        )
    if decoder.gain() is not None and length > LONGEST_REMEMBERED:
        raise InvalidField(
            f"block_length is {length}, and decoder {decoder.kind!r} takes blocks "
            f"of at most {LONGEST_REMEMBERED}: at each position it remembers as many ids as a "
            "block is long",
            "diffusion.block_length",
        )
    floored = iteration.soft and not iteration.renoises
    if (floored or iteration.sub_block()) and not decoder.has_threshold:
        raise InvalidField(
            f"iteration {iteration.kind!r} takes a decoder with a threshold, and "
            f"{decoder.kind!r} has none; use 'threshold', 'hierarchy', 'credit' or 'edit'",
            "diffusion.iteration",
        )
    if cache.follows_masks and not iteration.sub_block():
        raise InvalidField(
            f"cache {cache.kind!r} does not go with iteration {iteration.kind!r}, which has no "
            "sub-blocks; use 'exact'",
            "diffusion.cache",
        )


def check_canvas(
    params: "DiffusionParams", iteration: Iteration, decoder: Decoder, plain: str
) -> None:
    """Refuse parts that cannot denoise a canvas whose unused positions are removed, or no other."""
    if params.canvas != "pinned":
        if decoder.whole_slots:
            raise InvalidField(
                f"decoder {decoder.kind!r} decides the fields of a pinned canvas; add canvas: "
                "'pinned', or use another",
                "diffusion.decoder",
            )
        if params.slot_length is not None:
            raise InvalidField(
                "slot_length is about the fields of a pinned canvas; add canvas: 'pinned'",
                "diffusion.slot_length",
            )
        return
    if iteration.renoises or iteration.next_token:
        raise InvalidField(
            f"canvas 'pinned' does not go with iteration {iteration.kind!r}; leave it out",
            "diffusion.canvas",
        )
    if iteration.soft or iteration.first_alone:
        raise InvalidField(
            f"canvas 'pinned' goes with iteration {plain!r} alone; use that",
            "diffusion.iteration",
        )
    if decoder.edits:
        raise InvalidField(
            f"decoder {decoder.kind!r} replaces tokens, and those of a pinned canvas stay; use "
            "another",
            "diffusion.decoder",
        )
