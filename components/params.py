"""The parameters of a request, with the names of OpenAI and vLLM."""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypedDict, Unpack

from pydantic import Field, field_validator, model_validator

from diffray.components.config import Config, InvalidField
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.policy import IN_DIFFUSION, DiffusionParams

NO_PROMPT_LOGPROBS: Final = (
    "leave it out, and send echo: true with logprobs to /v1/completions, or call "
    "DiffusionLLM.loglikelihood"
)
COLDEST: Final = 1e-5  # temperature; below it sampling is greedy, as in vLLM

# Names of HF's `generate` and of vLLM, and what to write instead.
_ELSEWHERE: Final = IN_DIFFUSION | {
    "max_new_tokens": "write max_tokens",
    "min_new_tokens": "write min_tokens",
    "do_sample": "write temperature; 0 is greedy",
    "num_return_sequences": "write n",
    "guided_decoding": "write structured_outputs",
    "prompt_logprobs": NO_PROMPT_LOGPROBS,
}


class SamplingKeywords(TypedDict, total=False):
    """The fields of SamplingParams for type checkers and editors, with all accepted types.

    A test compares the two.
    """

    n: int
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    no_repeat_ngram_size: int
    lora: str
    seed: int | None
    stop: str | Items[str]
    include_stop_str_in_output: bool
    stop_token_ids: Items[int]
    ignore_eos: bool
    logit_bias: Mapping[int, float]
    bad_token_ids: Items[int]
    bad_words: Items[str]
    bad_token_sequences: Items[Items[int]]
    allowed_token_ids: Items[int]
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None
    logprobs: bool
    top_logprobs: int
    skip_special_tokens: bool
    diffusion: DiffusionParams | Mapping[str, Any]


class SamplingParams(Config):
    """One request's parameters; an invalid value raises ValueError with what is allowed."""

    elsewhere: ClassVar[Mapping[str, str]] = _ELSEWHERE

    n: int = Field(1, ge=1, le=128, description="How many answers to generate.")
    max_tokens: int = Field(128, ge=1, description="The most tokens to generate.")
    min_tokens: int = Field(
        0, ge=0, lt=2**31, description="The fewest tokens to generate before an end token."
    )
    # below COLDEST: 0
    temperature: float = Field(0.0, ge=0, le=100, description="0 is greedy.")
    top_p: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Sample from the most probable tokens that add up to this probability.",
    )
    top_k: int = Field(
        0, ge=-1, lt=2**63, description="Sample from this many most probable tokens; 0 and -1: all."
    )
    min_p: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Sample only from tokens with at least this share of the best one's "
        "probability.",
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Subtracted from the logits of tokens in the answer."
    )
    frequency_penalty: float = Field(
        0.0,
        ge=-2,
        le=2,
        description="Subtracted from a token's logit for each time that the answer has it.",
    )
    repetition_penalty: float = Field(
        1.0,
        ge=0.01,
        le=100,
        description="Above 1, tokens in the prompt or the answer become less probable.",
    )
    no_repeat_ngram_size: int = Field(
        0,
        ge=0,
        lt=2**31,
        description="Never repeat this many tokens in a row; needs blocks of one position; 0: off.",
    )
    lora: str = Field(
        "", description="The name of a loaded LoRA adapter to answer with; default: none."
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="The seed of sampling; default: a new one each time.",
    )
    stop: tuple[str, ...] = Field((), description="Stop before any of these texts.")
    include_stop_str_in_output: bool = Field(
        False, description="Keep the text or token that stopped the answer."
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), description="Ids of additional tokens that end the answer."
    )
    ignore_eos: bool = Field(False, description="Generate past the model's end tokens.")
    logit_bias: dict[int, float] = Field(
        default_factory=dict,
        description="Token ids and what is added to their logits, from -100 to 100.",
    )
    bad_token_ids: tuple[int, ...] = Field((), description="Token ids that are never generated.")
    bad_words: tuple[str, ...] = Field(
        (),
        description="Words that are never generated: their tokens alone, and after a space.",
    )
    bad_token_sequences: tuple[tuple[int, ...], ...] = Field(
        (), description="Sequences of token ids that are never generated."
    )
    allowed_token_ids: tuple[int, ...] = Field(
        (), description="The only token ids that are generated, besides end tokens; default: all."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None,
        description="What the answer must match: a JSON schema, regex, choice or grammar.",
    )
    logprobs: bool = Field(
        False,
        description="Report each token's log-probability when it became final, and the step.",
    )
    top_logprobs: int = Field(
        0,
        ge=0,
        le=20,
        description="The most probable tokens to report at each position; needs logprobs.",
    )
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of the text.")
    diffusion: DiffusionParams = Field(
        DiffusionParams(), description="How to denoise: decoder, cache and so on."
    )

    if TYPE_CHECKING:  # accepts dicts for the parts of `diffusion`, lists for tuples

        def __init__(self, **given: Unpack[SamplingKeywords]) -> None: ...

    @property
    def draws(self) -> bool:
        """Whether tokens are sampled; logits divided by a lower temperature would overflow."""
        return self.temperature >= COLDEST

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, given: Any) -> Any:
        return (given,) if isinstance(given, str) else given

    @field_validator("logprobs", mode="before")
    @classmethod
    def _no_count(cls, given: Any) -> Any:
        if isinstance(given, int | float) and not isinstance(given, bool):
            raise ValueError(
                "write True or False; the most probable ids of each token come with "
                f"logprobs=True and top_logprobs=N (given: {given!r:.200})"
            )
        return given

    @field_validator("logit_bias")
    @classmethod
    def _finite_bias(cls, given: dict[int, float]) -> dict[int, float]:
        for token_id, bias in given.items():
            if token_id < 0 or not -100 <= bias <= 100:
                raise ValueError(
                    f"token {token_id}: {bias} is not allowed; ids are >= 0, biases -100 to 100"
                )
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.min_tokens > self.max_tokens:
            raise InvalidField(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidField("top_logprobs needs logprobs=True", "top_logprobs")
        for name in ("bad_words", "bad_token_sequences"):
            if not all(getattr(self, name)):
                raise InvalidField(f"{name}: one is empty; leave it out", name)
        if "" in self.stop:
            raise InvalidField("stop: an empty string would stop everything; leave it out", "stop")
        return self
