"""LoPA: its branches are those that a slow search finds, which runs each of them alone."""

import random
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from diffray.components.batch import Batch, Window
from diffray.components.params import SamplingParams
from diffray.kernels.noise import gumbel
from diffray.workers.messages import Request, Resume
from tests.helpers.mixed_requests import BIDIRECTIONAL
from tests.helpers.resuming import updates_of
from tests.helpers.speculating import KINDS, run_all, speculating, texts
from tests.helpers.toy import CPU, MASK, ToyModel, prompt_of, toy_engine

LOPA: dict[str, Any] = {"kind": "lopa", "threshold": 0.6, "branches": 3}


class Found(NamedTuple):
    """What is proposed at a position."""

    token: int
    confidence: float


class Branch(NamedTuple):
    """A canvas, and the step at which each of its tokens became final."""

    canvas: list[int | None]
    steps: dict[int, int]


class Search:
    """LoPA as its paper has it, one canvas at a time."""

    def __init__(self, model: ToyModel, request: Request) -> None:
        self.model, self.params, self.prompt = model, request.params, request.prompt
        options = request.params.diffusion
        self.decoder: Any = options.decoder
        self.dual = options.cache is not None and options.cache.kind == "dual"
        self.block = options.block_length or 0
        self.sub_block = options.iteration.sub_block() if options.iteration else 0
        self.forwards = self.taken = 0
        self.begun = False  # whether the block's first step has been run
        self.kv = toy_engine(model).kv
        self.pages = torch.tensor(self.kv.allocate(20))

    def run(self) -> list[tuple[int, int]]:
        """Return the tokens with the steps at which they became final."""
        causal, prompt = self.model.spec.block_causal, len(self.prompt)
        anchor, limit = (0 if causal else prompt), prompt + self.params.max_tokens
        first = anchor + (prompt - anchor) // self.block * self.block
        end = first + -(-(limit - first) // self.block) * self.block if causal else limit
        best = Branch([*self.prompt, *[None] * (end - prompt)], {})
        for start in range(first, end, self.block):
            best = self._decide(best, start, min(start + self.block, end))
        return [(best.canvas[at] or 0, best.steps[at]) for at in range(prompt, limit)]

    def _decide(self, best: Branch, start: int, stop: int) -> Branch:
        branches: list[Branch] = []
        self.begun = False
        limit = len(self.prompt) + self.params.max_tokens
        while None in best.canvas[start : min(stop, limit)]:
            tried = [(each, self._propose(each, start, stop)) for each in (best, *branches)]
            best, found = max(tried, key=lambda each: _mean(each[1]))  # the first of equals
            self.taken += found is not tried[0][1]
            masks = self._masks(best, start, stop, found)
            chosen = [at for at in masks if found[at].confidence > self.decoder.threshold]
            for at in chosen or masks[:1]:
                best = self._with(best, at, found[at].token, self.forwards)
            self.forwards += 1
            branches = [
                self._with(best, at, found[at].token, self.forwards)
                for at in self._masks(best, start, stop, found)[: self.decoder.branches]
                if found[at].confidence > 0 and best.canvas[start:stop].count(None) > 1
            ]
        return best

    def _masks(self, branch: Branch, start: int, stop: int, found: dict[int, Found]) -> list[int]:
        """Return the masks that may be decided now, the surest first."""
        masks = [at for at in range(start, stop) if branch.canvas[at] is None]
        if self.sub_block and masks:
            stop = masks[0] + self.sub_block - (masks[0] - start) % self.sub_block
            masks = [at for at in masks if at < stop]
        return sorted(masks, key=lambda at: (-found[at].confidence, at))

    def _with(self, branch: Branch, at: int, token: int, step: int) -> Branch:
        canvas = [*branch.canvas[:at], token, *branch.canvas[at + 1 :]]
        return Branch(canvas, branch.steps | {at: step})

    def _propose(self, branch: Branch, start: int, stop: int) -> dict[int, Found]:
        """Return what the model proposes for the masks of a block."""
        begin, logits_NV = self._forward(branch.canvas, start, stop)
        found = {}
        for at in range(start, stop):
            if branch.canvas[at] is not None:
                continue
            logits_V = logits_NV[max(at - self.model.spec.logit_shift, 0) - begin]
            unmasked_V = logits_V.clone()
            unmasked_V[MASK] = -torch.inf
            scores_V = unmasked_V
            if self.params.temperature:
                key = torch.tensor([[self.params.seed], [at], [self.forwards]])
                noise_1V = gumbel(key[0], key[1], key[2], torch.arange(len(logits_V)).unsqueeze(0))
                scores_V = unmasked_V / self.params.temperature + noise_1V[0]
            token = int(scores_V.argmax())
            confidence = float(logits_V.softmax(0)[token])
            found[at] = Found(token, confidence - float(logits_V[MASK] > unmasked_V.max()))
        return found

    def _forward(self, canvas: Items[int | None], start: int, stop: int) -> tuple[int, Tensor]:
        """Run the whole canvas, or under `dual` after its first step the block; return what."""
        ids_N = torch.tensor([MASK if token is None else token for token in canvas])
        spec, kv = self.model.spec, self.kv
        begin, end = max(start - spec.logit_shift, 0), stop
        if not (self.dual and self.begun):
            begin, end = 0, len(ids_N)
        self.begun = True
        block = self.block if spec.block_causal else 0
        window = Window(begin, end, len(ids_N), block, self.pages)
        batch = Batch.pack([window], CPU, kv.page_size)
        x_NH = self.model.forward(self.model.embed(ids_N[begin:end]), batch, kv)
        return begin, self.model.head(x_NH)


def _mean(found: dict[int, Found]) -> float:
    return sum(max(each.confidence, 0.0) for each in found.values()) / len(found)


def draw_requests(count: int, seed: int, model: ToyModel = BIDIRECTIONAL) -> list[Request]:
    """Return requests whose branches the search can follow."""
    draws, causal = random.Random(seed), model.spec.block_causal
    found = []
    iterations: list[dict[str, Any]] = [{"kind": "block_diffusion" if causal else "blockwise"}]
    if causal and not model.spec.logit_shift:
        iterations.append({"kind": "sub_blocks", "sub_block_length": 3})
    for uid in range(count):
        lopa = {"threshold": draws.choice((0.4, 0.6, 0.9)), "branches": draws.choice((1, 2, 4, 7))}
        params = SamplingParams(
            max_tokens=draws.randint(5, 40),
            temperature=draws.choice((0, 0, 0.6)),
            seed=draws.randrange(2**40),
            ignore_eos=True,
            logprobs=True,
            diffusion={
                "decoder": {"kind": "lopa"} | lopa,
                "cache": {"kind": "exact" if causal else draws.choice(("dual", "none"))},
                "iteration": draws.choice(iterations),
                "block_length": draws.choice((4, 8, 16, 20)),
            },
        )
        found.append(Request(uid, prompt_of(draws.randint(1, 40), seed=uid), params))
    return found


def changed(request: Request, decoder: dict[str, Any], **given: Any) -> Request:
    """Return a request with another decoder."""
    diffusion = request.params.diffusion.model_dump(exclude_unset=True) | {"decoder": decoder}
    before = request.params.model_dump(exclude_unset=True)
    return replace(request, params=SamplingParams(**before | {"diffusion": diffusion} | given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.rotate(2)
def test_tokens_steps_and_forwards_are_those_of_the_search(kind: str) -> None:
    model, taken = ToyModel(**KINDS[kind]), 0
    for request in draw_requests(14, 1, model):
        search, engine = Search(model, request), toy_engine(model)
        assert texts(run_all(engine, [request]))[request.uid] == search.run(), request
        assert engine.forwards == search.forwards
        taken += search.taken
    assert taken > 10


@pytest.mark.parametrize("kind", KINDS)
def test_batched_equals_alone_where_the_room_is_equal(kind: str) -> None:
    """Each may have three branches, beside a request that drafts and one that does not."""
    model = ToyModel(**KINDS[kind])
    plain = {"kind": "threshold", "threshold": 0.6}
    drawn = zip(draw_requests(5, 2, model), (*[LOPA] * 3, plain, plain), strict=True)
    requests = [changed(request, decoder) for request, decoder in drawn]
    requests[-1:] = speculating(requests[-1:])
    expected: dict[int, list[tuple[int, int]]] = {}
    for request in requests:
        expected |= texts(run_all(toy_engine(model), [request]))
    for steps in (1, 4):
        assert texts(run_all(toy_engine(model), requests, steps)) == expected


@pytest.mark.parametrize("scarce", ["overhead", "rows", "pages", "slots"])
@pytest.mark.rotate(2)
def test_without_room_it_is_threshold_decoding(scarce: str) -> None:
    """Strictly above the threshold, or the best: `threshold` with a step for each position."""
    model = BIDIRECTIONAL
    for drawn in draw_requests(4, 3):
        request = changed(replace(drawn, prompt=prompt_of(14)), LOPA, max_tokens=34)
        plain = {"kind": "threshold", "threshold": 0.6, "steps_per_block": 34}
        expected = run_all(toy_engine(model), [changed(request, plain)])
        engine = toy_engine(
            model,
            num_slots=1 if scarce == "slots" else 20,
            num_pages=1 + (6 if scarce == "pages" else 300),  # 48 positions are 6 pages
        )
        if scarce == "overhead":
            engine.copies.overhead = 0
        more = {"rows": 17, "slots": 2}.get(scarce, 1)
        found = texts(run_all(engine, [replace(request, uid=uid) for uid in range(more)]))
        assert found[0] == texts(expected)[request.uid]
        assert found[0] != texts(run_all(toy_engine(model), [request]))[request.uid]


@pytest.mark.parametrize(("rows", "branches"), [(1, 5), (3, 5), (4, 4), (9, 1), (17, 0)])
def test_branches_are_run_while_rows_are_few(rows: int, branches: int) -> None:
    engine = toy_engine(ToyModel(), num_slots=20)
    (request,) = draw_requests(1, 4)
    for uid in range(rows):
        engine.add(changed(replace(request, uid=uid), LOPA | {"branches": 5}))
    engine.step()
    assert {len(sequence.copies) for sequence in engine.running} == {branches}


def test_a_request_resumes_with_the_same_tokens() -> None:
    """Preempted in its engine, and continued in another one."""
    requests = draw_requests(2, 3)
    expected = texts(run_all(toy_engine(ToyModel()), requests))
    engine = toy_engine(ToyModel())
    found = updates_of(engine, requests, 1, rounds=2)
    engine.preempt(engine.running[-1].uid)
    found += updates_of(engine, [], 1, rounds=3)
    left = [
        replace(request, resume=Resume.after([u for u in found if u.uid == request.uid]))
        for request in requests
        if request.uid in {sequence.uid for sequence in engine.running}
    ]
    assert left and engine.preemptions
    assert texts(found + run_all(toy_engine(ToyModel()), left)) == expected
