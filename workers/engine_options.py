"""The options of one engine, each declared once: its type, default, bounds and meaning.

`DiffusionLLM` takes them as keywords and every rank of a cluster as a mapping; the command line's
flags and docs/configuration.md are generated from here. This module does not import torch, because
the coordinator and the command line's help read it too.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Items
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypedDict

from pydantic import Field, field_validator, model_validator

from diffray.components.config import Config
from diffray.components.dtypes import DTypeName, dtype_name
from diffray.components.memory_size import in_bytes
from diffray.components.quantization import parse_quantization

if TYPE_CHECKING:
    import torch

DType = Literal["auto", DTypeName]
Kernels = Literal["auto", "torch", "triton"]
KVCacheDType = Literal["auto", "int8", "uint4"]
FirstStepCaching = Literal["off", "step0", "approx"]
Quantization = str | dict[str, str]
# The options that need block-causal attention.
PREFIX_OPTIONS: Final = ("enable_prefix_caching", "swap_space", "prefix_cache_ttl")


class EngineOptions(Config):
    """How an engine runs a model on one device; the checkpoint says the rest."""

    dtype: DType = Field(
        "auto",
        description="The dtype of weights and activations; auto is bfloat16 if the device is fast "
        "at it, else float32. Also accepted: bf16, fp16, half, fp32 and float.",
    )
    device: str = Field(
        "auto",
        description="cpu, cuda, cuda:N (in one process only), or auto: a GPU if there is one.",
    )
    kernels: Kernels = Field(
        "auto",
        description="The kernels; auto is triton if the GPU supports it, else torch with programs "
        "in C for float32 on a CPU.",
    )
    quantization: Quantization | None = Field(
        None,
        description="Quantize weights: one format for all linear layers except the head (int8, "
        "uint8, int4, uint4, fp8, w8a8, w8a8_fp8, for CPUs q8_0, q4_0, q4_1; int4_g128 has a scale "
        "per 128 weights), or a format for each part (experts=fp8,attention=int8,head=int8). "
        "Default: weights are in dtype.",
    )
    lora_modules: dict[str, str] = Field(
        {},
        description="LoRA adapters by name (NAME=PATH, repeatable): folders or Hub ids of PEFT "
        "adapters. A request names the one to use; over HTTP, as its model.",
    )
    max_loras: int = Field(
        8, ge=1, description="The most LoRA adapters to keep loaded; those in use always stay."
    )
    max_lora_rank: int = Field(64, ge=1, description="The largest rank of a LoRA adapter.")
    received_weights: str | None = Field(
        None,
        description="A folder, for this model alone, that all ranks and replicas can read, for "
        "weights that a trainer sends; it keeps the newest two. Default: none are received.",
    )
    cuda_graphs: bool | None = Field(
        None,
        description="Record CUDA graphs at startup; default: with triton kernels.",
    )
    graph_block_length: int | None = Field(
        None,
        ge=1,
        description="The block length that CUDA graphs are recorded for; default: the model's own. "
        "DiffusionLLM takes it from its diffusion argument.",
    )
    bring_up: bool = Field(
        True,
        description="At the first start of a model on a GPU, check its kernels against torch's; "
        "the outcome is kept on disk.",
    )
    enable_prefix_caching: bool | None = Field(
        None,
        description="Share the K/V of common prefixes, which needs block-causal attention; "
        "default: if the model has it.",
    )
    first_step_caching: FirstStepCaching = Field(
        "off",
        description="Share first steps where attention is bidirectional: step0, between requests "
        "with the same prompt and length, is exact; approx also reuses the K/V of a prompt that "
        "starts the same, which changes tokens.",
    )
    mask_token_id: int | None = Field(
        None, description="The mask token's id, if the checkpoint does not say."
    )
    eos_token_id: int | tuple[int, ...] | None = Field(
        None, description="The ids of the tokens that end a text, if the checkpoint does not say."
    )
    max_model_len: int | None = Field(
        None,
        ge=1,
        description="The most tokens of a prompt with its answer; default: the model's context.",
    )
    max_num_seqs: int = Field(
        16, ge=1, description="The most sequences to run at once; on a cluster in each replica."
    )
    kv_cache_memory: int | None = Field(
        None,
        ge=1,
        description="Memory for the K/V cache of each rank, in bytes or such as 4GiB; default: "
        "half of what is free once the weights are loaded, at most two contexts for each of "
        "max_num_seqs.",
    )
    kv_cache_dtype: KVCacheDType = Field(
        "auto",
        description="Quantize K/V to 8 bits, with a scale per head of a token, or to 4 bits, with "
        "a scale per 32 numbers of a head; auto keeps them in dtype.",
    )
    page_size: int = Field(16, ge=1, description="Positions per page of the K/V cache.")
    swap_space: float = Field(
        0.0,
        ge=0,
        description="Host memory of each rank for prefixes that the K/V cache has no room for, in "
        "GiB or such as 512MiB; 0: they are dropped, and recomputed when needed.",
    )
    prefix_cache_ttl: float | None = Field(
        None,
        gt=0,
        description="Seconds after which an unused prefix is dropped; default: only when its "
        "memory is needed.",
    )
    chunk: int = Field(
        512,
        ge=1,
        description="The most prompt positions to store in one forward, where attention is "
        "block-causal.",
    )
    steps_per_round: int = Field(
        1,
        ge=1,
        le=32,
        description="The most denoising steps of a round, which may span several short blocks. "
        "Requests join, and tokens are reported, between rounds.",
    )
    draft_overhead: int | None = Field(
        None,
        ge=0,
        description="The fixed cost of a forward, as a number of positions: the larger it is, the "
        "more drafts speculation and `introspective` run; 0: no drafts. "
        "Default: by device and model.",
    )
    cpu_threads: int | None = Field(
        None,
        ge=1,
        description="Threads per rank on CPU; default: one per 8 million weights, up to "
        "OMP_NUM_THREADS.",
    )

    if TYPE_CHECKING:  # other names of dtypes and sizes with a unit are accepted too

        def __init__(self, **given: Any) -> None: ...

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_by_name(cls, given: object) -> str:
        return dtype_name(given)

    @field_validator("device", mode="before")
    @classmethod
    def _device_by_name(cls, given: object) -> str:
        return str(given)  # a torch.device has the same name here

    @field_validator("lora_modules", mode="before")
    @classmethod
    def _named_paths(cls, given: Any) -> Any:
        """Read NAME=PATH, as the command line gives them."""
        if not isinstance(given, list | tuple):
            return given
        pairs = [str(each).partition("=") for each in given]
        if wrong := next((name for name, equals, path in pairs if not (name and path)), None):
            raise ValueError(f"expected NAME=PATH (given: {wrong!r})")
        return {name: path for name, _, path in pairs}

    @field_validator("quantization")
    @classmethod
    def _known(cls, given: Quantization | None) -> Quantization | None:
        if given is not None:
            parse_quantization(given)
        return given

    @property
    def prefix_options(self) -> list[str]:
        """The given options that need block-causal attention."""
        return [name for name in PREFIX_OPTIONS if getattr(self, name)]

    @field_validator("swap_space", mode="before")
    @classmethod
    def _gibibytes(cls, given: Any) -> Any:
        """Read a size with a unit; a number without one is GiB, as in vLLM."""
        if isinstance(given, str) and not given.strip().replace(".", "", 1).isdecimal():
            return (in_bytes(given) or 0) / 2**30
        return given

    @model_validator(mode="after")
    def _check_prefix_options(self) -> Self:
        for name in PREFIX_OPTIONS[1:]:
            if getattr(self, name) and self.enable_prefix_caching is False:
                raise ValueError(f"{name} has no effect without enable_prefix_caching; drop one")
        return self

    @field_validator("kv_cache_memory", mode="before")
    @classmethod
    def _bytes(cls, given: Any) -> Any:
        return in_bytes(given)


class EngineKeywords(TypedDict, total=False):
    """The same options for type checkers and editors, with every type that is accepted.

    A test compares the two classes.
    """

    dtype: "DType | str | torch.dtype"
    device: "str | torch.device"
    kernels: Kernels | str
    quantization: "Mapping[str, str] | str | None"
    lora_modules: "Mapping[str, str]"
    max_loras: int
    max_lora_rank: int
    received_weights: str | None
    cuda_graphs: bool | None
    graph_block_length: int | None
    bring_up: bool
    enable_prefix_caching: bool | None
    first_step_caching: FirstStepCaching | str
    mask_token_id: int | None
    eos_token_id: int | Items[int] | None
    max_model_len: int | None
    max_num_seqs: int
    kv_cache_memory: int | str | None
    kv_cache_dtype: KVCacheDType | str
    page_size: int
    swap_space: float | str
    prefix_cache_ttl: float | None
    chunk: int
    steps_per_round: int
    draft_overhead: int | None
    cpu_threads: int | None


def list_options(made: type, options_of: type[EngineOptions] = EngineOptions) -> None:
    """Make `help()` and notebooks list every option of a class, with its type and meaning."""
    fields, plain = options_of.model_fields, signature(made)
    own = [each for each in plain.parameters.values() if each.kind is not Parameter.VAR_KEYWORD]
    options = [
        Parameter(name, Parameter.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
        for name, field in fields.items()
    ]
    made.__signature__ = plain.replace(parameters=own + options)  # type: ignore[attr-defined]
    listed = "".join(f"\n    {name}: {field.description}" for name, field in fields.items())
    made.__doc__ = f"{made.__doc__}{listed}\n    "
