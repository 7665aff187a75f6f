"""The method of DiffusionLLM that returns how likely answers are."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Items
from itertools import islice
from typing import TYPE_CHECKING, Final

from diffray.cluster.frontend.given import Given, Reader
from diffray.cluster.frontend.likelihood import LogLikelihood, Method, Query, Scorer
from diffray.cluster.frontend.output import RequestOutput
from diffray.cluster.frontend.prompts import Prompt, as_list
from diffray.components.params import SamplingParams
from diffray.workers.limits import Limits

if TYPE_CHECKING:
    from diffray.cluster.control.llm import Bar


_TOGETHER: Final = 2048  # requests that are made at a time


class Likelihoods(ABC):
    """The method, for a class that runs requests."""

    _reader: Reader

    @property
    @abstractmethod
    def limits(self) -> Limits: ...

    @abstractmethod
    def _run(
        self, given: list[Given], params: list[SamplingParams], use_tqdm: "Bar"
    ) -> list[RequestOutput]: ...

    def loglikelihood(
        self,
        prompts: Prompt | Items[Prompt],
        answers: Prompt | Items[Prompt],
        *,
        method: Method | None = None,
        samples: int = 128,
        seed: int = 0,
        lora: str = "",
        cfg_scale: float = 0.0,
        top_logprobs: int = 1,
        use_tqdm: "Bar" = True,
    ) -> list[LogLikelihood]:
        """Return how likely the model finds each answer after its prompt.

        By default exactly for a model that writes one token after the other, else by LLaDA's
        `monte_carlo` estimate with `samples` forwards for each block of the answer, which depends
        on `seed` alone. `left_to_right` takes a forward for each token.
        """
        before, after = as_list(prompts), as_list(answers)
        if len(before) != len(after):
            raise ValueError(f"{len(before)} prompts for {len(after)} answers; give one each")
        scorer = Scorer.of(
            self.limits.spec,
            method,
            samples=samples,
            seed=seed,
            lora=lora,
            cfg_scale=cfg_scale,
            top_logprobs=top_logprobs,
        )
        given = [self._reader.answered(*both) for both in zip(before, after, strict=True)]
        if not all(each.prompt and each.answer for each in given):
            raise ValueError("a likelihood needs a prompt and an answer of at least one token each")
        found, part = list[LogLikelihood](), list[Query]()
        for number, each in enumerate(given, 1):  # a task may need millions of requests
            part.append(scorer.query(each.prompt, each.answer))
            if number == len(given) or len(part) * len(part[0].shown) >= _TOGETHER:
                found += self._results(scorer, part, use_tqdm)
                part = []
        return found

    def _results(
        self, scorer: Scorer, queries: list[Query], use_tqdm: "Bar"
    ) -> list[LogLikelihood]:
        params = {length: scorer.params(length) for length in {len(q.answer) for q in queries}}
        requests = [each for query in queries for each in query.requests]
        outputs = iter(self._run(requests, [params[len(r.answer)] for r in requests], use_tqdm))
        return [
            query.result([found.outputs[0] for found in islice(outputs, len(query.shown))])
            for query in queries
        ]
