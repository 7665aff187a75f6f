"""Ray's own commands as docs/deploy.md shows them: serve run, serve deploy and batches as jobs."""

import json
import re
import time
from functools import partial
from pathlib import Path

from examples.train_demo.documented import ANSWERS
from tools.first_contact.endings import END_S, READY_S, Terminal, server
from tools.first_contact.install import Place
from tools.first_contact.report import Report

TOKEN = {"RAY_AUTH_MODE": "token"}  # of the variables that the document sets, what one must
DASHBOARD, ENDPOINT = "http://HEAD:8265", "http://HEAD:8000"
SERVES = 8000  # the port of Serve where no file says another: `serve run` has no option for it


def try_rays_commands(place: Place, report: Report) -> None:
    """Serve the document's file with its command, deploy it again and submit its jobs."""
    text = (place.clone / "docs/deploy.md").read_text()
    (config,) = re.findall(r"```yaml\n(applications:.*?)```", text, re.DOTALL)
    (run,) = re.findall(r"^(serve run config\.yaml) ", text, re.MULTILINE)
    (deploy,) = re.findall(r"^serve deploy .*$", text, re.MULTILINE)
    (without_file,) = re.findall(r"^serve run diffray.*$", text, re.MULTILINE)
    jobs = re.findall(r"^ray job submit .*?\n.*$", text, re.MULTILINE)
    folder = place.folder / "rays"
    folder.mkdir()
    (folder / "config.yaml").write_text(config)
    # The document's port may be in use here.
    line = f"bash -c 'echo \"http_options: {{port: PORT}}\" >> config.yaml; exec {run}'"
    with server(place, "r", line, folder, TOKEN) as terminal:
        if not report.check(f"{run} serves", partial(terminal.wait_ready, "successfully")):
            return
        report.check(deploy, partial(deployed, place, terminal, deploy, folder))
        for job in jobs:
            report.check(
                job.rpartition(" -- ")[2], partial(submitted, place, terminal, job, folder)
            )
        report.check("Ctrl-C ends serve run", partial(ended, terminal))
    with server(place, "w", without_file, folder, TOKEN, SERVES) as terminal:
        if report.check(without_file, terminal.wait_ready):
            report.check("it answers", partial(wait_for_demo, place, terminal.served.url))
            report.check("Ctrl-C ends it", partial(ended, terminal))


def asked(place: Place, terminal: Terminal, command: str, cwd: Path) -> str:
    """Run a command of the document against the Ray of this terminal."""
    found = re.search(r"dashboard at\W*(?:\x1b\[\w+)*(?:http://)?([\d.]+:\d+)", terminal.screen)
    assert found is not None, terminal.screen
    home = terminal.served.folder
    command = command.replace(DASHBOARD, f"http://{found[1]}")
    command = command.replace(ENDPOINT, terminal.served.url)
    return place.run(f"export RAY_AUTH_MODE=token HOME={home} TMPDIR={home}; {command}", cwd)


def deployed(place: Place, terminal: Terminal, command: str, cwd: Path) -> None:
    """Deploy the file again, and wait until its model answers."""
    asked(place, terminal, command, cwd)
    wait_for_demo(place, terminal.served.url)


def wait_for_demo(place: Place, url: str) -> None:
    end = time.monotonic() + READY_S
    curl = f"curl --silent {url}/v1/models || true"
    while '"demo"' not in (said := place.run(curl)):
        assert time.monotonic() < end, said
        time.sleep(0.5)


def submitted(place: Place, terminal: Terminal, command: str, cwd: Path) -> None:
    """Submit the document's batch for a demo model and a CPU, its answers in a folder here."""
    text = (place.clone / "docs/deploy.md").read_text()
    (line,) = re.findall(r"^\{\"custom_id\".*\}$", text, re.MULTILINE)
    (cwd / "in.jsonl").write_text(f"{line}\n")
    out = cwd / "out.jsonl"
    out.unlink(missing_ok=True)
    command = command.replace("--entrypoint-num-gpus 1", "").replace("\\\n", " ")
    command = command.replace("inclusionAI/LLaDA-MoE-7B-A1B-Instruct", "demo")
    asked(place, terminal, command.replace("/data/out.jsonl", str(out)), cwd)
    question = json.loads(line)["body"]["messages"][0]["content"]
    body = json.loads(out.read_text())["response"]["body"]
    assert body["choices"][0]["message"]["content"] == ANSWERS[question]


def ended(terminal: Terminal) -> None:
    terminal.press_ctrl_c()
    limit = time.monotonic() + END_S
    while left := terminal.left():
        assert time.monotonic() < limit, f"left after {END_S:g} s: {'; '.join(left)}"
        time.sleep(0.2)
