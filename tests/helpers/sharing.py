"""Requests that may share K/V in an engine, each of which must write what it writes alone."""

from typing import Any

from diffray.components.params import SamplingParams
from diffray.workers.engine import Engine
from diffray.workers.messages import Request
from tests.helpers.toy import CountingModel, ToyModel, last_update, run, toy_engine

BLOCK = 16


def request(uid: int, prompt: tuple[int, ...], max_tokens: int = 40, **diffusion: Any) -> Request:
    """Return a request that draws its tokens."""
    policy: dict[str, Any] = {"block_length": BLOCK, **diffusion}
    params = SamplingParams(
        max_tokens=max_tokens, temperature=0.9, seed=uid, ignore_eos=True, diffusion=policy
    )
    return Request(uid, prompt, params)


_ALONE: dict[tuple[object, ...], list[int]] = {}


def alone(engine: Engine, request: Request) -> list[int]:
    """Return what a request writes in an engine of its own that is like this one."""
    spec, form = engine.model.spec, engine.kv.form
    about = request.prompt, request.suffix, repr(request.params)
    key = *about, spec.block_causal, spec.logit_shift, form
    if key not in _ALONE:
        model = ToyModel(spec.block_causal, logit_shift=spec.logit_shift)
        _ALONE[key] = run(toy_engine(model, form=form), [request])[request.uid]
    return _ALONE[key]


def positions(engine: Engine, requests: list[Request]) -> int:
    """Run requests, check their tokens, and return how many positions that took."""
    assert isinstance(engine.model, CountingModel)
    before = engine.model.positions
    assert run(engine, requests) == {each.uid: alone(engine, each) for each in requests}
    return engine.model.positions - before


def cached(engine: Engine, request: Request) -> int:
    """Run a request, check its tokens, and return how many of its prompt's were there."""
    ids, update = last_update(engine, request)
    assert ids == alone(engine, request) and not update.approximate
    return update.cached_tokens
