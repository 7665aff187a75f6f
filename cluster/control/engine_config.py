"""The options of one model's engine: of each rank, and of all together.

It imports no torch, because the coordinator reads the options too.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from diffray.workers.engine_options import EngineKeywords, EngineOptions

BEATS = 6  # heartbeats within heartbeat_timeout_s


class RanksOptions(EngineOptions):
    """The options of a model that one or several ranks run."""

    # Options that users of vLLM and Hugging Face may try, and what to do instead.
    elsewhere: ClassVar[Mapping[str, str]] = {
        "gpu_memory_utilization": "write kv_cache_memory, such as '20GiB'",
        "enforce_eager": "write cuda_graphs=False",
        "trust_remote_code": "leave it out: no code of a checkpoint is run",
        "torch_dtype": "write dtype",
        "device_map": "write device, or tensor_parallel_size for several GPUs",
        "seed": "write it in SamplingParams",
    }

    tensor_parallel_size: int = Field(
        1, ge=1, description="The number of ranks to split a model over."
    )
    expert_parallel: bool = Field(
        False, description="Give each rank whole experts instead of a slice of each."
    )
    if TYPE_CHECKING:

        def __init__(self, **given: Any) -> None: ...

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> Self:
        if self.expert_parallel and self.tensor_parallel_size == 1:
            raise ValueError("expert_parallel needs tensor_parallel_size of at least 2")
        if self.cpu_threads is not None and self.device.startswith("cuda"):
            raise ValueError(f"cpu_threads has no effect with device {self.device!r}; drop it")
        return self


class RanksKeywords(EngineKeywords, total=False):
    """The same options for type checkers and editors."""

    tensor_parallel_size: int
    expert_parallel: bool


class EngineConfig(RanksOptions):
    """The options of a server's engine; names follow vLLM's flags."""

    max_queued_requests: int = Field(
        256,
        ge=0,
        description="The most requests to queue per replica; others are refused with 429.",
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        "fcfs",
        description="fcfs: first come, first served; priority: requests may set their priority.",
    )
    time_slice: int = Field(
        64,
        ge=0,
        description="Denoising steps until a request may give way to a waiting one, or twice as "
        "many tokens; 0: never.",
    )
    rounds_in_flight: int = Field(
        2, ge=1, le=4, description="Rounds to send to the ranks before the first reply is read."
    )
    load_timeout_s: float = Field(1800.0, gt=0, description="Seconds to load the model.")
    heartbeat_timeout_s: float = Field(
        4.0, ge=1, description="Seconds without a heartbeat after which a process counts as hung."
    )
    round_timeout_s: float = Field(
        30.0, gt=0, description="Seconds that a round may take before the ranks count as hung."
    )
    check_every: int = Field(
        64, ge=0, description="Rounds between checksum comparisons of the ranks; 0: never."
    )
    max_restarts: int = Field(5, ge=0, description="The most restarts within ten minutes.")

    if TYPE_CHECKING:

        def __init__(self, **given: Any) -> None: ...

    @property
    def heartbeat_s(self) -> float:
        return self.heartbeat_timeout_s / BEATS

    @property
    def rank_bundle(self) -> dict[str, float]:
        """What Ray reserves for each rank by default."""
        if self.device == "cpu":
            return {"CPU": float(self.cpu_threads or 1)}
        return {"GPU": 1.0, "CPU": 1.0}

    @property
    def rank_options(self) -> EngineOptions:
        return EngineOptions(**{name: getattr(self, name) for name in EngineOptions.model_fields})
