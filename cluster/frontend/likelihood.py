"""How likely a model finds given answers: which requests tell it, and what they add up to.

`autoregressive` is the exact log-probability of a model that writes one token after the other.
`left_to_right` is the same product for a model of masks, which sees masks for the tokens not yet
written: a forward for each token. `monte_carlo` is LLaDA's estimate of a lower bound, the one that
such models are trained on: of `samples` random numbers of masks, each token's log-probability at
once, times all tokens over masked ones. Where attention is block-causal, each block has its own
number of masks and follows the true blocks before it.
"""

import math
import random
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import chain
from statistics import stdev
from typing import Any, Final, Literal, NamedTuple, get_args

from diffray.cluster.frontend.given import Given
from diffray.cluster.frontend.output import CompletionOutput
from diffray.components.canvas import Canvas
from diffray.components.model_spec import ModelSpec
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams, Policy

Method = Literal["autoregressive", "left_to_right", "monte_carlo"]
METHODS: Final[tuple[Method, ...]] = get_args(Method)

_OF_MASKS: Final = ("blockwise", "block_diffusion")
Shown = tuple[int, ...]  # the places of an answer that are not masked


@dataclass(frozen=True, slots=True)
class LogLikelihood:
    """What a model says of an answer."""

    # Of the whole; of `monte_carlo` an estimate, and `error` is its standard error, NaN if unknown.
    logprob: float
    method: Method
    error: float
    forwards: int
    # Of each token, and the most probable ones in its place; `monte_carlo` has neither.
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None

    @property
    def is_greedy(self) -> bool | None:
        """Whether each token was the most probable one; None if that is not known."""
        if self.logprobs is None or self.top_logprobs is None:
            return None
        pairs = zip(self.logprobs, self.top_logprobs, strict=True)
        return all(logprob >= top[0][1] for logprob, top in pairs)


class Query(NamedTuple):
    """An answer whose likelihood is asked for, and what its requests show of it."""

    method: Method
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    blocks: list[range]  # places that are denoised together
    shown: Counter[Shown]  # with how many samples show the same

    @property
    def requests(self) -> list[Given]:
        return [Given(None, self.prompt, answer=self.answer, places=each) for each in self.shown]

    def result(self, outputs: Items[CompletionOutput]) -> LogLikelihood:
        """Return the mean over samples, of which all but `monte_carlo` have one."""
        totals, forwards = list[float](), sum(output.forwards for output in outputs)
        for (places, count), output in zip(self.shown.items(), outputs, strict=True):
            assert output.logprobs is not None
            totals += [self._total(frozenset(places), output.logprobs)] * count
        error = stdev(totals) / math.sqrt(len(totals)) if len(totals) > 1 else math.nan
        if self.method != "monte_carlo" or all(len(block) == 1 for block in self.blocks):
            error = 0.0
        found = LogLikelihood(math.fsum(totals) / len(totals), self.method, error, forwards)
        if self.method == "monte_carlo":
            return found
        return replace(found, logprobs=outputs[0].logprobs, top_logprobs=outputs[0].top_logprobs)

    def _total(self, shown: frozenset[int], logprobs: list[float]) -> float:
        total = 0.0
        for block in self.blocks:
            masked = [logprobs[at] for at in block if at not in shown]
            total += len(block) / len(masked) * math.fsum(masked)
        return total


@dataclass(frozen=True, slots=True)
class Scorer:
    """Scores answers with one method: which requests it takes."""

    spec: ModelSpec
    method: Method
    samples: int = 128
    seed: int = 0
    lora: str = ""
    cfg_scale: float = 0.0
    top_logprobs: int = 1

    @staticmethod
    def of(spec: ModelSpec, method: str | None, **options: Any) -> "Scorer":
        """Choose a model's own method if none is named; refuse one that does not fit it."""
        fits: list[Method] = ["autoregressive"] if "autoregressive" in spec.iterations else []
        if any(kind in spec.iterations for kind in _OF_MASKS):
            fits += ["monte_carlo", "left_to_right"]
        if not fits:
            raise ValueError("the canvases of this model are noise, so no answer has a likelihood")
        for name, least in (("samples", 1), ("seed", -(2**63))):
            number = options.get(name, least)
            if type(number) is not int or number < least:
                raise ValueError(f"{name} is {number!r}; expected an integer, {least} or more")
        for each in fits:
            if method in (None, each):
                return Scorer(spec, each, **options)
        raise ValueError(f"method {method!r} does not fit this model; use {' or '.join(fits)}")

    @staticmethod
    def for_prompts(spec: ModelSpec, top_logprobs: int) -> "Scorer":
        """Ask for each token's log-probability after those before it, whatever they are."""
        exact = "autoregressive" in spec.iterations
        method = "autoregressive" if exact else "left_to_right"
        return Scorer.of(spec, method, top_logprobs=top_logprobs)

    def params(self, length: int) -> SamplingParams:
        """Return the parameters of the requests about an answer."""
        samples = self.method == "monte_carlo"
        diffusion: dict[str, Any] = dict.fromkeys(DiffusionParams.model_fields)
        diffusion |= {"zero_confidence_token_ids": (), "cfg_scale": self.cfg_scale}
        if self.method == "autoregressive":
            diffusion["iteration"] = "autoregressive"
        else:
            kind = next(each for each in self.spec.iterations if each in _OF_MASKS)
            causal = self.spec.block_causal or kind == "block_diffusion"
            # From left to right, blocks that see the whole canvas change nothing.
            diffusion |= {
                "iteration": kind,
                "decoder": {"kind": "sequential", "steps_per_block": 1 if samples else None},
                "block_length": length if samples and not causal else None,
                "cache": "exact" if causal else "none",
                "canvas": "fixed",
            }
        return SamplingParams(
            max_tokens=length,
            ignore_eos=True,
            logprobs=True,
            top_logprobs=0 if samples else self.top_logprobs,
            lora=self.lora,
            diffusion=diffusion,
        )

    def query(self, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Query:
        policy = Policy.resolve(self.params(len(answer)).diffusion, self.spec)
        canvas = Canvas(prompt, (), len(answer), policy, self.spec, self.spec.max_positions)
        blocks = [*_blocks(len(answer), len(prompt) - canvas.anchor, policy.block_length)]
        shown = Counter[Shown]([()])
        if self.method == "monte_carlo":
            draws = random.Random(repr((self.seed, prompt, answer)))  # whatever else is asked
            parts = [_patterns(block, self.samples, draws) for block in blocks]
            shown = Counter(tuple(sorted(chain(*each))) for each in zip(*parts, strict=True))
        return Query(self.method, prompt, answer, blocks, shown)


def _blocks(length: int, before: int, block_length: int) -> Iterator[range]:
    """Cut an answer whose first block has so many positions before it."""
    start = 0
    for stop in range(block_length - before, length + block_length, block_length):
        yield range(start, min(stop, length))
        start = stop
        if start >= length:
            return


def _patterns(block: range, samples: int, draws: random.Random) -> list[Shown]:
    """Return what each sample shows of a block; the numbers of masks are spread evenly."""
    first, found = draws.random(), list[Shown]()
    for sample in range(samples):
        masks = int((first + sample / samples) % 1 * len(block)) + 1
        found.append(tuple(draws.sample(block, len(block) - masks)))
    draws.shuffle(found)  # blocks are independent of each other
    return found
