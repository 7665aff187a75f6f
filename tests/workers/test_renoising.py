"""Canvases of noise: a request finds the same tokens however it is run."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from benchmarks.golden import golden, images_of
from diffray import SamplingParams
from diffray.components.iterations import Renoise
from diffray.workers.admission import check
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.limits import Limits
from diffray.workers.messages import Request
from diffray.workers.setup import build_engine
from tests.helpers import toy
from tests.helpers.paths import GOLDEN

FOLDER = str(GOLDEN / "diffusion_gemma")
QUICK = {"kind": "renoise", "max_steps": 6}
SURE = {"kind": "renoise", "max_steps": 12, "confidence": 1.5, "stability": 0}


def engine(**options: Any) -> Engine:
    setup = EngineOptions(
        **{"dtype": "float64", "device": "cpu", "max_num_seqs": 8, "page_size": 8} | options
    )
    return build_engine(FOLDER, setup)


def requests() -> list[Request]:
    """Return ragged requests with a common beginning; one has an image, the others none."""
    shown = golden("diffusion_gemma")["image"]["prompt"]
    images = images_of(golden("diffusion_gemma"))
    begin = [3 + (7 * at) % 400 for at in range(20)]
    found = []
    for uid in range(6):
        prompt = [*shown, *begin] if uid == 5 else [*begin, *range(20, 25 + 4 * uid)]
        params = SamplingParams(
            max_tokens=11 + 3 * uid,
            seed=uid,
            temperature=uid % 2,
            ignore_eos=True,
            min_tokens=2 if uid == 2 else 0,
            logit_bias={30: 2.0} if uid == 3 else {},
            diffusion={
                "block_length": (8, 12, 16)[uid % 3],
                "iteration": QUICK if uid % 2 else SURE,
                "cache": {"kind": "none" if uid == 4 else "exact"},
            },
        )
        found.append(Request(uid, tuple(prompt), params, images=images if uid == 5 else ()))
    return found


def run(made: Engine, asked: list[Request], steps: int = 1) -> dict[int, list[int]]:
    found = toy.run(made, asked, steps)
    assert made.kv.num_free == made.kv.num_pages - 1
    assert made.slots.soft.num_rows == 0
    return found


@cache
def engine_limits() -> Limits:
    return engine().limits


@cache
def alone() -> dict[int, list[int]]:
    made = engine(enable_prefix_caching=False)
    found: dict[int, list[int]] = {}
    for request in requests():
        found |= run(made, [request])
    return found


@pytest.mark.parametrize(
    ("shared", "options", "steps"),
    [(False, {}, 3), (True, {"chunk": 8}, 1), (True, {"kv_cache_memory": 220_000}, 1)],
)
@pytest.mark.rotate(1)
def test_batched_equals_alone(shared: bool, options: dict[str, Any], steps: int) -> None:
    """Prefixes are shared or not, prompts are stored in chunks, and memory is short."""
    made = engine(enable_prefix_caching=shared, **options)
    assert run(made, requests(), steps) == alone()
    assert run(made, requests()) == alone()  # what is left of the prefixes is right
    if "kv_cache_memory" in options:
        assert made.preemptions > 0


def test_prefixes_are_shared_by_whole_pages_whatever_the_canvas() -> None:
    made = engine()
    run(made, requests())
    made.add(requests()[1])
    cached = [update.cached_tokens for _ in range(30) for update in made.step()]
    assert max(cached) == 24  # three pages of 8 of a prompt of 29
    assert len(requests()[1].prompt) == 29


def test_a_chunk_or_a_shared_prefix_may_end_at_an_image() -> None:
    """Pages and chunks of 4 would cut the image, which is at 3 to 7: a chunk passes over it."""
    made, request = engine(page_size=4, chunk=4), requests()[5]
    short = request.params.model_copy(
        update={"diffusion": request.params.diffusion.model_copy(update={"block_length": 2})}
    )
    # Of other texts after the image its first token alone is in the shared page.
    for prompt in (request.prompt, (*request.prompt[:7], 9, 9)):
        asked = [replace(request, prompt=prompt, params=short)]
        assert run(made, asked) == run(engine(enable_prefix_caching=False), asked)


def test_another_image_is_another_prefix() -> None:
    made, request = engine(), requests()[5]
    run(made, [request])
    (image,) = request.images
    other = replace(image, pixels=bytes(len(image.pixels)))
    changed = Request(7, request.prompt, request.params, images=(other,))
    assert run(made, [changed])[7] != alone()[5]
    assert run(made, [request])[5] == alone()[5]


def test_tokens_are_reported_a_canvas_at_a_time() -> None:
    made = engine()
    made.add(requests()[4])  # 23 tokens in canvases of 12
    lengths = [len(update.ids) for _ in range(30) for update in made.step() if update.ids]
    assert made.idle and lengths == [12, 11]


def test_a_canvas_cools_from_its_first_step_on() -> None:
    rule = Renoise(max_steps=4, t_min=0.4, t_max=0.8)
    assert [rule.temperature(n, 1.0) for n in range(4)] == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert rule.temperature(2, 0.5) == pytest.approx(0.3), "times what is asked for"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"start": 2}, "the prompt must have token 508 from 2 to 6"),
        ({"columns": 5}, "are not rows of 5 patches"),
        ({"columns": 4}, "must be multiples of 3"),
        ({"columns": 0}, "are not rows of 0"),
        ({"pixels": b"123"}, "3 bytes are not rows"),
        (None, "where no image is"),
    ],
)
def test_an_image_that_does_not_fit_is_refused(change: dict[str, Any] | None, said: str) -> None:
    (image,) = images_of(golden("diffusion_gemma"))
    images = () if change is None else (replace(image, **change),)
    with pytest.raises(ValueError, match=said):
        check(replace(requests()[5], images=images), engine_limits())


def test_a_mask_token_is_refused() -> None:
    with pytest.raises(ValueError, match="this model has none"):
        engine(mask_token_id=3)
