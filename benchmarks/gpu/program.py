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
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch

from benchmarks.gpu.measure import device_facts, noted_variants, source_facts
from benchmarks.gpu.targets import verdicts

Row = dict[str, Any]
Plan = Callable[[argparse.Namespace], dict[str, Callable[[], Row]]]

ENGINE_NEEDS = ("pydantic", "safetensors", "tqdm")
_PRCTL, _PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1
_SIGNALS = signal.SIGINT, signal.SIGTERM


def arguments(what: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every GPU program."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--out", type=_new_file, help="write the JSON report here, not to stdout")
    parser.add_argument(
        "--choices", type=Path, help="the folder that `bring_up` writes; without it defaults run"
    )
    parser.add_argument("--case-seconds", type=float, default=60, help="abandon a case after this")
    parser.add_argument("--list", action="store_true", help="name the cases, and run none")
    return parser


def _new_file(name: str) -> Path:
    """Return the path of a report; remove an earlier one, even if this run writes none."""
    path = Path(name)
    path.unlink(missing_ok=True)
    return path


def need_cuda() -> None:
    """End the program with one sentence and exit status 2 if there is no CUDA device."""
    if not torch.cuda.is_available():
        _refuse("This needs a GPU, and torch sees no CUDA device here; run it where there is one.")


def missing_packages() -> list[str]:
    """Return the missing packages that the engine needs besides torch and Triton."""
    return [name for name in ENGINE_NEEDS if find_spec(name) is None]


def need_engine() -> None:
    """End the program with one sentence and exit status 2 if the engine cannot be imported."""
    if missing := missing_packages():
        _refuse(f"This runs the engine, which needs more: pip install {' '.join(missing)}")


def end_with_parent(last: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, even if that is killed."""
    _PRCTL(_PR_SET_PDEATHSIG, last)


def _refuse(why: str) -> NoReturn:
    print(why, file=sys.stderr)
    raise SystemExit(2)


def run(
    plan: Plan, args: argparse.Namespace, line: Callable[[Row], str], *, engine: bool = False
) -> None:
    """Run the cases of a plan, each guarded; exit with status 1 if a case is wrong.

    `plan` returns the cases by name without touching the device; workers call it again. A case
    returns its row, in which `right` is True or False if there is something to judge. `engine`
    says that cases need what the engine needs.
    """
    if not args.list and getattr(args, "device", "cuda") == "cuda":
        need_cuda()
    if engine:
        need_engine()
    names = list(plan(args))
    if args.list:
        print(*names, sep="\n")
        return
    program, rows = Path(sys.argv[0]).stem, list[Row]()
    facts, variants = source_facts(), dict[str, str]()

    def write(*, last: bool = False) -> Row:
        report = {
            "program": program,
            "complete": len(rows) == len(names) > 0,
            "cases": len(names),
            "wrong": sum(row.get("right") is False for row in rows),
            "verdicts": verdicts(program, rows, facts.get("gpu", "")),
            "facts": facts,
            "variants": variants,
            "rows": rows,
        }
        if args.out is not None:
            _replace(args.out, json.dumps(report, indent=1) + "\n")
        elif last:
            print(json.dumps(report, indent=1))
        return report

    with ended_by_signals():
        write()
        try:
            with closing(_messages(plan, args, names)) as messages:
                for message in messages:
                    facts |= message.get("facts", {})
                    variants |= message.get("variants", {})
                    if "row" in message:
                        rows.append(message["row"])
                        print(_line(rows[-1], line), flush=True)
                        write()
        finally:
            report = write(last=True)
    for verdict in report["verdicts"]:
        print(verdict)
    if report["wrong"]:
        raise SystemExit(f"{report['wrong']} of {len(rows)} cases failed; see the lines with WRONG")


def _line(row: Row, line: Callable[[Row], str]) -> str:
    mark = {True: "right", False: "WRONG", None: "     "}[row.get("right")]
    return f"{mark} {row['case']:52} {row['failure'] if 'failure' in row else line(row)}"


def _replace(path: Path, text: str) -> None:
    """Write a file in one step, so that a reader never finds half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text)
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
    done = 0
    while done < len(names):
        for message in _one_worker(plan, args, names[done:]):
            yield message
            done += "row" in message


def _one_worker(plan: Plan, args: argparse.Namespace, names: Items[str]) -> Iterator[Row]:
    """Yield what a worker sends, up to the first error or the end of the worker."""
    context = get_context("spawn")
    here, there = context.Pipe(duplex=False)
    worker = context.Process(target=_work, args=(plan, args, names, there), daemon=True)
    worker.start()
    there.close()
    try:
        for name in ("", *names):  # the worker's facts come first
            begin, failure, picked = time.perf_counter(), "", dict[str, str]()
            message: Row = {"variants": {}}
            try:
                while "variants" in message:  # a case reports them before they run
                    yield message
                    picked |= message["variants"]
                    if here.poll(args.case_seconds):
                        message = here.recv()
                    else:
                        failure = f"no answer for {args.case_seconds:g} s"
                        break
            except EOFError:
                worker.join(10)
                failure = f"the process ended with {_ending(worker.exitcode)}"
            if failure and not name:
                raise SystemExit(f"No case could be run: {failure}")
            if failure:
                message = {"row": _failed(name, failure, begin)}
            if "failure" in message.get("row", ()):
                message["row"]["variants"] = picked
            yield message
            if "failure" in message.get("row", ()):
                return
    finally:
        worker.kill()
        worker.join()
        here.close()


def _ending(code: int | None) -> str:
    """Return how a process ended."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"


def _failed(case: str, failure: str, begin: float) -> Row:
    took_s = round(time.perf_counter() - begin, 2)
    return {"case": case, "right": False, "failure": failure, "took_s": took_s}


def _work(plan: Plan, args: argparse.Namespace, names: Items[str], pipe: Connection) -> None:
    """Run cases and send their rows, until one fails."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the program ends its worker
    end_with_parent(signal.SIGKILL)
    cases = plan(args)
    pipe.send({"facts": device_facts()})
    with noted_variants(lambda place, name: pipe.send({"variants": {place: name}})):
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
