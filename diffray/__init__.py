"""diffray serves diffusion language models on Ray.

The public names load on first use, so that `import diffray` stays cheap: no torch, no transformers,
no Ray.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from diffray.cluster.api.async_llm import AsyncDiffusionLLM
    from diffray.cluster.control.llm import DiffusionLLM
    from diffray.cluster.frontend.output import CompletionOutput, RequestOutput
    from diffray.components.params import SamplingParams

__version__ = "0.1.0"

__all__ = [
    "AsyncDiffusionLLM",
    "CompletionOutput",
    "DiffusionLLM",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

# How often OpenMP's threads poll for work before they sleep. GNU's default of 300,000 polls keeps
# a core busy for milliseconds while the thread that is waited for may need it: beside other
# processes everything takes ten times as long. OpenMP reads the variable when torch is loaded, so
# it is set here, before any module of diffray imports torch. A user's setting takes precedence.
if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "10000"

_HOMES = {
    "AsyncDiffusionLLM": "diffray.cluster.api.async_llm",
    "CompletionOutput": "diffray.cluster.frontend.output",
    "DiffusionLLM": "diffray.cluster.control.llm",
    "RequestOutput": "diffray.cluster.frontend.output",
    "SamplingParams": "diffray.components.params",
}


def __getattr__(name: str) -> object:
    """Import a public name's module on first use, and keep the name here (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
