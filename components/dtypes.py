"""The names of dtypes, without importing torch."""

from typing import Final, Literal, get_args

DTypeName = Literal["float32", "float64", "bfloat16", "float16"]
DTYPE_NAMES: Final[tuple[str, ...]] = get_args(DTypeName)

# Names used by vLLM and others.
_OTHER_NAMES: Final = {
    "bf16": "bfloat16",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
}


def dtype_name(given: object) -> str:
    """Return diffray's name of a torch.dtype or of an alias, such as half."""
    name = str(given).removeprefix("torch.")
    return _OTHER_NAMES.get(name, name)
