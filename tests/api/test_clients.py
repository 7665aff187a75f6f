"""Stock clients, unmodified, with their own defaults, each in an environment of its own.

Each script of `clients/` begins with the packages that it needs, and prints what worked. `make
test-clients` runs all and writes a table of them to build/clients.md. They are the newest versions,
so no other run has them: a client's release must not fail a change of diffray.
"""

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.api_server import Served, serve_model
from tests.helpers.needed import REQUIRED, npm

pytestmark = pytest.mark.long

SCRIPTS = sorted(Path(__file__).with_name("clients").glob("*_*.*"))
ENVIRONMENTS = Path(sys.prefix) / "clients"
TABLE = Path("build/clients.md")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    if "clients" not in os.environ.get(REQUIRED, ""):
        pytest.skip("make test-clients runs them")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        with serve_model("demo") as served:
            yield served


@pytest.fixture(scope="module")
def rows() -> Iterator[list[str]]:
    rows = ["| client | worked |", "|---|---|"]
    yield rows
    TABLE.parent.mkdir(exist_ok=True)
    TABLE.write_text("\n".join(rows) + "\n")


def python(folder: Path, packages: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return a command that runs a script where the packages are, and their versions."""
    here, there = [sys.executable, "-m"], folder / "bin/python"
    install = ["install", "--quiet", "--disable-pip-version-check", "--no-compile", *packages]
    if not there.exists():
        subprocess.run([*here, "venv", "--without-pip", folder], check=True)
    subprocess.run([*here, "pip", "--python", str(there), *install], check=True, timeout=240)
    asked = [name.partition("[")[0] for name in packages]
    told = f"from importlib.metadata import version\nfor n in {asked}: print(n, version(n))"
    lines = subprocess.check_output([there, "-c", told], text=True).splitlines()
    return [str(there)], dict(line.split() for line in lines)


def node(folder: Path, packages: list[str]) -> tuple[list[str], dict[str, str]]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    npm(folder, "install", "--no-audit", "--no-fund", *packages)
    manifests = {name: folder / f"node_modules/{name}/package.json" for name in packages}
    return ["node"], {n: json.loads(path.read_text())["version"] for n, path in manifests.items()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_client_works_with_its_defaults(served: Served, rows: list[str], script: Path) -> None:
    needs = re.match(r"(?:#|//) needs: (.*)", script.read_text())
    assert needs
    packages, folder = needs[1].split(), ENVIRONMENTS / script.stem
    command, versions = (python if script.suffix == ".py" else node)(folder, packages)
    if script.suffix == ".mjs":  # which finds packages beside itself
        for file in script.parent.glob("*.mjs"):
            (folder / file.name).write_bytes(file.read_bytes())
        script = folder / script.name
    told = subprocess.run(
        [*command, script, served.url, served.name],
        env=os.environ
        | {
            "OPENAI_API_KEY": "none",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "TESTS_SITE": sysconfig.get_path("purelib"),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    worked = [line for line in told.stdout.splitlines() if re.fullmatch(r"[\w ]+", line)]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    rows.append(f"| {named} | {', '.join(worked)} |")
