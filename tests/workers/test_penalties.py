"""Penalties, min-p and n-grams that must not repeat, against a slow sampler of one request."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from diffray.components.decoders.threshold import Threshold
from diffray.components.params import SamplingParams
from diffray.kernels import noise
from diffray.workers.messages import Request
from tests.helpers.mixed_requests import BIDIRECTIONAL, CAUSAL, PENALTIES
from tests.helpers.toy import EOS, MASK, VOCAB, ScriptedModel, generate, prompt_of, run, toy_engine

BLOCK = 8
FEW = 12  # tokens that the table likes, so that they come back


def table(seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    found = torch.randn(128, VOCAB, generator=draw, dtype=torch.float64) * 2
    found[:, :FEW] += 2.0
    found[::13, EOS] += 9.0  # which becomes final before what precedes it
    found[::5, MASK] += 5.0
    return found


def model_of(logits: Tensor, causal: bool) -> ScriptedModel:
    return ScriptedModel(lambda at: dict(enumerate(logits[at].tolist())), block_causal=causal)


@dataclass
class Slow:
    """A sampler that knows neither batches nor rounds, and counts with Python's own words."""

    logits: Tensor
    request: Request
    causal: bool
    canvas: dict[int, int] = field(default_factory=dict)  # final tokens of the answer
    step: int = 0

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def limit(self) -> int:
        return len(self.request.prompt) + self.params.max_tokens

    def run(self) -> list[int]:
        begin, size = len(self.request.prompt), self.params.diffusion.block_length or BLOCK
        anchor = 0 if self.causal else begin
        start = anchor + (begin - anchor) // size * size
        while start < self.limit:
            stop = start + size if self.causal else min(start + size, self.limit)
            self.block([at for at in range(start, stop) if at >= begin], stop - start)
            start = stop
        ids = [self.canvas[at] for at in range(begin, self.limit)]
        return ids[: ids.index(EOS) + 1] if EOS in ids else ids

    def block(self, places: list[int], length: int) -> None:
        decoder: Any = self.params.diffusion.decoder or Threshold()
        edits, settled = decoder.kind == "edit", 0
        while True:
            masked = [at for at in places if at not in self.canvas]
            found = {at: self.choose(at) for at in (places if edits else masked)}
            sure = {at: confidence for at, (_, confidence) in found.items()}
            taken = [at for at in masked if sure[at] > decoder.threshold]
            taken = taken or sorted(masked, key=lambda at: sure[at])[-1:]
            if edits:
                taken += [
                    at
                    for at in places
                    if at in self.canvas
                    and sure[at] > decoder.edit_threshold
                    and found[at][0] != self.canvas[at]
                ]
                settled += not masked
            self.canvas |= {at: found[at][0] for at in taken}
            self.step += 1
            done = all(at in self.canvas for at in places)
            if done and (not edits or not taken or settled >= min(16, max(length, 32))):
                return

    def choose(self, at: int) -> tuple[int, float]:
        row = self.penalized(at)
        shares = row.softmax(0)
        masks = row[MASK].item()
        row[MASK] = -torch.inf
        best = int(row.argmax())
        if self.params.draws:
            tempered = row / self.params.temperature
            odds = tempered.softmax(0)
            tempered[odds < self.params.min_p * odds.max()] = -torch.inf
            seed, place, step = (
                torch.tensor([each]) for each in (self.params.seed or 0, at, self.step)
            )
            drawn = noise.gumbel(seed, place, step, torch.arange(VOCAB)[None])[0]
            token = int((tempered + drawn).argmax())
        else:
            token = best
        return token, shares[token].item() - (masks > row[best].item())

    def penalized(self, at: int) -> Tensor:
        row, params = self.logits[at].tolist(), self.params
        written = []
        for place in range(len(self.request.prompt), self.limit):
            if self.canvas.get(place) == EOS:
                break
            if place in self.canvas and place != at:
                written.append(self.canvas[place])
        # An end token that stands at the place itself hides what follows it all the same.
        for token in range(VOCAB):
            if token in written or token in (*self.request.prompt, *self.request.suffix):
                factor = params.repetition_penalty
                row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
            row[token] -= params.frequency_penalty * written.count(token)
            row[token] -= params.presence_penalty * (token in written)
        return torch.tensor(row, dtype=torch.float64)


DECODERS: list[dict[str, Any]] = [
    {"kind": "threshold", "threshold": 0.5},
    {"kind": "edit", "threshold": 0.4, "edit_threshold": 0.1},
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("decoder", DECODERS, ids=["threshold", "edit"])
@pytest.mark.parametrize("ignore_eos", [False, True])
@pytest.mark.rotate(2)
def test_tokens_are_those_of_a_slow_sampler(
    causal: bool, decoder: dict[str, Any], ignore_eos: bool
) -> None:
    changed = 0
    for number, penalties in enumerate(PENALTIES):
        params = SamplingParams(
            max_tokens=21,
            ignore_eos=True,
            temperature=(0, 0.8)[number % 2],
            min_p=(0, 0.2)[number % 2],
            seed=number,
            diffusion={"decoder": decoder, "block_length": BLOCK},
            **penalties,
        )
        params = params.model_copy(update={"ignore_eos": ignore_eos})
        suffix = () if causal else prompt_of(4, number)
        request = Request(0, prompt_of(6, number), params, suffix=suffix)
        logits = table(number)
        slow = Slow(logits, request, causal)
        if ignore_eos:
            logits[:, EOS] = -50.0  # an end token would count, as any other
        expected = slow.run()
        for steps in (1, 4):
            assert run(toy_engine(model_of(logits, causal)), [request], steps)[0] == expected
        free = replace(request, params=params.model_copy(update=dict.fromkeys(penalties, 0.0)))
        if "repetition_penalty" not in penalties:
            changed += Slow(logits, free, causal).run() != expected
    assert changed


def test_penalties_are_as_exact_as_the_logits() -> None:
    # Rounded to float32, 0.1 is larger by 1.5e-9, and the second token would be another one.
    model = ScriptedModel(lambda at: {5: 9.1, 6: 9.0 - 1e-9 if at > 1 else 0.0})
    for penalty, expected in ((0.1, [5, 5]), (0.11, [5, 6])):
        given: dict[str, Any] = {"presence_penalty": penalty, "diffusion": {"block_length": 1}}
        assert generate(model, (1,), max_tokens=2, **given) == expected


def test_neutral_values_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse = Mock(side_effect=AssertionError("asked for by nobody"))
    monkeypatch.setattr("diffray.workers.batch_plan.choose", refuse)
    zeros = "presence_penalty", "frequency_penalty", "min_p", "no_repeat_ngram_size"
    neutral: dict[str, Any] = dict.fromkeys(zeros, -0.0) | {"repetition_penalty": 1}
    for temperature in (0, 0.7):
        params = SamplingParams(max_tokens=9, temperature=temperature, logprobs=True, **neutral)
        request = Request(0, prompt_of(9), params)
        assert toy_engine(BIDIRECTIONAL).check(request).transforms == ()
        assert run(toy_engine(BIDIRECTIONAL), [request])
    with pytest.raises(AssertionError, match="asked for"):
        generate(BIDIRECTIONAL, prompt_of(9), presence_penalty=0.1)


def repeats(ids: Items[int], size: int) -> int:
    runs = [tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)]
    return len(runs) - len({*runs})


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_no_ngram_is_repeated(causal: bool, size: int) -> None:
    logits = table(7)
    logits[:, EOS] = -50.0
    logits[:, :4] += 5.0
    prompt = (1, 2, 3, 1, 2)
    one: dict[str, Any] = {"max_tokens": 40, "diffusion": {"block_length": 1}}
    free = generate(model_of(logits, causal), prompt, **one)
    assert repeats(free, size)
    found = generate(model_of(logits, causal), prompt, no_repeat_ngram_size=size, **one)
    expected = list(prompt)
    for at in range(len(prompt), len(prompt) + 40):
        row = logits[at].clone()
        row[MASK] = -torch.inf
        while repeats([*expected, int(row.argmax())], size) > repeats(expected, size):
            row[int(row.argmax())] = -torch.inf
        expected.append(int(row.argmax()))
    assert found == expected[len(prompt) :]


def test_ngrams_may_repeat_for_want_of_others() -> None:
    only: dict[str, Any] = {"allowed_token_ids": [3, 4], "max_tokens": 6, "ignore_eos": True}
    for model in (BIDIRECTIONAL, CAUSAL):
        found = generate(model, (9,), no_repeat_ngram_size=1, diffusion={"block_length": 1}, **only)
        assert set(found[:2]) == {3, 4} == set(found)
