"""The pages on how to extend the engine, followed to the letter in a copy of the tree.

Each Python block is a new file, or the end of one that is there, and each diff changes one; the
text before it names the file. Afterwards what uses the new parts runs, and the tests that a change
like this concerns pass.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

pytestmark = [pytest.mark.long, pytest.mark.rotate(1)]

BLOCK = re.compile(r"(.*?)```(python|diff)\n(.*?)```", re.DOTALL)
FILE = re.compile(r"`([\w/.-]+/[\w.-]+\.(?:py|md))`")
ELSEWHERE = "from diffray import DiffusionLLM"  # a script or notebook that uses what was added
CONCERNED = [
    *("system/test_docs.py", "system/test_structure.py", "cli/test_configuration_page.py"),
    *("components/test_decoders.py", "components/test_model_configs.py"),
    *("components/test_params.py", "workers/test_engine_options.py", "api/test_openapi.py"),
    *("workers/test_bounds.py", "workers/test_engine.py"),
]


def follow(page: str, tree: Path) -> tuple[set[str], list[str]]:
    """Apply a page's steps to a tree; return the files that it changed, and its scripts."""
    touched, scripts, last, file = set[str](), list[str](), "", ""
    for before, language, block in BLOCK.findall((ROOT / "docs" / page).read_text()):
        file = (FILE.findall(before) or [file])[-1]
        if ELSEWHERE in block:
            scripts.append(last + block)  # a notebook also has what was written last
            continue
        old = (tree / file).read_text() if (tree / file).exists() else ""
        new = f"{old}\n\n{block}".lstrip() if language == "python" else patched(old, block)
        (tree / file).write_text(new)
        touched.add(file)
        last = block if language == "python" else ""
    return touched, scripts


def patched(text: str, diff: str) -> str:
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[:1] != "+")
        assert text.count(old) == 1, f"{old!r} is not there once"
        text = text.replace(old, "\n".join(line[1:] for line in lines if line[:1] != "-"))
    return text


@pytest.mark.parametrize(
    ("page", "files"),
    [
        (
            "add-a-decoder.md",
            {
                "components/decoders/top_n.py", "components/policy.py",
                "tests/components/test_decoders.py",
            },
        ),
        (
            "add-a-model.md",
            {"components/models/small.py", "components/models/registry.py", "docs/models.md"},
        ),
        (
            "extend-the-engine.md",
            {
                "components/caches/doubling.py", "components/policy.py",
                "components/transforms.py", "components/params.py",
                "workers/features/at_most.py", "workers/features/order.py",
            },
        ),
    ],
)  # fmt: skip
def test_a_page_names_every_step(page: str, files: set[str], tmp_path: Path) -> None:
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    here = [name for name in names.split("\0") if name and os.path.lexists(ROOT / name)]
    copy = ["cp", "--parents", "-P", "-t", str(tmp_path), *here]
    subprocess.run(copy, cwd=ROOT, check=True)
    touched, scripts = follow(page, tmp_path)
    assert touched == files
    tests = [f"tests/{name}" for name in CONCERNED]
    for command in (
        *(["-c", script] for script in scripts),
        ["-m", "tools.configuration_page"],
        ["-m", "ruff", "check"],
        ["-m", "ruff", "format", "--check"],
        ["-m", "pytest", "-q", "-x", "-m", "not long", *tests],
    ):
        found = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
        )
        assert found.returncode == 0, f"{command}:\n{found.stdout[-4000:]}{found.stderr[-2000:]}"
