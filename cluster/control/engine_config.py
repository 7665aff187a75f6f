"""How one model's engine is laid out over its ranks."""

from typing import Any, Final, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from diffray.cluster.control.heartbeat import BEATS
from diffray.components.config import Config
from diffray.components.dtypes import DTYPE_NAMES, dtype_name
from diffray.components.memory_size import in_bytes

_NAMES: Final = {
    "dtype": ("auto", *DTYPE_NAMES),
    "kernels": ("auto", "torch", "triton"),
    "quantization": (None, "experts_int8", "experts_fp8"),
    "scheduling_policy": ("fcfs", "priority"),
}


class EngineConfig(Config):
    """Names follow vLLM's flags. Without torch: the coordinator reads it too."""

    tensor_parallel_size: int = Field(1, ge=1)
    expert_parallel: bool = False  # experts dealt out over the same ranks, instead of cut
    device: str = "auto"  # auto | cpu | cuda
    dtype: str = "auto"
    kernels: str = "auto"  # auto | torch | triton
    quantization: str | None = None  # experts_int8 | experts_fp8; None: as dtype says
    cuda_graphs: bool | None = None  # None: on one GPU, with Triton's kernels
    # Of most requests: for what steps graphs are made. None: the model's own.
    graph_block_length: int | None = Field(None, ge=1)
    tune_kernels: bool = False  # find the fastest tiles for this model first, and keep them
    enable_prefix_caching: bool | None = None  # None: where attention is block-causal
    mask_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    max_model_len: int | None = Field(None, ge=1)
    max_num_seqs: int = Field(16, ge=1)
    max_queued_requests: int = Field(256, ge=0)
    kv_cache_memory: int | None = Field(None, ge=1)  # on each rank: bytes, or as "4GiB"
    page_size: int = Field(16, ge=1)
    chunk: int = Field(512, ge=1)
    steps_per_round: int = Field(1, ge=1)
    rounds_in_flight: int = Field(2, ge=1, le=4)
    scheduling_policy: str = "fcfs"  # fcfs | priority: whether requests may say their priority
    time_slice: int = Field(64, ge=0)  # steps after which a request may give way; 0: never
    cpu_threads: int | None = Field(None, ge=1)  # of each rank on CPU; None: as many as help
    load_timeout_s: float = Field(1800.0, gt=0)
    heartbeat_timeout_s: float = Field(4.0, ge=1)  # a process silent for longer is taken for hung
    round_timeout_s: float = Field(30.0, gt=0)  # and so are ranks if a round takes longer
    check_every: int = Field(64, ge=0)  # rounds between comparisons of the ranks' canvases; 0: none
    max_restarts: int = Field(5, ge=0)  # of the ranks, within ten minutes

    @field_validator("dtype", mode="before")
    @classmethod
    def _by_its_name_here(cls, given: object) -> str:
        return dtype_name(given)

    @field_validator("kv_cache_memory", mode="before")
    @classmethod
    def _bytes(cls, given: Any) -> Any:
        return in_bytes(given)

    @field_validator(*_NAMES)
    @classmethod
    def _known(cls, name: str | None, info: ValidationInfo) -> str | None:
        allowed = _NAMES[info.field_name or ""]
        if name not in allowed:
            raise ValueError(f"{name!r} is none of {', '.join(filter(None, allowed))}")
        return name

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats."""
        return self.heartbeat_timeout_s / BEATS

    @model_validator(mode="after")
    def _experts_need_ranks(self) -> Self:
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("expert_parallel needs tensor_parallel_size of at least 2")
        return self

    def setup(self) -> dict[str, Any]:
        """Return what every rank's `workers.setup.Setup` is made from."""
        return {
            "dtype": self.dtype,
            "device": self.device,
            "kernels": self.kernels,
            "quantization": self.quantization,
            "cuda_graphs": self.cuda_graphs,
            "graph_block_length": self.graph_block_length,
            "tune_kernels": self.tune_kernels,
            "enable_prefix_caching": self.enable_prefix_caching,
            "mask_token_id": self.mask_token_id,
            "eos_token_id": self.eos_token_id,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "kv_cache_memory": self.kv_cache_memory,
            "page_size": self.page_size,
            "chunk": self.chunk,
            "cpu_threads": self.cpu_threads,
        }
