"""Installations as README has them: a clone in a fresh folder, and an environment for it."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND_S = 300.0


@dataclass(frozen=True)
class Place:
    """A newcomer's folder: the clone in it, its environment, and their home."""

    folder: Path
    bin: Path

    @property
    def clone(self) -> Path:
        return self.folder / "diffray"

    @property
    def home(self) -> Path:
        return self.folder / "h"  # short: Ray's sockets are in it

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a user who has never used Ray, with the environment's commands."""
        mine = ("RAY_", "PYTHON", "VIRTUAL_ENV")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(mine)}
        path = f"{self.bin}:{kept['PATH']}"
        return kept | {"PATH": path, "HOME": str(self.home), "TMPDIR": str(self.home)}

    def run(self, command: str, cwd: Path | None = None, stdin: str = "", status: int = 0) -> str:
        """Run a line of the shell, which must end with this status; return what it prints."""
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=cwd or self.clone,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
        said = done.stdout + done.stderr
        assert done.returncode == status, f"{command!r} ended with {done.returncode}: {said[-600:]}"
        assert "Traceback" not in said, f"{command!r}: {said[-600:]}"
        return done.stdout


def clone(folder: Path) -> None:
    """Clone what is committed here, as README says."""
    (folder / "h").mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "diffray")], check=True)


def install_as_readme_says(folder: Path) -> Place:
    """Run README's commands for installing, but for the clone."""
    text = (folder / "diffray/README.md").read_text()
    (block,) = re.findall(r"## Install\n.*?```\n(.*?)```", text, re.DOTALL)
    lines = [line for line in block.splitlines() if not line.startswith("git clone")]
    place = Place(folder, folder / "diffray/.venv/bin")
    script = "\n".join(["set -e", *lines])
    subprocess.run(["bash", "-c", script], cwd=place.clone, check=True, stdout=sys.stderr)
    return place


def install_over(venv: Path, folder: Path, name: str, *flags: str) -> Place:
    """Install into an environment of its own that takes its dependencies from another one."""
    target = folder / name
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(target)], check=True)
    (site,) = target.glob("lib/python3*/site-packages")
    (packages,) = venv.resolve().glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(f"{packages}\n")
    place = Place(folder, target / "bin")
    pip = "python -m pip install --quiet --no-deps --no-build-isolation --ignore-installed"
    place.run(f"{pip} {' '.join(flags)} .")
    for name in ("ray", "serve"):  # the dependencies' commands, for this environment's Python
        _, _, rest = (venv / "bin" / name).read_text().partition("\n")
        (place.bin / name).write_text(f"#!{place.bin}/python\n{rest}")
        (place.bin / name).chmod(0o755)
    return place
