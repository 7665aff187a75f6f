"""The names of dtypes, also for where torch is not."""

from typing import Final, Literal, get_args

DTypeName = Literal["float32", "float64", "bfloat16", "float16"]
DTYPE_NAMES: Final[tuple[str, ...]] = get_args(DTypeName)

# What vLLM and others call them.
_OTHER_NAMES: Final = {
    "bf16": "bfloat16",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
}


def dtype_name(given: object) -> str:
    """Return the name here of a torch.dtype, or of a name that is used elsewhere, as half."""
    name = str(given).removeprefix("torch.")
    return _OTHER_NAMES.get(name, name)
