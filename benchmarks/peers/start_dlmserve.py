"""Starts dlmserve 0.1.1 on 127.0.0.1 in float32, run by its own environment's Python.

Its command listens on every address, and it loads in int4 or bfloat16 only. The checkpoint is in
bfloat16, so widening the loaded weights loses nothing; the rest of dlmserve is unchanged.
"""

import importlib
import sys
from typing import Any

if __name__ == "__main__":
    engine: Any = importlib.import_module("dlmserve.engine")
    uvicorn: Any = importlib.import_module("uvicorn")
    load = engine.load_llada

    def load_in_float32(**options: Any) -> Any:
        loaded = load(**options)
        loaded.model.float()
        return loaded

    engine.load_llada = load_in_float32
    uvicorn.run("dlmserve.api.server:app", host="127.0.0.1", port=int(sys.argv[1]))
