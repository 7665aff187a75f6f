"""How every GPU program runs: case after case in a worker process, a report after each.

What ends a worker (an abort, an illegal access, a hang) becomes the row of its current case, and a
new worker continues with the next case, because a CUDA error breaks all later calls of its process.
The program itself never touches the device, so it can always report, even when it is terminated.
"""

import argparse
import ctypes
import gc
import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from collections.abc import Sequence as Items
from contextlib import closing, contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from benchmarks.gpu.measure import device_facts, source_facts

Row = dict[str, Any]
Plan = Callable[[argparse.Namespace], dict[str, Callable[[], Row]]]

CACHES = "dual", "vicinity", "prefix", "none", "exact"  # of the engine

_PRCTL, _PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1
_SIGNALS = signal.SIGINT, signal.SIGTERM


def arguments(what: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every GPU program."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=Path, help="write the JSON report here, not to stdout")
    parser.add_argument("--case-seconds", type=float, default=60, help="abandon a case after this")
    parser.add_argument("--list", action="store_true", help="name the cases, and run none")
    return parser


def need_cuda() -> None:
    """End the program with one sentence and exit status 2 if there is no CUDA device."""
    if not torch.cuda.is_available():
        print("This needs a GPU, and torch sees no CUDA device here.", file=sys.stderr)
        raise SystemExit(2)


def end_with_parent(last: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, even if that is killed."""
    _PRCTL(_PR_SET_PDEATHSIG, last)


def run(plan: Plan, args: argparse.Namespace, line: Callable[[Row], str]) -> None:
    """Run the cases of a plan, each guarded; exit with status 1 if a case is wrong.

    `plan` returns the cases by name without touching the device; workers call it again. A case
    returns its row, in which `right` is True or False if there is something to judge.
    """
    if args.out is not None:
        args.out.unlink(missing_ok=True)  # of an earlier run
    if not args.list and getattr(args, "device", "cuda") == "cuda":
        need_cuda()
    names = list(plan(args))
    if args.list:
        print(*names, sep="\n")
        return
    report: Row = {"program": Path(sys.argv[0]).stem, "complete": False, "cases": len(names)}
    report |= {"wrong": 0, "facts": source_facts(), "rows": []}
    with ended_by_signals():
        try:
            _write(args.out, report)
            with closing(_messages(plan, args, names)) as messages:
                for message in messages:
                    report["facts"] |= message.get("facts", {})
                    if row := message.get("row"):
                        report["rows"].append(row)
                        report["complete"] = len(report["rows"]) == len(names)
                        report["wrong"] += row.get("right") is False
                        mark = {True: "right", False: "WRONG", None: "     "}[row.get("right")]
                        said = row.get("failure") or line(row)
                        print(f"{mark} {row['case']:52} {said}", flush=True)
                        _write(args.out, report)
        finally:
            if args.out is None:
                print(json.dumps(report, indent=1))
    if wrong := report["wrong"]:
        raise SystemExit(f"{wrong} of {len(names)} cases failed; see the lines with WRONG")


def _write(path: Path | None, report: Row) -> None:
    """Write the report in one step, so that a reader never finds half of it."""
    if path is not None:
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(path)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGINT, which scripts turn off after `&`, and SIGTERM end the program as errors do."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(f"ended by {signal.Signals(number).name}; the report is not complete")

    before = [(number, signal.signal(number, end)) for number in _SIGNALS]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _messages(plan: Plan, args: argparse.Namespace, names: Items[str]) -> Generator[Row]:
    """Yield each worker's facts, and a row for every case."""
    left, context = list(names), get_context("spawn")
    while left:
        here, there = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(plan, args, left, there), daemon=True)
        worker.start()
        there.close()
        begin, ready, row = time.perf_counter(), False, Row()
        try:
            while left and "failure" not in row:
                message = _next(here, worker, args.case_seconds)
                if failure := message.get("failure"):
                    if not ready:
                        raise SystemExit(f"No case could be run: {failure}")
                    message = {"row": _failed(left[0], failure, begin)}
                ready = True  # the worker's facts come first
                if row := message.get("row", {}):
                    left.pop(0)
                    begin = time.perf_counter()
                yield message
        finally:
            worker.kill()
            worker.join()
            here.close()


def _next(pipe: Connection, worker: Any, seconds: float) -> Row:
    """Return what a worker sends, or why it sends nothing."""
    try:
        if pipe.poll(seconds):
            message: Row = pipe.recv()
            return message
        return {"failure": f"no answer for {seconds:g} s"}
    except EOFError:
        worker.join(10)
        code = worker.exitcode or 0
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return {"failure": f"the process ended with {how}"}


def _failed(case: str, failure: str, begin: float) -> Row:
    took_s = round(time.perf_counter() - begin, 2)
    return {"case": case, "right": False, "failure": failure, "took_s": took_s}


def _work(plan: Plan, args: argparse.Namespace, names: Items[str], pipe: Connection) -> None:
    """Run cases and send their rows, until one fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program ends its worker
    end_with_parent(signal.SIGKILL)
    cases = plan(args)
    pipe.send({"facts": device_facts()})
    for name in names:
        begin = time.perf_counter()
        try:
            row = {"case": name, **cases[name]()}
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # an error belongs to the case that caused it
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        except Exception as error:
            traceback.print_exc()
            what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            pipe.send({"row": _failed(name, what, begin)})
            return
        row["took_s"] = round(time.perf_counter() - begin, 2)
        pipe.send({"row": row})
