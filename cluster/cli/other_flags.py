"""Flags of vLLM and SGLang that are missing here, and what to use instead."""

import re
from collections.abc import Collection
from typing import Final

_CACHE: Final = "--kv-cache-memory SIZE sets the memory of the K/V cache, such as 20GiB"
_COPIES: Final = "--replicas N runs several copies of the model"
_TOOLS: Final = "leave it out: every model calls tools if a request lists any"
_CODE: Final = "leave it out: no code of a checkpoint is run"
_LOG: Final = "leave it out: requests are not logged"
_FOLDER: Final = "MODEL may be a folder, and HF_HOME says where downloads go"
_INSTEAD: Final = {
    "--gpu-memory-utilization": _CACHE,
    "--mem-fraction-static": _CACHE,
    "--kv-cache-memory-bytes": _CACHE,
    "--data-parallel-size": _COPIES,
    "--dp-size": _COPIES,
    "--dp": _COPIES,
    "--pipeline-parallel-size": "--tensor-parallel-size N splits a model over GPUs",
    "--enforce-eager": "--no-cuda-graphs does the same",
    "--disable-cuda-graph": "--no-cuda-graphs does the same",
    "--disable-radix-cache": "--no-enable-prefix-caching does the same",
    "--trust-remote-code": _CODE,
    "--enable-auto-tool-choice": _TOOLS,
    "--tool-call-parser": _TOOLS,
    "--disable-log-requests": _LOG,
    "--no-enable-log-requests": _LOG,
    "--uvicorn-log-level": _LOG,
    "--download-dir": _FOLDER,
    "--revision": _FOLDER,
    "--seed": "each request sets its own seed; greedy answers, the default, need none",
}


def instead_of(name: str, flags: Collection[str]) -> str | None:
    """Return what to use instead of an unknown flag, in a command that has these flags."""
    said = _INSTEAD.get(name.replace("_", "-"))
    return said if said and {*re.findall(r"--[\w-]+", said)} <= {*flags} else None
