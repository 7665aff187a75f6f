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

MOE: Final = "--shape llada-moe-7b-a1b"
SIZE: Final = "--window 64 --context 1024"
ONE: Final = f"{MOE} --rows 1 {SIZE}"
EVERY: Final = "--weights bfloat16 int8 float8"
DENSE: Final = "--shape llada-8b"
TABLE: Final = "--part kernels"
BATCH: Final = f"{MOE} --rows 8 32 {SIZE}"
FOREIGN: Final = ".yardstick"  # with another project's kernels, outside this repository
ALL: Final = "--weights bfloat16 int8 float8 float8_rows"
KINDS: Final = "--cache dual vicinity --decoder fixed credit"
INSIDE: Final = "--rate 1 --prompt 960 --tokens 64"  # a block, one token and step a round
ENGINE_NEEDS: Final = "pydantic", "safetensors", "tqdm"
_LAST_WORDS_S: Final = 15.0


class Run(NamedTuple):
    """A program, its arguments, and how many seconds it may take at most."""

    name: str
    program: str
    arguments: str
    seconds: float


RUNS: Final = (
    # Ten minutes: one model first, what tells most first, so that a cut costs the least.
    Run("step", "step_time", f"{ONE} {EVERY}", 60),
    Run("kernels", "step_time", f"{ONE} {TABLE} --weights bfloat16 float8", 45),
    Run("check_kernels", "check_kernels", f"{MOE} llada2-mini --dtype bfloat16", 130),
    Run("bring_up", "bring_up", f"{MOE} --weights bfloat16 float8", 80),
    Run("generate", "generate", f"{MOE} --rate 3.87 --weights bfloat16 float8", 75),
    Run("check_engine", "check_engine", "--family llada_moe", 100),
    Run("yardstick", "yardstick", f"--from {FOREIGN} --tokens 64 512", 65),
    Run("step_batch", "step_time", BATCH, 50),
    Run("generate_batch", "generate", f"{MOE} --rate 3.87 --rows 32", 65),
    Run("step_models", "step_time", f"--shape llada-8b llada2-mini --rows 1 8 {SIZE}", 60),
    # Thirty.
    Run("engine", "generate", f"{MOE} {INSIDE} {KINDS}", 90),
    Run("kernels_batch", "step_time", f"{BATCH} {TABLE}", 60),
    Run("generate_credit", "generate", f"{MOE} --rate 3.87 {KINDS}", 180),
    Run("generate_vicinity", "generate", f"{MOE} --rows 32 --cache vicinity --rate 3.87", 120),
    Run("check_engine_all", "check_engine", "", 400),
    # All.
    Run("check_kernels_all", "check_kernels", "", 360),
    Run("generate_models", "generate", "--shape llada-8b llada2-mini --rows 1 32", 480),
    Run("generate_4_steps", "generate", f"{MOE} --steps-per-round 4 --rows 1 32", 240),
    Run("generate_8_steps", "generate", f"{MOE} --steps-per-round 8 --rows 1 32", 240),
    Run("generate_eager", "generate", f"{MOE} --no-graphs", 180),
    Run("bring_up_dense", "bring_up", f"{DENSE} --weights int8 float8_rows", 120),
    Run("steps_dense", "step_time", f"{DENSE} --rows 1 8 32 --context 1024 --window 64 {ALL}", 300),
    Run("steps_all", "step_time", "--context 1024 4096 --part step kernels", 720),
)

# What a machine without a GPU can run of them.
TOY: Final = "--shape toy-moe --device cpu --dtype float32 --runs 1"
REHEARSED: Final = (
    Run("generate_toy", "generate", f"{TOY} --prompt 9 --tokens 31 --block 8 --rate 3.87", 60),
    Run("check_engine_cpu", "check_engine", "--device cpu --family llada_moe", 120),
)


def main() -> None:
    names = [run.name for run in RUNS]
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
    wanted = [run for run in RUNS[begin:] if not args.only or run.name in args.only]
    if not Path(FOREIGN).is_dir():
        wanted = [run for run in wanted if run.program != "yardstick"]
    if args.dry_run:
        print("\n".join(f"{run.name:18} python {' '.join(command(run)[1:])}" for run in wanted))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    if args.rehearse:
        for run in wanted:
            print(f"{run.name:18} {listed(run, args.out / f'{run.name}.log')} cases")
        wanted = [*REHEARSED]
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
