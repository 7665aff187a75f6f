"""Run the GPU programs one after the other, what others rely on first, as far as the time goes.

    python -m benchmarks.gpu --out gpu-results --minutes 25
    python -m benchmarks.gpu --out gpu-results --only check_kernels check_engine

Each is a process of its own that writes a JSON report and a log into the folder; one that fails
or takes too long does not stop the others. `docs/gpu.md` says what each result decides.
"""

import argparse
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.measure import need_cuda

ONE = "--shape llada-moe-7b-a1b --rows 1 --window 64 --context 1024"
MANY = "--shape llada-moe-7b-a1b --rows 1 32"
_LAST_WORDS_S = 15.0


class Run(NamedTuple):
    """A program, its arguments, and how many minutes it may take at most."""

    name: str
    program: str
    arguments: str
    minutes: float


RUNS = (
    Run("check_kernels", "check_kernels", "", 6),
    Run("check_engine", "check_engine", "", 6),
    Run("step_target", "step_time", f"{ONE} --engine", 3),
    Run("generate", "generate", MANY, 5),
    Run("step_int8", "step_time", f"{ONE} --experts int8", 5),
    Run("step_float8", "step_time", f"{ONE} --experts float8", 5),
    Run("generate_4_steps", "generate", f"{MANY} --steps-per-round 4", 4),
    Run("generate_8_steps", "generate", f"{MANY} --steps-per-round 8", 4),
    Run("generate_int8", "generate", f"{MANY} --quantization experts_int8", 4),
    Run("generate_eager", "generate", f"{ONE.split(' --rows')[0]} --rows 1 --no-graphs", 4),
    Run("kernels", "time_kernels", "--shape llada-moe-7b-a1b", 6),
    Run("generate_llada_8b", "generate", "--shape llada-8b --rows 1 32", 5),
    Run("generate_llada2_mini", "generate", "--shape llada2-mini --rows 1 32", 5),
    Run("steps", "step_time", "--context 1024 4096", 9),
    Run("kernels_all", "time_kernels", "", 9),
)


def main() -> None:
    args = _parser().parse_args()
    wanted = [run for run in RUNS if not args.only or run.name in args.only]
    if args.dry_run:
        print("\n".join(f"{run.name:22} python {' '.join(command(run)[1:])}" for run in wanted))
        return
    need_cuda()
    args.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    for run in wanted:
        left = end - time.monotonic()
        if left < 20:
            print(f"{run.name:22} not begun: the time is up")
        else:
            print(carry_out(run, min(left, 60 * run.minutes), args.out), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Run the GPU programs one after the other.")
    parser.add_argument("--out", type=Path, required=True, help="folder for reports and logs")
    parser.add_argument("--minutes", type=float, default=60, help="begin nothing after so many")
    parser.add_argument("--only", nargs="+", choices=[run.name for run in RUNS])
    parser.add_argument("--dry-run", action="store_true", help="show the commands, run none")
    return parser


def command(run: Run) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.gpu.{run.program}", *run.arguments.split()]


def carry_out(run: Run, seconds: float, folder: Path) -> str:
    """Run a program for so long at most; return a line that says how it went."""
    report, log = folder / f"{run.name}.json", folder / f"{run.name}.log"
    begin = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            [*command(run), "--out", str(report)], stdout=out, stderr=subprocess.STDOUT
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = "out of time"
            _end(process)
    took = time.monotonic() - begin
    told = "right" if code == 0 else f"FAILED ({code}): {_last(log)}"
    return f"{run.name:22} {took:6.0f} s  {told}; see {log.name}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a program, so that it reports what it has; kill it if that takes long."""
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_LAST_WORDS_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last(log: Path) -> str:
    lines = log.read_text().strip().splitlines()
    return lines[-1][:200] if lines else "it said nothing"


if __name__ == "__main__":
    main()
