"""With two-way attention, requests with the same canvas share its first step; no token changes."""

import random
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.golden import EOS, MASK
from diffray import DiffusionLLM, SamplingParams
from diffray.components.first_steps import FirstStep, FirstStepKey
from diffray.components.lora import LoRA
from diffray.kernels.formats import Format
from diffray.workers.engine import Engine
from diffray.workers.messages import Request
from tests.helpers.page_owners import pages_are_in_order
from tests.helpers.paths import GOLDEN
from tests.helpers.sharing import alone, cached, positions
from tests.helpers.toy import CountingModel, drain, last_update, prompt_of, run, toy_engine

PROMPT = prompt_of(50)
BLOCK, TOKENS = 16, 40
CANVAS = len(PROMPT) + TOKENS
IDS: dict[str, Any] = {"mask_token_id": MASK, "eos_token_id": EOS}


def request(uid: int, prompt: tuple[int, ...] = PROMPT, **params: Any) -> Request:
    diffusion = {"block_length": BLOCK, **params.pop("diffusion", {})}
    given = {"max_tokens": TOKENS, "temperature": 0.9, "seed": uid, "ignore_eos": True, **params}
    return Request(uid, prompt, SamplingParams(**given, diffusion=diffusion))


def sharing(mode: str = "step0", shift: int = 0, **options: Any) -> Engine:
    return toy_engine(CountingModel(False, logit_shift=shift), first_steps=mode, **options)


def test_those_who_come_together_run_it_once() -> None:
    requests = [request(uid) for uid in range(6)]
    apart = positions(sharing("off"), requests)
    assert positions(sharing(), requests) == apart - 5 * CANVAS
    written = {tuple(alone(sharing(), each)) for each in requests}
    assert len(written) == 6, "each draws for itself"


def test_those_who_come_later_need_not_run_it() -> None:
    engine = sharing()
    apart = positions(engine, [request(0)])
    assert positions(engine, [request(0)]) == apart - CANVAS
    assert cached(engine, request(1)) == len(PROMPT)
    assert engine.kv.num_free == engine.kv.num_pages - 1, "what is kept gives way"


@pytest.mark.parametrize(
    "other",
    [
        request(1, max_tokens=TOKENS + 1),  # another canvas
        request(1, prompt_of(50, seed=1)),
        request(1, (*PROMPT[:-1], 0)),
        replace(request(1), suffix=(1, 2)),
        replace(request(1, max_tokens=TOKENS - 2), suffix=(1, 2)),  # of the same length
        request(1, diffusion={"block_length": 8}),  # reads other positions
        request(1, diffusion={"iteration": "first_token"}),
        replace(request(1), cache_salt="theirs"),
        request(1, diffusion={"cfg_scale": 1.5}),
        request(1, diffusion={"iteration": "soft"}),
    ],
    ids=str,
)
@pytest.mark.rotate(3)
def test_nothing_is_shared_unless_all_is_equal(other: Request) -> None:
    engine = sharing()
    assert [cached(engine, request(0)), cached(engine, other)] == [0, 0]
    assert cached(engine, request(2)) == len(PROMPT)
    together = sharing()
    positions(together, [request(0), other, request(2)])
    assert together.kv.first_steps.num_pages <= 2 * together.kv.pages_for(CANVAS + 2)


def test_decoders_caches_and_seeds_may_differ() -> None:
    engine = sharing()
    assert cached(engine, request(0)) == 0
    for uid, diffusion in enumerate(
        [
            {"decoder": {"kind": "fixed", "steps": 10}, "cache": "none"},
            {"decoder": "credit", "cache": "prefix"},
            {"decoder": "edit", "cache": "vicinity"},
            {"decoder": "entropy_bound"},
            {"speculation": {"kind": "verify"}},
        ],
        start=1,
    ):
        for temperature in (0.0, 0.8):
            each = request(uid, diffusion=diffusion, temperature=temperature, top_p=0.9)
            assert cached(engine, each) == len(PROMPT), diffusion


def test_each_adapter_and_each_version_has_its_own() -> None:
    """`LoRA` counts its loads, so one that was replaced is another one."""
    engine = sharing()
    first_steps = engine.kv.first_steps
    for lora in (None, LoRA("a", "/a", 1), LoRA("a", "/a", 2)):
        sequence = engine.check(replace(request(0), lora=lora))
        engine.waiting.append(sequence)
        drain(engine)
        assert sequence.kv.cached == 0
    assert first_steps.num_pages == 3 * engine.kv.pages_for(CANVAS)
    engine.kv.forget_prefixes()  # as new weights and sleep do
    assert first_steps.num_pages == 0
    assert cached(engine, request(1)) == 0


def draw_requests(count: int, seed: int) -> list[Request]:
    """Return requests among which many begin alike, and others are of all kinds."""
    draws = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        *({} for _ in range(6)),
        {"cache": "vicinity"},
        {"cache": "prefix", "decoder": "credit"},
        {"cache": "none", "decoder": {"kind": "fixed", "steps": 12}},
        {"cfg_scale": 1.0},
        {"iteration": "soft"},
        {"iteration": "first_token"},
        {"speculation": {"kind": "verify"}},
    ]
    found = []
    for uid in range(count):
        made = request(
            uid,
            prompt_of(30, seed=draws.randrange(2)),
            max_tokens=draws.choice([24, 40, 40]),
            temperature=draws.choice([0.0, 0.9]),
            seed=draws.randrange(3),
            diffusion=draws.choice(kinds),
        )
        suffix, salt = draws.choice([(), (), (), (5, 6)]), draws.choice(["", "", "", "b"])
        found.append(replace(made, suffix=suffix, cache_salt=salt))
    return found


@pytest.mark.parametrize(
    ("seed", "form", "shift"), [(0, None, 0), (1, Format("uint8"), 0), (0, None, 1)]
)
@pytest.mark.rotate(1)
def test_no_token_changes_under_eviction_preemption_and_interrupts(
    seed: int, form: Format | None, shift: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory for six or seven canvases, with rounds of several steps.

    K/V may be rounded, and the position before a block may decide the first one.
    """
    draws, requests = random.Random(seed), draw_requests(14, seed)
    engine = sharing(num_pages=60, num_slots=4, form=form, shift=shift)
    find = engine.kv.first_steps.find
    kept: list[FirstStep | None] = []

    def noted(key: FirstStepKey) -> FirstStep | None:
        kept.append(find(key))
        return kept[-1]

    monkeypatch.setattr(engine.kv.first_steps, "find", noted)
    assert isinstance(engine.model, CountingModel)
    found: dict[int, list[int]] = {each.uid: [] for each in requests}
    left = [*requests]
    while left or not engine.idle:
        for _ in range(min(draws.randrange(4), len(left))):
            engine.add(left.pop())
        if engine.running and draws.random() < 0.15:
            engine.preempt(draws.choice(engine.running).uid)
        engine.model.fails = draws.random() < 0.1
        with suppress(KeyboardInterrupt):
            for update in engine.step(draws.choice([1, 1, 4])):
                found[update.uid] += update.ids
        pages_are_in_order(engine)
    assert found == {each.uid: alone(engine, each) for each in requests}
    assert any(kept) and not all(kept)
    assert engine.preemptions


def test_an_interrupted_first_step_is_run_again() -> None:
    engine = sharing()
    assert isinstance(engine.model, CountingModel)
    requests = [request(uid) for uid in range(3)]
    for each in requests:
        engine.add(each)
    engine.model.fails = True
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.kv.first_steps.num_pages == 0
    assert drain(engine) == {each.uid: alone(engine, each) for each in requests}


def test_an_approximation_reads_the_whole_pages_of_another_prompt() -> None:
    """It is said of who reads them; who does not, or finds all of its canvas, is exact."""
    engine = sharing("approx")
    assert cached(engine, request(0)) == 0
    longer = request(1, PROMPT + prompt_of(20, seed=3))
    _, update = last_update(engine, longer)
    assert (update.cached_tokens, update.approximate) == (48, True)
    _, update = last_update(engine, longer)
    assert update.cached_tokens == 48, "what was approximated is not kept"
    assert cached(engine, request(2)) == len(PROMPT)
    assert cached(engine, request(3, prompt_of(50, seed=4))) == 0
    assert cached(engine, replace(request(4), cache_salt="theirs")) == 0
    _, update = last_update(engine, request(5, max_tokens=TOKENS + 1))
    assert (update.cached_tokens, update.approximate) == (48, True)
    # Only what follows is run.
    assert isinstance(engine.model, CountingModel)
    before = engine.model.positions
    run(engine, [request(1, longer.prompt, max_tokens=1)])
    assert engine.model.positions - before == 70 + 1 - 48


def test_the_option_has_choices_of_one_prompt_share_it() -> None:
    params = SamplingParams(max_tokens=48, n=4, temperature=1.0, seed=7, ignore_eos=True)
    found = []
    for mode, hits in (("off", 0), ("step0", 59)):
        options: dict[str, Any] = {"dtype": "float64", "first_step_caching": mode, **IDS}
        with DiffusionLLM(str(GOLDEN / "llada"), **options) as llm:
            (output,) = llm.generate([[*range(1, 60)]], params, use_tqdm=False)
        assert [choice.cached_tokens for choice in output.outputs] == [0, hits, hits, hits]
        found.append([(choice.token_ids, choice.forwards) for choice in output.outputs])
    assert found[0] == found[1]


def test_it_is_refused_where_whole_prefixes_are_shared() -> None:
    with pytest.raises(ValueError, match="first_step_caching is 'step0', and in this model atten"):
        DiffusionLLM(str(GOLDEN / "llada2_moe"), first_step_caching="step0", **IDS)
