"""One virtual environment for each peer, because their requirements conflict."""

import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

# LLaDA's and Fast-dLLM's modelling code was written for transformers 4.
TRANSFORMERS_4 = "transformers>=4.46,<5"
# The versions are those of docs/benchmarks.md.
REQUIREMENTS = {
    "dlmserve": ("dlmserve==0.1.1", TRANSFORMERS_4),
    "dfastllm": ("dfastllm==0.0.4", TRANSFORMERS_4),
    "diffusers": ("diffusers==0.39.0", "accelerate", TRANSFORMERS_4),
}


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment in a folder, with this environment's torch and the requirements."""

    folder: Path
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def wanted(self) -> tuple[str, ...]:
        return f"torch=={version('torch').partition('+')[0]}", *self.requirements

    def is_made(self) -> bool:
        receipt = self.folder / "requirements.txt"
        return receipt.is_file() and receipt.read_text().split("\n") == list(self.wanted)

    def commands(self) -> list[list[str]]:
        """Return the commands that make it; torch is first, so nothing else picks its build."""
        install = [str(self.python), "-m", "pip", "install", "--quiet", self.wanted[0]]
        venv = [sys.executable, "-m", "venv", str(self.folder)]
        return [venv, install, [*install, *self.requirements]]

    def make(self) -> None:
        """Download and install what is missing."""
        if self.is_made():
            return
        print(f"making {self.folder} for {' '.join(self.requirements)}", file=sys.stderr)
        for command in self.commands():
            if status := subprocess.run(command).returncode:
                raise ValueError(
                    f"{self.folder.name} could not be installed ({' '.join(command)} ended with"
                    f" {status}); leave it out by naming the other peers"
                )
        (self.folder / "requirements.txt").write_text("\n".join(self.wanted))
