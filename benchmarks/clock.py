"""Which seconds a benchmark on CPU counts, and on how many threads."""

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch


class Clock(NamedTuple):
    """`read` tells the seconds; `said` names threads and seconds in a heading."""

    read: Callable[[], float]
    said: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="for a busy machine: one thread")


def chosen(args: argparse.Namespace) -> Clock:
    """Have torch take as many threads as were asked for, and return the clock."""
    if args.cpu_time:  # idle threads spin, and their time would count
        torch.set_num_threads(1)
        return Clock(time.process_time, "1 threads, processor seconds")
    torch.set_num_threads(args.threads)
    return Clock(time.perf_counter, f"{args.threads} threads, wall clock seconds")
