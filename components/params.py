"""The parameters of a request, with the names of OpenAI and vLLM."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from pydantic import Field, field_validator, model_validator

from diffray.components.config import Config, InvalidField
from diffray.components.grammar.structured import StructuredOutputs
from diffray.components.policy import IN_DIFFUSION, DiffusionParams

COLDEST: Final = 1e-5  # temperature; below it sampling is greedy, as in vLLM


class SamplingParams(Config):
    """One request's parameters; an invalid value raises ValueError with what is allowed."""

    elsewhere: ClassVar[Mapping[str, str]] = IN_DIFFUSION

    n: int = Field(1, ge=1, le=128, description="How many answers to generate.")
    max_tokens: int = Field(128, ge=1, description="The most tokens to generate.")
    min_tokens: int = Field(
        0, ge=0, description="The fewest tokens to generate before an end token."
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
        0, ge=-1, description="Sample from this many most probable tokens; 0 and -1: all."
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="The seed of sampling; default: another one each time.",
    )
    stop: tuple[str, ...] = Field((), description="Stop before any of these texts.")
    include_stop_str_in_output: bool = Field(
        False, description="Keep the text or token that stopped the answer."
    )
    stop_token_ids: tuple[int, ...] = Field(
        (), description="Ids of further tokens that end the answer."
    )
    ignore_eos: bool = Field(False, description="Generate past the model's end tokens.")
    logit_bias: dict[int, float] = Field(
        default_factory=dict,
        description="Token ids and what is added to their logits, from -100 to 100.",
    )
    bad_token_ids: tuple[int, ...] = Field((), description="Token ids that are never generated.")
    allowed_token_ids: tuple[int, ...] = Field(
        (), description="The only token ids that are generated, besides end tokens; default: all."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="The texts that the answer may be: a JSON schema, regex or choice."
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

        def __init__(self, **given: Any) -> None: ...

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
        if "" in self.stop:
            raise InvalidField("stop: an empty string would stop everything; leave it out", "stop")
        return self
