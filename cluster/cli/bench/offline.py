"""What an engine in this process does in a time: the numbers that only mean something together."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from diffray.cluster.cli.bench.phases import Phases
from diffray.cluster.cli.bench.roofline import Reads
from diffray.cluster.control.llm import DiffusionLLM
from diffray.components.params import SamplingParams
from diffray.workers.output import RequestOutput


@dataclass(frozen=True, slots=True)
class Run:
    """Timed generations of one kind; `forwards` are the model's, shared ones counted once.

    Tokens are those before the first end token, and the time includes the prompts'. Tokens per
    forward are a sequence's own, averaged over sequences; so are `sequence_rate`'s tokens per
    second, which are known where sequences ran one by one.
    """

    name: str
    requests: int
    prompt_tokens: int
    tokens: int
    forwards: int
    seconds: float
    tokens_per_forward: float
    latencies: tuple[float, ...]
    sequence_rate: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def forwards_per_second(self) -> float:
        return self.forwards / self.seconds

    @property
    def step_seconds(self) -> float:
        return self.seconds / max(self.forwards, 1)


@dataclass(frozen=True, slots=True)
class Looked:
    """A run, and what a closer look at the same work found, taken after the clock had stopped."""

    run: Run
    split: dict[str, float]  # seconds by phase
    split_forwards: int
    bytes_per_step: float
    bandwidth: float  # bytes per second

    @property
    def roofline_share(self) -> float:
        """The time that memory needs for what a step must read, of the time the step takes."""
        return self.bytes_per_step / self.bandwidth / self.run.step_seconds

    @property
    def shares(self) -> dict[str, float]:
        whole = sum(self.split.values()) or 1.0
        return {phase: seconds / whole for phase, seconds in self.split.items()}

    @property
    def watched_step_seconds(self) -> float:
        """A step's time while it was looked at: how much the looking costs."""
        return sum(self.split.values()) / max(self.split_forwards, 1)

    def as_json(self) -> dict[str, Any]:
        run = self.run
        return asdict(run) | {
            "tokens_per_second": run.tokens_per_second,
            "forwards_per_second": run.forwards_per_second,
            "step_ms": 1e3 * run.step_seconds,
            "split_share": self.shares,
            "split_ms_per_step": {
                phase: 1e3 * seconds / max(self.split_forwards, 1)
                for phase, seconds in self.split.items()
            },
            "watched_step_ms": 1e3 * self.watched_step_seconds,
            "bytes_per_step": self.bytes_per_step,
            "memory_bandwidth": self.bandwidth,
            "roofline_share": self.roofline_share,
        }


def counted(output: RequestOutput, eos_token_ids: Sequence[int], *, ignore_eos: bool) -> int:
    """Return an answer's tokens before its first end token; all where end tokens are ignored."""
    ids = output.outputs[0].token_ids
    if ignore_eos:
        return len(ids)
    return next((place for place, id in enumerate(ids) if id in eos_token_ids), len(ids))


def timed(
    llm: DiffusionLLM,
    name: str,
    batches: Sequence[list[list[int]]],
    params: Sequence[list[SamplingParams]],
) -> Run:
    """Generate batch after batch; each is waited for before the next begins."""
    engine = llm.engine
    before = engine.forwards
    outputs: list[RequestOutput] = []
    latencies, rates = [], []
    for prompts, wishes in zip(batches, params, strict=True):
        begin = time.perf_counter()
        found = llm.generate(list(prompts), wishes, use_tqdm=False)
        latencies.append(time.perf_counter() - begin)
        outputs += found
        if len(found) == 1:
            tokens = counted(found[0], engine.eos_token_ids, ignore_eos=wishes[0].ignore_eos)
            rates.append(tokens / latencies[-1])
    flat = [wish for wishes in params for wish in wishes]
    tokens_each = [
        counted(output, engine.eos_token_ids, ignore_eos=wish.ignore_eos)
        for output, wish in zip(outputs, flat, strict=True)
    ]
    per_forward = [t / max(o.forwards, 1) for t, o in zip(tokens_each, outputs, strict=True)]
    return Run(
        name=name,
        requests=len(outputs),
        prompt_tokens=sum(output.prompt_tokens for output in outputs),
        tokens=sum(tokens_each),
        forwards=engine.forwards - before,
        seconds=sum(latencies),
        tokens_per_forward=fmean(per_forward),
        latencies=tuple(latencies),
        sequence_rate=fmean(rates) if len(rates) == len(outputs) else None,
    )


def look_at(
    llm: DiffusionLLM,
    run: Run,
    prompts: list[list[int]],
    params: list[SamplingParams],
    bandwidth: float,
) -> Looked:
    """Do some of a run's work twice more, for its phases and for the bytes that it reads."""
    with Phases(llm.engine) as phases:
        llm.generate(list(prompts), params, use_tqdm=False)
    with Reads(llm.engine) as reads:
        llm.generate(list(prompts), params, use_tqdm=False)
    return Looked(run, phases.seconds, phases.forwards, reads.bytes_per_step, bandwidth)
