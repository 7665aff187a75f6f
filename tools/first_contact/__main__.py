"""Does what a newcomer does: `python -m tools.first_contact`.

It clones what is committed here into a fresh folder, installs it as README says, runs the commands
of README, docs/usage.md and docs/deploy.md, and ends servers in every way: one as it runs on a
processor with AMX, one as on a processor with AVX2 alone. It prints a line for each check; the
status is 1 if one has failed. `--venv .venv` takes the dependencies from an environment instead of
installing them, `--busy 4` keeps the machine busy meanwhile.
"""

import argparse
import json
import re
import shlex
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from examples.train_demo.documented import ANSWERS, EXAMPLE, FUNCTION
from tools.first_contact.endings import ENDINGS, Terminal, end, server
from tools.first_contact.install import (
    Place,
    clone,
    install_as_readme_says,
    install_over,
)
from tools.first_contact.rays_commands import try_rays_commands
from tools.first_contact.report import Report
from tools.other_work import busy
from tools.signals import as_in_a_terminal

# Two processors: which dtype "auto" is there, and which instructions are not used.
AMX = {"DIFFRAY_TEST_AUTO": "bfloat16"}
AVX2 = {
    "DIFFRAY_TEST_AUTO": "float32",
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
PYTHON = "from diffray import DiffusionLLM; print(DiffusionLLM)"


def main() -> None:
    as_in_a_terminal()
    """Run all checks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--venv", type=Path, help="an environment with the dependencies")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the machine busy")
    chosen = parser.parse_args()
    report, begin = Report(), time.monotonic()
    fresh = tempfile.TemporaryDirectory(prefix="fc", ignore_cleanup_errors=True)
    with fresh as name, busy(chosen.busy):
        try_all(Path(name), chosen.venv, report)
    print(f"{report.failed} checks failed, after {time.monotonic() - begin:.0f} s")
    sys.exit(report.failed > 0)


def try_all(folder: Path, venv: Path | None, report: Report) -> None:
    """Install, then try all that is documented."""
    clone(folder)
    if venv is None:
        place = install_as_readme_says(folder)
        installed = {"as README says": place}
    else:
        place = install_over(venv, folder, "editable", "--editable")
        installed = {"editable": place, "plain": install_over(venv, folder, "plain")}
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    wheres = {"the clone": place.clone, "the folder above it": folder, "elsewhere": elsewhere}
    for how, each in installed.items():
        for where, cwd in wheres.items():
            report.check(
                f"installed {how}, Python finds it in {where}",
                partial(each.run, f"python -c {shlex.quote(PYTHON)}", cwd),
            )
    report.check("the Python of README", partial(readme_python, place, elsewhere))
    (elsewhere / "prompt.txt").write_text(f"{FUNCTION}\n")
    for document in ("README.md", "docs/usage.md"):
        for command in offline_commands(place.clone / document):
            report.check(command, partial(generate, place, command, elsewhere))
    serving(place, folder, report)
    try_rays_commands(place, report)


def readme_python(place: Place, cwd: Path) -> None:
    """Run README's example, and compare what it prints."""
    text = (place.clone / "README.md").read_text()
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (asked,) = (question for question in ANSWERS if f'"{question}"' in source)
    (cwd / "readme.py").write_text(source)
    said = place.run("python readme.py", cwd)
    assert said.startswith(f"{ANSWERS[asked]}\n"), f"it answers {said!r}"


def offline_commands(document: Path) -> list[str]:
    """Return the commands of a document that need no server and download nothing."""
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text(), re.DOTALL)
    lines = [line.partition(" #")[0].rstrip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("diffray ") and "inclusionAI/" not in line]


def generate(place: Place, command: str, cwd: Path) -> None:
    """Run a command, and compare what it generates."""
    said = place.run(command, cwd)
    words = shlex.split(command)
    if words[1] == "generate":
        asked = next((word for word in words if word in ANSWERS), None)
        expected = ANSWERS[asked or (FUNCTION if "-" in words else EXAMPLE)]
        assert said == f"{expected}\n", f"it answers {said!r}"


def serving(place: Place, folder: Path, report: Report) -> None:
    """Run two servers at a time, of different models and processors; end each in another way."""
    hook = {"PYTHONPATH": str(place.clone / "tests/helpers/processors")}
    kinds = [
        ("demo", "", place.clone, hook | AVX2),
        ("demo-llada2", "--dashboard", folder, hook | AMX),
    ]
    ways = list(ENDINGS.items())
    for number in range(0, len(ways), len(kinds)):
        with ExitStack() as stack:
            running: list[Terminal] = []
            for model, flags, cwd, settings in kinds:
                line = f"diffray serve {model} --device cpu {flags} --port PORT"
                name = f"{number}{model[-1]}"
                running.append(stack.enter_context(server(place, name, line, cwd, settings)))
            for (model, _, cwd, settings), terminal in zip(kinds, running, strict=True):
                auto = settings["DIFFRAY_TEST_AUTO"]
                said = f"diffray serve {model} in {cwd.name}, dtype auto being {auto},"
                if report.check(f"{said} is ready", terminal.wait_ready) and number == 0:
                    try_clients(place, model, terminal, report)
            for (way, act), terminal in zip(ways[number : number + 2], running, strict=True):
                report.check(
                    f"{way} ends a server and leaves nothing",
                    partial(end, terminal, act),
                )


def try_clients(place: Place, model: str, terminal: Terminal, report: Report) -> None:
    """Ask a server in all the ways that docs/usage.md and docs/deploy.md show."""
    url, elsewhere = terminal.served.url, place.folder / "elsewhere"
    usage, deploy = place.clone / "docs/usage.md", place.clone / "docs/deploy.md"

    def curl(command: str) -> None:
        answer = json.loads(place.run(command.replace("http://127.0.0.1:8000", url)))
        assert answer["model"] == model, f"{answer['model']} answers"
        assert answer["choices"][0]["message"]["content"] in (ANSWERS[FUNCTION], ANSWERS[EXAMPLE])

    def chat() -> None:
        (line,) = re.findall(r"^echo .*diffray chat$", deploy.read_text(), re.MULTILINE)
        asked = shlex.split(line)[1]
        assert place.run(f"{line} --base-url {url}") == f"{ANSWERS[asked]}\n"

    def batch() -> None:
        (line,) = re.findall(r"^\{\"custom_id\".*\}$", deploy.read_text(), re.MULTILINE)
        (elsewhere / "in.jsonl").write_text(f"{line}\n")
        out = elsewhere / f"{model}.jsonl"
        place.run(f"diffray batch in.jsonl {out} --base-url {url} --model {model}", elsewhere)
        body = json.loads(out.read_text())["response"]["body"]
        asked = json.loads(line)["body"]["messages"][0]["content"]
        assert body["choices"][0]["message"]["content"] == ANSWERS[asked]

    def dashboard() -> None:
        found = re.search(r"dashboard at (\S+)", terminal.screen)
        assert found is not None, terminal.screen
        place.run(f"curl --fail --silent --output /dev/null {found[1]}")

    chat_curl = r"^curl \S+/chat/completions .*?'\{.*?\}'$"
    (shown,) = re.findall(chat_curl, usage.read_text(), re.MULTILINE | re.DOTALL)
    report.check(f"the curl of docs/usage.md asks {model}", lambda: curl(shown))
    (told,) = re.findall(r"try: (curl .*)", terminal.screen)
    report.check(f"the curl that serve tells asks {model}", lambda: curl(told))
    report.check(f"serve says that {model} is a toy", lambda: terminal.screen.index("is a toy"))
    report.check(f"diffray chat talks to {model}", chat)
    report.check(f"diffray batch asks {model}", batch)
    if "dashboard at" in terminal.screen or model != "demo":
        report.check("the dashboard is where serve says", dashboard)


if __name__ == "__main__":
    main()
