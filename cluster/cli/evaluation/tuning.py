"""Finds the fastest policy that is as accurate as a reference: successive halving with a guard.

All policies answer a few questions; the better half answers twice as many, and so on. A policy
that loses accuracy for certain leaves at once. Of those that have answered all questions the
fastest wins whose loss is, with 95 % confidence, at most the one allowed.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import product
from math import ceil
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from diffray.cluster.cli.batch_run import Answer, Progress
from diffray.cluster.cli.evaluation.policies import NamedPolicy
from diffray.cluster.cli.evaluation.report import scores_of, summarize
from diffray.cluster.cli.evaluation.run import Asked, Folder, summary_of
from diffray.cluster.cli.evaluation.statistics import Estimate, difference

Json = dict[str, Any]
ERROR: Final = 0.05  # the chance to choose a policy that loses more than allowed
FEWEST: Final = 24  # questions of the first round
FINALISTS: Final = 4  # that answer all questions, at least
_DECODERS: Final[dict[str, list[Json]]] = {
    "threshold": [{"threshold": each} for each in (0.95, 0.9, 0.8, 0.7, 0.6)],
    "hierarchy": [{}, {"low_threshold": 0.4}],
    "credit": [{}, {"threshold": 0.8}],
    "factor": [{"factor": 0.5}, {}],
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy, and what its answers so far say beside the reference's to the same questions."""

    policy: NamedPolicy
    made: Json
    loss: Estimate  # of accuracy; its high end is the guard

    @property
    def speed(self) -> float:
        return float(self.made["tokens_per_second"].value)

    def needed(self, allowed: float) -> int | None:
        """Return about how many questions would show that no more is lost, if that seems so."""
        middle = (self.loss.low + self.loss.high) / 2
        if middle >= allowed:
            return None
        half: float = (self.loss.high - middle) / (allowed - middle)
        return ceil(int(self.made["items"]) * half * half)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The policy that was chosen, the reference, and those that answered all questions."""

    chosen: Candidate
    reference: Candidate
    finalists: list[Candidate]
    rejected: int
    unmeasured: int  # for want of time
    questions: int


def space(accepts: Json) -> list[NamedPolicy]:
    """Return the policies to try for a model, of which the first is the reference.

    The reference makes one token final in a step and computes all positions in each.
    """
    exact = "exact" if "exact" in accepts["cache"] else "none"
    careful = {"decoder": {"kind": "threshold", "threshold": 1.0}, "cache": exact}
    found = [NamedPolicy("reference", {"diffusion": careful})]
    caches = [each for each in accepts["cache"] if each not in ("none", "sub_block")] or ["none"]
    for cache, (kind, settings) in product(caches, _DECODERS.items()):
        if kind not in accepts["decoder"]:
            continue
        for each in settings:
            name = " ".join([kind, *(f"{key}={value}" for key, value in each.items()), cache])
            diffusion = {"decoder": {"kind": kind, **each}, "cache": cache}
            found.append(NamedPolicy(name, {"diffusion": diffusion}))
    return found


def sizes(questions: int) -> list[int]:
    """Return how many questions each round has in all: all in the last, half in the one before."""
    found = [questions]
    while found[0] >= 2 * FEWEST:
        found.insert(0, found[0] // 2)
    return found


@dataclass(slots=True)
class Tuning:
    """A search among policies, of which the first is the reference."""

    out: Path
    asked: Asked
    answer: Answer
    concurrency: int
    allowed: float  # loss of accuracy
    end: float  # when no measurement begins any more, by time.monotonic()
    rejected: int = 0
    unmeasured: int = 0

    async def best(self, policies: Sequence[NamedPolicy]) -> Outcome:
        """Return the policy that is chosen."""
        left, found = list(policies), list[Candidate]()
        *rounds, questions = sizes(len(self.asked.items))
        for size in rounds:
            found = self._kept(compared(await self._measure(left, size), self.concurrency, z_of(1)))
            better = better_half(found[1:], self.allowed)
            left = [each.policy for each in (found[0], *better)]
        measured = await self._measure(left, questions)
        found = self._kept(compared(measured, self.concurrency, z_of(len(left) - 1)))
        reference, *finalists = found
        finalists.sort(key=lambda each: -each.speed)
        holding = (each for each in finalists if each.loss.high <= self.allowed)
        chosen = next((each for each in holding if each.speed > reference.speed), reference)
        return Outcome(chosen, reference, finalists, self.rejected, self.unmeasured, questions)

    async def _measure(
        self, policies: Sequence[NamedPolicy], questions: int
    ) -> list[tuple[NamedPolicy, list[Json]]]:
        """Return each policy's answers to the first questions, as far as there is time."""
        here = replace(self.asked, items=self.asked.items[:questions])
        folders = [Folder(self.out, policy, here) for policy in policies]
        found: list[tuple[NamedPolicy, list[Json]]] = []
        with closing(Progress(summary_of(folders))) as progress:
            for folder in folders:
                if folder.pending and found and time.monotonic() > self.end:
                    self.unmeasured += 1
                    continue
                if folder.pending:
                    await folder.fill(self.answer, progress, self.concurrency)
                if failures := folder.failures():
                    raise ValueError(f"policy {folder.policy.name!r}: {failures[0]}")
                found.append((folder.policy, folder.score()))
        return found

    def _kept(self, found: list[Candidate]) -> list[Candidate]:
        """Return those that do not lose more than allowed for certain."""
        kept = [each for each in found if each.loss.low <= self.allowed]
        self.rejected += len(found) - len(kept)
        return kept


def z_of(tests: int) -> float:
    """Return the bound of one of several tests, so that all together err as seldom as one may."""
    return NormalDist().inv_cdf(1 - ERROR / max(tests, 1))


def compared(
    measured: Iterable[tuple[NamedPolicy, list[Json]]], concurrency: int, z: float
) -> list[Candidate]:
    """Return what each policy's rows say beside those of the first."""
    found: list[Candidate] = []
    first: list[Json] = []
    for policy, rows in measured:
        first = first or rows
        scores, base = scores_of(rows), scores_of(first)
        names = list(base)
        loss = difference([scores[each] for each in names], [base[each] for each in names], z)
        found.append(Candidate(policy, summarize(rows, first, concurrency), loss))
    return found


def better_half(candidates: list[Candidate], allowed: float) -> list[Candidate]:
    """Return half of the candidates: the fastest that seem accurate, and the surest ones."""
    fast = sorted(candidates, key=lambda each: (each.loss.value > allowed, -each.speed))
    sure = sorted(candidates, key=lambda each: (each.loss.high, -each.speed))
    turns = [each for pair in zip(fast, sure, strict=True) for each in pair]
    places = max(ceil(len(candidates) / 2), FINALISTS)
    names = list(dict.fromkeys(each.policy.name for each in turns))[:places]
    return [each for each in candidates if each.policy.name in names]


def as_yaml(outcome: Outcome, asked: Asked, tasks: str, allowed: float) -> str:
    """Return the chosen policy for `diffray serve --diffusion FILE`, with what speaks for it."""
    import yaml

    chosen, reference = outcome.chosen, outcome.reference
    own, base = chosen.made, reference.made
    lines = [
        f"{asked.model}, {outcome.questions} questions of {tasks}, seed {asked.seed}: "
        f"{chosen.policy.name}",
        f"accuracy {own['accuracy'].value:.1%}, the reference's {base['accuracy'].value:.1%}; at "
        f"most {100 * chosen.loss.high:.2f} points are lost, with 95 % confidence (allowed: "
        f"{100 * allowed:g})",
        f"{own['tokens_per_second'].value:.1f} tokens/s, the reference's "
        f"{base['tokens_per_second'].value:.1f}: {chosen.speed / reference.speed:.2f} times",
        f"{own['tokens_per_forward'].value:.2f} tokens per forward, the reference's "
        f"{base['tokens_per_forward'].value:.2f}",
    ]
    if chosen is reference:
        lines[1:] = ["no other policy is faster and certain to lose no more than allowed"]
    comments = "".join(f"# {line}\n" for line in lines)
    diffusion = chosen.policy.request.get("diffusion", {})
    return comments + yaml.safe_dump(diffusion, sort_keys=False)


def table(outcome: Outcome, allowed: float) -> str:
    """Return the policies that answered all questions, the fastest first."""
    headings = "policy", "accuracy", "points lost, at most", "questions needed"
    lines = [(*headings, "tokens/s", "faster"), ("---",) * 6]
    for each in [outcome.reference, *outcome.finalists]:
        lost = needed = ""
        if each is not outcome.reference:
            lost = f"{100 * each.loss.high:.2f}"
            needed = str(each.needed(allowed) or "none: it loses more")
        faster = f"{each.speed / outcome.reference.speed:.2f}"
        accuracy = f"{each.made['accuracy'].value:.1%}"
        lines.append((each.policy.name, accuracy, lost, needed, f"{each.speed:.1f}", faster))
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    text += f"\nPolicies that certainly lose more than allowed: {outcome.rejected}"
    if outcome.unmeasured:
        text += f"; left out for want of time: {outcome.unmeasured}"
    return f"{text}.\n"
