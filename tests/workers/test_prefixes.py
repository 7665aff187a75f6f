"""Requests that begin alike share K/V, and nobody's tokens change for it."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffray import DiffusionLLM
from diffray.components.params import SamplingParams
from diffray.kernels.cpu.program import program
from diffray.kernels.formats import Format
from diffray.workers.engine import Engine
from diffray.workers.messages import Request, Resume, Update
from tests.helpers.page_owners import pages_are_in_order
from tests.helpers.paths import GOLDEN
from tests.helpers.sharing import BLOCK, alone, cached, positions, request
from tests.helpers.toy import CountingModel, drain, prompt_of, run, toy_engine

FOLDER = str(GOLDEN / "llada2_moe")
IDS: dict[str, Any] = {"mask_token_id": 510, "eos_token_id": 511}
PROMPT = prompt_of(100)  # six blocks, and a bit of the seventh
LONG = prompt_of(300, seed=7)  # 18 blocks


@pytest.mark.parametrize("chunk", [32, 512])
def test_a_beginning_is_run_once_for_all_who_come_later(chunk: int) -> None:
    engine = toy_engine(CountingModel(), chunk=chunk)
    first = positions(engine, [request(0, PROMPT)])
    second = positions(engine, [request(1, PROMPT)])
    assert first - second >= 6 * BLOCK - 3 * BLOCK, "tokens, and so steps, differ a little"
    assert positions(engine, [request(0, PROMPT)]) == first - 6 * BLOCK
    assert cached(engine, request(3, PROMPT + prompt_of(30, seed=5))) == 6 * BLOCK


@pytest.mark.parametrize("chunk", [32, 512])
def test_those_who_come_together_run_their_beginning_once(chunk: int) -> None:
    prompts = [LONG, LONG, LONG + prompt_of(40, seed=1), LONG[:200]]
    requests = [request(uid, prompt) for uid, prompt in enumerate(prompts)]
    sharing = toy_engine(CountingModel(), chunk=chunk)
    apart = toy_engine(CountingModel(), chunk=chunk)
    apart.kv.prefixes.enabled = False
    saved = positions(apart, requests) - positions(sharing, requests)
    assert sharing.forwards <= apart.forwards
    assert saved == (18 + 18 + 12) * BLOCK


def test_a_conversation_goes_on_from_what_was_written() -> None:
    engine = toy_engine(CountingModel())
    answer = run(engine, [request(0, PROMPT, max_tokens=60)])[0]
    longer = request(1, (*PROMPT, *answer, *prompt_of(9)))
    # The last block of an answer is never stored as it ended.
    assert cached(engine, longer) == (100 + 60) // BLOCK * BLOCK - BLOCK


@pytest.mark.parametrize(
    "other",
    [{"block_length": 8}, {"cache": {"kind": "none"}}, {"cfg_scale": 0.5}],
    ids=["block_length", "no cache", "guided"],
)
def test_who_is_denoised_otherwise_shares_nothing(other: dict[str, Any]) -> None:
    engine = toy_engine(CountingModel(), page_size=16)  # a page may hold two blocks of 8
    asked = [request(uid, PROMPT, **each) for uid, each in enumerate((other, {}, other, {}))]
    # The third may find the first's.
    third = 96 if "block_length" in other else 0
    assert [cached(engine, each) for each in asked] == [0, 0, third, 6 * BLOCK]


def test_of_two_who_write_the_same_one_is_kept() -> None:
    engine = toy_engine(CountingModel())
    twins = [Request(uid, PROMPT, request(0, PROMPT).params) for uid in range(2)]
    tokens = run(engine, twins)
    assert tokens[0] == tokens[1]
    # Of 140 tokens all blocks but the last, in pages of 8.
    assert engine.kv.prefixes.num_idle == 8 * BLOCK // 8
    pages_are_in_order(engine)
    assert len(set(engine.kv.allocate(engine.kv.num_free))) == 399


def test_who_has_another_salt_shares_nothing() -> None:
    engine = toy_engine(CountingModel())
    asked = [replace(request(0, PROMPT), cache_salt=salt) for salt in ("", "a", "b", "a", "")]
    assert [cached(engine, each) for each in asked] == [0, 0, 0, 6 * BLOCK, 6 * BLOCK]


def test_blocks_that_are_no_whole_pages_share_what_is_both() -> None:
    engine = toy_engine(CountingModel(), page_size=8)
    asked = [request(uid, PROMPT, block_length=12) for uid in range(2)]
    found = [cached(engine, each) for each in asked]
    assert found == [0, 96], "multiples of 24 before the block that begins at 96"


@pytest.mark.parametrize("steps", [1, 8])
def test_who_shares_but_a_block_with_a_long_prompt_waits_for_no_more(steps: int) -> None:
    forwards = []
    for sharing in (True, False):
        engine = toy_engine(CountingModel(), chunk=32)
        engine.kv.prefixes.enabled = sharing
        engine.add(request(0, LONG + LONG[:100]))
        engine.add(request(1, LONG[:20]))
        while not any(update.uid == 1 and update.ids for update in engine.step(steps)):
            pass
        forwards.append(engine.forwards)
    assert forwards[0] == forwards[1]


def test_who_gave_way_finds_what_it_stored() -> None:
    model, asked = CountingModel(), request(0, LONG, max_tokens=64)
    engine = toy_engine(model)
    engine.add(asked)
    updates: list[Update] = []
    while not any(update.ids for update in updates):
        updates += engine.step()
    before = model.positions
    engine.preempt(0)
    updates += engine.step()
    assert model.positions - before <= 2 * BLOCK, "instead of 300"
    while not engine.idle:
        updates += engine.step()
    assert [token for update in updates for token in update.ids] == alone(engine, asked)
    assert updates[-1].cached_tokens == 0, "it was there because this request had stored it"


def test_pages_are_taken_back_the_longest_unused_first_and_ends_before_beginnings() -> None:
    # A request of 100 + 12 positions takes 14 pages; six blocks of it, 12 pages, stay.
    engine = toy_engine(CountingModel(), num_pages=1 + 40)
    others = [prompt_of(100, seed=seed) for seed in (1, 2, 3)]
    for prompt in others:
        run(engine, [request(0, prompt, max_tokens=12)])
    assert engine.kv.prefixes.num_idle == 36
    run(engine, [request(0, others[0], max_tokens=12)])  # now the second is the oldest
    run(engine, [request(0, prompt_of(100, seed=4), max_tokens=12)])  # needs 14, and 4 are free

    def found(prompt: tuple[int, ...]) -> int:
        sequence = engine.check(request(0, prompt, max_tokens=12))
        return len(engine.kv.prefixes.find(sequence))

    assert [found(prompt) for prompt in others] == [6, 1, 6]
    pages_are_in_order(engine)
    assert engine.kv.num_free == 40


def test_what_is_held_by_others_needs_no_pages() -> None:
    """Two of 14 pages each run together in 16, as they share 12."""
    engine = toy_engine(CountingModel(), num_pages=1 + 16)
    for uid in range(2):
        engine.add(request(uid, PROMPT, max_tokens=12))
    engine.step()
    assert len(engine.running) == 2
    assert drain(engine) and engine.kv.num_free == 16


FAMILY = [LONG[:40], LONG[:100], LONG[:170], LONG[:96] + prompt_of(50, 3), prompt_of(70, 4)]
ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, len(FAMILY) - 1), st.sampled_from([BLOCK, 12])),
    st.tuples(st.sampled_from(["cancel", "preempt"]), st.integers(0, 12), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
    st.tuples(st.just("wait"), st.integers(0, 4), st.just(0)),
    st.tuples(st.sampled_from(["interrupt", "lose"]), st.just(0), st.just(0)),
)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    actions=st.lists(ACTIONS, min_size=6, max_size=24),
    pages=st.sampled_from([30, 45, 200]),
    host=st.sampled_from([0, 11, 300]),
    chunk=st.sampled_from([32, 512]),
    shift=st.sampled_from([0, 1]),
    form=st.sampled_from([None, None, Format("uint8"), Format("uint4", 8)]),
)
def test_whatever_happens_tokens_are_those_of_one_alone(
    actions: list[tuple[str, int, int]],
    pages: int,
    host: int,
    chunk: int,
    shift: int,
    form: Format | None,
) -> None:
    """Add, cancel, preempt, interrupt, step and resume, in so few pages, also of few bits."""
    model = CountingModel(logit_shift=shift)
    options: dict[str, Any] = {"num_pages": 1 + pages, "chunk": chunk, "host_pages": host}

    def new() -> Engine:
        return toy_engine(model, num_slots=4, prefix_ttl=5.0, form=form, **options)

    engine = new()
    left: dict[int, Request] = {}
    expected: dict[int, list[int]] = {}
    heard: dict[int, list[Update]] = {}

    def step(steps: int) -> None:
        with suppress(KeyboardInterrupt):
            for update in engine.step(steps):
                heard[update.uid].append(update)
                if update.finish_reason:
                    del left[update.uid]

    for kind, number, block in actions:
        if kind == "add":
            uid = len(heard)
            asked = request(uid, FAMILY[number], max_tokens=30, block_length=block)
            left[uid], expected[uid], heard[uid] = asked, alone(engine, asked), []
            engine.add(asked)
        elif kind == "cancel":
            engine.cancel(number)
            if left.pop(number, None):
                del expected[number]
        elif kind == "preempt":
            engine.preempt(number)
        elif kind == "interrupt":
            model.fails = True  # in its next forward
        elif kind == "wait":
            engine.kv.pass_time(engine.kv.prefixes.now + number)
        elif kind == "lose":
            engine = new()
            for uid, asked in left.items():
                engine.add(replace(asked, resume=Resume.after(heard[uid])))
        else:
            step(number)
        pages_are_in_order(engine)
    while not engine.idle:
        step(2)
        pages_are_in_order(engine)
    for uid, tokens in expected.items():
        assert [token for update in heard[uid] for token in update.ids] == tokens
    assert engine.kv.num_free == pages


def test_the_option_decides_and_choices_of_one_prompt_share_it() -> None:
    params = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=3)
    tokens = []
    for enabled, hits in ((None, 96), (True, 96), (False, 0)):
        with DiffusionLLM(FOLDER, dtype="float64", enable_prefix_caching=enabled, **IDS) as llm:
            (output,) = llm.generate([list(range(1, 100))], params)
        assert [choice.cached_tokens for choice in output.outputs] == [0, hits, hits]
        assert output.cached_tokens == 0
        tokens.append([choice.token_ids for choice in output.outputs])
    assert tokens[0] == tokens[1] == tokens[2]
    with pytest.raises(ValueError, match="enable_prefix_caching needs block-causal attention"):
        DiffusionLLM(str(GOLDEN / "llada"), enable_prefix_caching=True)


@pytest.mark.skipif(program() is None, reason="needs gcc and AVX2")
@pytest.mark.parametrize("name", ["ar_llama", "ar_qwen3"])
def test_in_blocks_a_shared_beginning_changes_no_bit(name: str) -> None:
    """Rounded activations would make much of a last bit."""
    asked: dict[str, Any] = {"max_tokens": 12, "logprobs": True, "ignore_eos": True}
    asked["diffusion"] = {"iteration": "autoregressive"}
    options: dict[str, Any] = {"dtype": "float32", "quantization": "q8_0", "mask_token_id": 501}
    prompt = [(7 * n) % 500 for n in range(90)]
    with DiffusionLLM(str(GOLDEN / name), page_size=8, chunk=32, **options) as llm:
        (first,) = llm.generate(prompt, SamplingParams(**asked))
        (again,) = llm.generate(prompt, SamplingParams(**asked))
        (longer,) = llm.generate(prompt[:43] + prompt[:20], SamplingParams(**asked))
    with DiffusionLLM(str(GOLDEN / name), enable_prefix_caching=False, **options) as llm:
        (alone,) = llm.generate(prompt, SamplingParams(**asked))
        (own,) = llm.generate(prompt[:43] + prompt[:20], SamplingParams(**asked))
    assert first.cached_tokens == 0 and again.cached_tokens > 60 and longer.cached_tokens > 30
    for one, other in ((first, again), (first, alone), (longer, own)):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
