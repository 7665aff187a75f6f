"""Run the GPU programs one after the other, those that tell most first, as time allows.

    python -m benchmarks.gpu --out gpu-results --minutes 10
    python -m benchmarks.gpu --out gpu-results --only check_kernels check_engine
    python -m benchmarks.gpu --out gpu-results --from engine

Each is its own process that writes a JSON report and a log into the folder; one that fails or takes
too long does not stop the others, and all end with this one. After each, the folder is packed into
FOLDER.tar.gz. docs/gpu.md has what an H200 showed.
"""

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import redirect_stdout, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from benchmarks.gpu.program import end_with_parent, ended_by_signals, need_cuda

FOREIGN: Final = ".yardstick"  # the folder that `yardstick` needs
ENGINE_NEEDS: Final = "pydantic", "safetensors", "tqdm"
_LAST_WORDS_S: Final = 15.0


class Run(NamedTuple):
    """A program, its arguments, and how many seconds it may take at most."""

    name: str
    seconds: float
    program: str
    arguments: str


def runs(file: str = "runs.txt") -> list[Run]:
    """Read the runs of a file; `rehearsal.txt` has what a machine without a GPU can run."""
    lines = Path(__file__).with_name(file).read_text().splitlines()
    every = ([*line.split(maxsplit=3), ""] for line in lines if line and not line.startswith("#"))
    return [Run(name, float(seconds), *rest[:2]) for name, seconds, *rest in every]


def main() -> None:
    every = runs()
    names = [run.name for run in every]
    parser = argparse.ArgumentParser(description="Run the GPU programs one after the other.")
    parser.add_argument("--out", type=Path, required=True, help="folder for reports and logs")
    parser.add_argument("--archive", type=Path, help="default: FOLDER.tar.gz beside the folder")
    parser.add_argument("--minutes", type=float, default=90, help="start nothing after this")
    parser.add_argument("--only", nargs="+", choices=names)
    parser.add_argument("--from", dest="begin", choices=names, help="go on with this one")
    parser.add_argument("--rehearse", action="store_true", help="only what needs no GPU")
    parser.add_argument("--dry-run", action="store_true", help="show the commands, run none")
    args = parser.parse_args()
    begin = names.index(args.begin) if args.begin else 0
    wanted = [run for run in every[begin:] if not args.only or run.name in args.only]
    if not Path(FOREIGN).is_dir():
        wanted = [run for run in wanted if run.program != "yardstick"]
    if args.dry_run:
        print("\n".join(f"{run.name:18} python {' '.join(command(run)[1:])}" for run in wanted))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        for run in wanted:
            print(f"{run.name:18} {listed(run, args.out / f'{run.name}.log')} cases")
        wanted = runs("rehearsal.txt")
    else:
        need_cuda()
    if missing := [name for name in ENGINE_NEEDS if importlib.util.find_spec(name) is None]:
        print(f"Programs that run the engine will fail: pip install {' '.join(missing)}")
    archive = args.archive or args.out.with_name(f"{args.out.name}.tar.gz")
    for run, ending in product(wanted, ("json", "log")):  # would pass for results of this run
        (args.out / f"{run.name}.{ending}").unlink(missing_ok=True)
    end = time.monotonic() + 60 * args.minutes
    with (args.out / "summary.txt").open("w") as summary, ended_by_signals():
        for run in wanted:
            left = end - time.monotonic()
            told = "not started: the time is up"
            try:
                if left > 20:
                    told = "ended before it was done"
                    told = carry_out(run, min(left, run.seconds), args.out)
            finally:
                for file in (sys.stdout, summary):
                    print(f"{run.name:18} {told}", file=file, flush=True)
                pack(args.out, archive)
                print(*last_lines(args.out / f"{run.name}.log"), sep="\n", flush=True)


def last_lines(log: Path, most: int = 12) -> list[str]:
    """Return the end of a log without progress bars, indented."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [f"    {line[:200]}" for line in lines if "it/s" not in line][-most:]


def command(run: Run) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gpu.{run.program}", *run.arguments.split()]


def listed(run: Run, log: Path) -> int:
    """Note the names of a program's cases in its log; return their number."""
    program = importlib.import_module(f"benchmarks.gpu.{run.program}")
    argv = [*command(run)[2:], "--list"]
    with log.open("w") as out, redirect_stdout(out), patch.object(sys, "argv", argv):
        program.main()
    return len(log.read_text().splitlines())


def carry_out(run: Run, seconds: float, folder: Path) -> str:
    """Run a program for at most `seconds`; return a line with its outcome."""
    report, log = (folder / f"{run.name}.{ending}" for ending in ("json", "log"))
    begin, late = time.monotonic(), ""
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command(run), "--out", str(report)],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = "out of time; "
        finally:
            process.terminate()  # it reports what it has
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_WORDS_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    took = time.monotonic() - begin
    return f"{took:4.0f} s  {late}{outcome(report, process.returncode, log)}"


def outcome(report: Path, code: int, log: Path) -> str:
    """Summarize what a program found, from its report."""
    if not report.exists():
        lines = log.read_text().strip().splitlines() or ["it printed nothing"]
        return f"FAILED ({code}), no report: {lines[-1][:200]}"
    told: dict[str, Any] = json.loads(report.read_text())
    said = []
    if not told["complete"]:
        said.append(f"INCOMPLETE: {len(told['rows'])} of {told['cases']} cases")
    if told["wrong"]:
        wrong = [row["case"] for row in told["rows"] if row.get("right") is False]
        said.append(f"WRONG: {told['wrong']} of {len(told['rows'])} cases, first {wrong[0]}")
    if not said and code:
        said = [f"FAILED ({code})"]
    judged = any(row.get("right") for row in told["rows"])
    return "; ".join(said) or ("right" if judged else "measured")


def pack(folder: Path, archive: Path) -> None:
    """Write all results into one archive."""
    part = archive.with_name(f"{archive.name}.part")
    with tarfile.open(part, "w:gz") as packed:
        packed.add(folder, arcname=folder.name)
    part.replace(archive)


if __name__ == "__main__":
    main()
