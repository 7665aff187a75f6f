"""Finds the fastest policy that is as accurate as a reference: successive halving with a guard.

All policies answer a few questions; the better half answers twice as many, and so on. A policy
that certainly loses too much accuracy leaves at once. In the end the fastest wins whose loss is,
with 95 % confidence for all policies together, at most the one allowed.
"""

import time
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import product
from math import ceil
from pathlib import Path
from statistics import NormalDist
from typing import Any, Final

from diffray.cluster.api.batch_lines import Answer
from diffray.cluster.cli.batch_run import Progress
from diffray.cluster.cli.evaluation.policies import NamedPolicy
from diffray.cluster.cli.evaluation.report import as_table, scores_of, summarize
from diffray.cluster.cli.evaluation.run import Asked, Folder, summary_of
from diffray.cluster.cli.evaluation.statistics import Estimate, difference, largest

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
    counts: tuple[float, float, int]  # points that it loses, that it gains, and questions
    z: float

    @property
    def speed(self) -> float:
        return float(self.made["tokens_per_second"].value)

    def needed(self, allowed: float) -> int | None:
        """Return about how many questions would show that no more is lost, if that seems so."""
        if self.loss.value >= allowed:
            return None
        lost, gained, n = self.counts
        times = 1.0
        while largest(times * lost, times * gained, times * n, self.z) > allowed:
            times *= 1.05
        return ceil(times * n)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The policy that was chosen, the reference, and those that answered all questions."""

    chosen: Candidate
    reference: Candidate
    finalists: list[Candidate]
    others: list[Candidate]  # with the questions that they answered
    rejected: int
    unmeasured: int  # for want of time
    questions: int
    refused: dict[str, str]  # why policies got no answers


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
    allowed: float  # loss of accuracy
    end: float  # when no measurement begins any more, by time.monotonic()
    rejected: int = 0
    unmeasured: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # why policies got no answers

    async def best(self, policies: Sequence[NamedPolicy]) -> Outcome:
        """Return the policy that is chosen.

        All policies are tested on the same questions, so each test errs as seldom as all may.
        """
        z = NormalDist().inv_cdf(1 - ERROR / max(len(policies) - 1, 1))
        left, found, asked = list(policies), list[Candidate](), 0
        seen: dict[str, Candidate] = {}
        for size in sizes(len(self.asked.items)):
            if found and (len(left) == 1 or time.monotonic() > self.end):
                self.unmeasured += len(left) - 1
                break
            measured = compared(await self._measure(left, size), self.asked.concurrency, z)
            found, asked = [each for each in measured if each.loss.low <= self.allowed], size
            self.rejected += len(measured) - len(found)
            seen |= {each.policy.name: each for each in measured}
            better = better_half(found[1:], self.allowed)
            left = [each.policy for each in (found[0], *better)]
        reference, *finalists = found
        finalists.sort(key=lambda each: -each.speed)
        holding = (each for each in finalists if each.loss.high <= self.allowed)
        chosen = next((each for each in holding if each.speed > reference.speed), reference)
        counts = self.rejected, self.unmeasured, asked
        others = [each for each in seen.values() if each not in found]
        return Outcome(chosen, reference, finalists, others, *counts, self.refused)

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
                    await folder.fill(self.answer, progress)
                if not (failures := folder.failures()):
                    found.append((folder.policy, folder.score()))
                elif not found:
                    raise ValueError(f"the reference {folder.policy.name!r} fails: {failures[0]}")
                else:
                    self.refused[folder.policy.name] = failures[0]
        return found


def compared(
    measured: Iterable[tuple[NamedPolicy, list[Json]]], concurrency: int, z: float
) -> list[Candidate]:
    """Return what each policy's rows say beside those of the first."""
    found: list[Candidate] = []
    first: list[Json] = []
    for policy, rows in measured:
        first = first or rows
        scores, base = scores_of(rows), scores_of(first)
        lost = [base[name] - scores[name] for name in base]
        loss = difference([scores[name] for name in base], list(base.values()), z)
        counts = sum(max(each, 0) for each in lost), sum(max(-each, 0) for each in lost), len(lost)
        made = summarize(rows, first, concurrency)
        found.append(Candidate(policy, made, loss, counts, z))
    return found


def better_half(candidates: list[Candidate], allowed: float) -> list[Candidate]:
    """Return half of the candidates: the fastest that seem accurate, and those easiest to prove.

    These have the fewest scores that differ from the reference's.
    """
    fast = sorted(candidates, key=lambda each: (each.loss.value > allowed, -each.speed))
    sure = sorted(candidates, key=lambda each: (each.loss.high - each.loss.low, -each.speed))
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
    if asked.engine:
        lines.append(f"engine: {', '.join(f'{k} {v}' for k, v in asked.engine.items())}")
    if chosen is reference:
        lines[1:] = ["no other policy is faster and certain to lose no more than allowed"]
    comments = "".join(f"# {line}\n" for line in lines)
    diffusion = chosen.policy.request.get("diffusion", {})
    return comments + yaml.safe_dump(diffusion, sort_keys=False)


def table(outcome: Outcome, allowed: float) -> str:
    """Return the policies that answered all questions, the fastest first, and then the others."""
    headings = "policy", "questions", "accuracy", "points lost, at most", "questions needed"
    lines = list[tuple[str, ...]]()
    for each in [outcome.reference, *outcome.finalists, *outcome.others]:
        lost = needed = ""
        if each is not outcome.reference:
            lost = f"{100 * each.loss.high:.2f}"
            needed = str(each.needed(allowed) or "none: it loses more")
        faster = f"{each.speed / outcome.reference.speed:.2f}"
        accuracy = f"{each.made['accuracy'].value:.1%}"
        asked = str(each.made["items"])
        lines.append((each.policy.name, asked, accuracy, lost, needed, f"{each.speed:.1f}", faster))
    text = as_table((*headings, "tokens/s", "faster"), lines)
    text += f"\n\nPolicies that certainly lose more than allowed: {outcome.rejected}"
    if outcome.unmeasured:
        text += f"; left out for want of time: {outcome.unmeasured}"
    refused = "".join(f"{name}: {why}\n" for name, why in outcome.refused.items())
    return f"{text}.\n{refused}"
