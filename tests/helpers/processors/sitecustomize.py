"""Makes dtype "auto" on a CPU mean what DIFFRAY_TEST_AUTO says, in every process.

Python imports this at its start wherever PYTHONPATH has this folder (`tests/conftest.py`). It
replaces one function of a module that nothing has imported yet, because importing it takes torch.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FAST = {"bfloat16": True, "float32": False}[os.environ["DIFFRAY_TEST_AUTO"]]


class Backend(MetaPathFinder):
    """Finds one module, and replaces its answer."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "diffray.components.backend":
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def run_and_replace(module: ModuleType) -> None:
            run(module)
            real = module.is_fast_at_bfloat16
            module.is_fast_at_bfloat16 = (  # type: ignore[attr-defined]
                lambda device: FAST if device.type == "cpu" else real(device)
            )

        spec.loader.exec_module = run_and_replace  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Backend())
