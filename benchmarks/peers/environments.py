"""One virtual environment for each peer, made once: peers pin what others cannot live with."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

# LLaDA's and Fast-dLLM's modelling code was written for transformers 4.
TRANSFORMERS_4 = "transformers>=4.46,<5"


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in `root / name` that holds `requirements`, and nothing of ours."""

    root: Path
    name: str
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        return self.root / self.name / "bin" / "python"

    @property
    def _receipt(self) -> Path:
        return self.root / self.name / "requirements.txt"

    @property
    def _wanted(self) -> str:
        return "\n".join([torch_requirement(), *self.requirements]) + "\n"

    def is_made(self) -> bool:
        """Whether all that is wanted has been installed."""
        return self._receipt.is_file() and self._receipt.read_text() == self._wanted

    def commands(self) -> Iterator[list[str]]:
        """Yield what makes it; torch comes first, so that no other package chooses its build."""
        install = [str(self.python), "-m", "pip", "install", "--quiet"]
        yield [sys.executable, "-m", "venv", str(self.root / self.name)]
        yield [*install, torch_requirement()]
        yield [*install, torch_requirement(), *self.requirements]

    def make(self) -> None:
        """Install what is not there yet; this downloads."""
        if self.is_made():
            return
        print(f"making {self.root / self.name} for {' '.join(self.requirements)}", file=sys.stderr)
        for command in self.commands():
            try:
                subprocess.run(command, check=True)
            except subprocess.CalledProcessError as error:
                raise ValueError(
                    f"{self.name} could not be installed ({' '.join(command)} ended with"
                    f" {error.returncode}); leave it out by naming the other peers"
                ) from None
        self._receipt.write_text(self._wanted)


def torch_requirement() -> str:
    """Return this environment's torch, so that all run the same kernels."""
    return f"torch=={version('torch').partition('+')[0]}"


def environments(root: Path) -> dict[str, Environment]:
    """Return the peers that live apart. The versions are those that docs/benchmarks.md tells of."""
    wanted = {
        "dlmserve": ("dlmserve==0.1.1", TRANSFORMERS_4),
        "dfastllm": ("dfastllm==0.0.4", TRANSFORMERS_4),
        "diffusers": ("diffusers==0.39.0", "accelerate", TRANSFORMERS_4),
    }
    return {name: Environment(root, name, needs) for name, needs in wanted.items()}
