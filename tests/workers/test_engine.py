"""The engine's promises: alone or batched, interrupted or not, a request finds the same tokens."""

import re
from itertools import count
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from diffray.components.decoders.edit import Edit
from diffray.components.decoders.fixed import Fixed
from diffray.components.iterations import BlockDiffusion, Blockwise, Iteration, SubBlocks
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams, Policy
from diffray.components.sequence import Sequence
from diffray.workers.batch_state import BatchState
from diffray.workers.engine import Engine
from diffray.workers.messages import Request
from tests.helpers.mixed_requests import BIDIRECTIONAL, CAUSAL, DECODERS, SHIFTED, SHIFTED_CAUSAL
from tests.helpers.tiny_checkpoints import full_forward
from tests.helpers.toy import (
    EOS,
    MASK,
    ScriptedModel,
    ToyModel,
    certain,
    drain,
    generate,
    last_update,
    prompt_of,
    run,
    toy_engine,
)


def test_an_interrupted_round_is_not_reported_to_who_was_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = ScriptedModel(lambda at: {1: 20.0})
    forward, calls = model.forward, count()

    def interrupted(*args: Any) -> Tensor:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return forward(*args)

    engine = toy_engine(model)
    params = SamplingParams(max_tokens=40, diffusion={"block_length": 8})
    for uid in range(2):
        engine.add(Request(uid, prompt_of(8, uid), params))
    monkeypatch.setattr(model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step(5)
    engine.cancel(0)
    (update,) = engine.step(5)
    assert update.uid == 1 and len(update.ids) == 40


def sizes_of(cache: str, shift: int, prompt: int) -> str:
    """Return how many positions each forward runs."""
    model = ToyModel(block_causal=True, logit_shift=shift)
    policy = {
        "block_length": 8,
        "cache": cache,
        "decoder": {"kind": "threshold", "threshold": 1, "steps_per_block": 8},
        "iteration": {"kind": "sub_blocks", "sub_block_length": 4},
    }
    with patch.object(model, "forward", wraps=model.forward) as forward:
        given: dict[str, Any] = {"max_tokens": 32 - prompt, "ignore_eos": True}
        generate(model, prompt_of(prompt), diffusion=policy, **given)
    return " ".join(str(len(call.args[0])) for call in forward.call_args_list)


def test_what_steps_of_sub_blocks_run() -> None:
    """What stores a block decides the next one's first position, in no forward more."""
    assert sizes_of("exact", 1, 8) == " ".join("8" * 24)
    # The first position of a second sub-block is masked for a while.
    block = r"8 8 4 4 8( [84]){3}"
    assert re.fullmatch(f"({block} ?){{3}}", sizes_of("sub_block", 1, 8))
    # A block that begins with the end of the prompt has its first position, and 12 too.
    assert re.fullmatch(f"16 4 4( {block}){{2}}", sizes_of("sub_block", 1, 13))
    # Logits about their own position leave the first one to the block itself.
    assert sizes_of("exact", 0, 8) == " ".join(["16" + " 8" * 7] * 3)


def test_denoising_goes_on_while_a_prompt_fills() -> None:
    engine = toy_engine(CAUSAL, chunk=8)
    for uid, (prompt, tokens) in enumerate(((8, 24), (200, 8))):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, diffusion={"block_length": 8})
        engine.add(Request(uid, prompt_of(prompt), params))
    early = [update for _ in range(10) for update in engine.step()]  # 200 / 8 chunks take longer
    assert any(update.ids for update in early) and {update.uid for update in early} == {0}
    assert 1 in drain(engine)


@pytest.mark.parametrize("model", [BIDIRECTIONAL, SHIFTED], ids=["plain", "shifted"])
def test_vicinity_without_neighbours_is_dual(model: ToyModel) -> None:
    params: dict[str, Any] = {"max_tokens": 45, "ignore_eos": True}
    caches = {"kind": "vicinity", "before": 0, "after": 0, "warmup": 0}, {"kind": "dual"}
    policies = [{"block_length": 10, "cache": cache} for cache in caches]
    found = [generate(model, prompt_of(20), diffusion=policy, **params) for policy in policies]
    assert found[0] == found[1]


@pytest.mark.parametrize("model", [BIDIRECTIONAL, SHIFTED], ids=["plain", "shifted"])
def test_one_step_chooses_the_best_of_one_forward_over_the_whole_canvas(model: ToyModel) -> None:
    """Shifted logits are those of the position before; the canvas's first alone reads its own."""
    one_step: dict[str, object] = {"block_length": 64, "decoder": {"kind": "fixed", "steps": 1}}
    for prompt, suffix in (((), (1, 2, 3)), (prompt_of(9), (4,)), (prompt_of(1), ())):
        logits = full_forward(model, [*prompt, *[MASK] * 12, *suffix]).clone()
        if model is SHIFTED:
            logits = torch.cat([logits[:1], logits[:-1]])
        logits[:, MASK] = -torch.inf
        expected = logits.argmax(-1)[len(prompt) : len(prompt) + 12].tolist()
        given: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "diffusion": one_step}
        assert generate(model, prompt, suffix, **given) == expected


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("causal", [False, True])
def test_model_that_prefers_the_mask_terminates(decoder: str, causal: bool) -> None:
    model = ScriptedModel(lambda position: {MASK: 30.0, 5: 3.0}, block_causal=causal)
    ids = generate(
        model, prompt_of(6), max_tokens=21,
        diffusion={"block_length": 8, "decoder": {"kind": decoder}},
    )  # fmt: skip
    assert ids == [5] * 21


def test_nan_logits_terminate() -> None:
    model = ScriptedModel(lambda position: {token: float("nan") for token in range(64)})
    ids = generate(model, prompt_of(6), max_tokens=9)
    assert len(ids) <= 9
    assert MASK not in ids


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("where", [0, 5, 8, 15, 16])
def test_nothing_after_the_end_token(early_stop: bool, where: int) -> None:
    prompt = prompt_of(6)
    model = ScriptedModel(certain({6 + where: EOS, 6 + where + 1: EOS}))
    engine = toy_engine(model)
    params = SamplingParams(
        max_tokens=32,
        diffusion={"block_length": 8, "iteration": {"kind": "blockwise", "early_stop": early_stop}},
    )
    ids, update = last_update(engine, Request(0, prompt, params))
    assert ids == [1] * where + [EOS]
    assert (update.finish_reason, update.stop_id) == ("stop", EOS)
    assert update.forwards == (where // 8 + 1 if early_stop else 4)
    assert engine.kv.num_free == 399


def test_special_ids_in_the_prompt_are_ordinary_tokens() -> None:
    prompt = (5, EOS, MASK, 7, EOS, MASK)
    for model in (BIDIRECTIONAL, CAUSAL):
        engine = toy_engine(model)
        engine.add(Request(0, prompt, SamplingParams(max_tokens=20, ignore_eos=True)))
        engine.step()
        slot = engine.running[0].slot
        assert engine.slots.ids_SN[slot, :6].tolist() == list(prompt)
        assert not engine.slots.masked_SN[slot, :6].any()
    assert generate(ScriptedModel(certain({})), prompt, max_tokens=20) == [1] * 20


def test_logit_bias_moves_the_choice() -> None:
    model = ScriptedModel(lambda position: {1: 2.0, 2: 1.0})
    assert generate(model, prompt_of(4), max_tokens=3) == [1, 1, 1]
    assert generate(model, prompt_of(4), max_tokens=3, logit_bias={2: 5.0}) == [2, 2, 2]


def test_sub_blocks_are_the_default_where_logits_are_about_the_next_position() -> None:
    """Unless what else is asked for does not go with them."""

    def default(model: ToyModel, **asked: Any) -> Iteration:
        return Policy.resolve(DiffusionParams(**asked), model.spec).iteration

    assert default(SHIFTED_CAUSAL) == default(SHIFTED_CAUSAL, decoder=Edit()) == SubBlocks()
    assert default(SHIFTED_CAUSAL, decoder=Fixed()) == BlockDiffusion()
    assert default(SHIFTED_CAUSAL, canvas="pinned") == default(CAUSAL) == BlockDiffusion()
    assert default(SHIFTED) == Blockwise()


def test_a_request_may_fill_the_context_and_take_all_pages() -> None:
    context = toy_engine(BIDIRECTIONAL).limits.context
    engine = toy_engine(BIDIRECTIONAL, page_size=8, num_pages=1 + context // 8)
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    assert len(run(engine, [Request(0, prompt_of(context - 3), params)])[0]) == 3
    with pytest.raises(ValueError, match="but the context has"):
        engine.add(Request(0, prompt_of(context - 2), params))


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    model=st.sampled_from([BIDIRECTIONAL, SHIFTED, CAUSAL, SHIFTED_CAUSAL]),
    prompt_len=st.integers(1, 70),
    suffix_len=st.integers(0, 30),
    max_tokens=st.integers(1, 50),
    block_length=st.integers(1, 40),
    steps=st.integers(1, 6),
    page_size=st.integers(1, 19),
    decoder=st.sampled_from(DECODERS),
    kind=st.sampled_from(["prefix", "dual", "vicinity"]),
)
def test_any_shape_fills_the_canvas(
    model: ToyModel,
    prompt_len: int,
    suffix_len: int,
    max_tokens: int,
    block_length: int,
    steps: int,
    page_size: int,
    decoder: str,
    kind: str,
) -> None:
    """Lengths and block sizes that divide nothing: all tokens, no masks, same as without cache."""
    causal = model.spec.block_causal
    suffix = () if causal else prompt_of(suffix_len, seed=1)

    def tokens(engine: Engine, cache: dict[str, object], unroll: int) -> list[int]:
        policy = {"block_length": block_length, "decoder": {"kind": decoder}, "cache": cache}
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, diffusion=policy)
        return run(engine, [Request(0, prompt_of(prompt_len), params, suffix)], unroll)[0]

    cache: dict[str, object] = {"kind": "exact"} if causal else {"kind": kind, "refresh": 1}
    found = tokens(toy_engine(model, page_size=page_size, num_pages=700), cache, steps)
    assert len(found) == max_tokens
    assert MASK not in found
    assert found == tokens(toy_engine(model), {"kind": "none"}, 1)


def test_blocks_are_planned_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rounds they take; others' coming and going has them planned anew."""
    plans: list[list[int]] = []
    plan = BatchState.__init__

    def noted(blocks: BatchState, sequences: list[Sequence], *others: Any) -> None:
        plans.append([s.uid for s in sequences])
        plan(blocks, sequences, *others)

    monkeypatch.setattr(BatchState, "__init__", noted)
    engine = toy_engine(BIDIRECTIONAL)
    policy = {"block_length": 8, "decoder": {"kind": "fixed", "steps": 12}}
    params = SamplingParams(max_tokens=24, ignore_eos=True, diffusion=policy)
    engine.add(Request(0, prompt_of(5), params))
    for _ in range(6):
        engine.step()
    engine.add(Request(1, prompt_of(5), params))
    engine.step()
    engine.cancel(0)
    while not engine.idle:
        engine.step()
    assert plans == [[0], [0], [0, 1], [1], [1], [1]]


def test_soft_diffusion_looks_at_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the vocabulary's logits and probabilities a canvas may have more than fit a memory."""
    policy: dict[str, object] = {"block_length": 8, "iteration": {"kind": "soft"}}
    params = SamplingParams(max_tokens=64, ignore_eos=True, diffusion=policy)
    requests = [Request(uid, prompt_of(8 + uid), params) for uid in range(3)]
    expected = run(toy_engine(BIDIRECTIONAL), requests)
    monkeypatch.setattr("diffray.workers.features.soft._ROWS", 24)
    model = ToyModel()
    spies = [Mock(wraps=each) for each in (model.head, model.expected_embedding)]
    with patch.multiple(model, head=spies[0], expected_embedding=spies[1]):
        assert run(toy_engine(model), requests) == expected
    seen = [len(call.args[0]) for spy in spies for call in spy.call_args_list]
    assert max(seen) == 24  # as many as the three blocks have


def test_soft_requests_wait_for_memory() -> None:
    """Together they hold no more rows than there may be, and the others none."""
    soft: dict[str, object] = {"iteration": {"kind": "soft"}, "block_length": 8}
    requests = []
    for uid in range(6):
        policy = soft if uid else {}
        params = SamplingParams(max_tokens=16, ignore_eos=True, diffusion=policy)
        requests.append(Request(uid, prompt_of(8, seed=uid), params))
    expected = run(toy_engine(BIDIRECTIONAL), requests)
    engine = toy_engine(BIDIRECTIONAL)
    engine.slots.soft.most_rows = 50  # canvases have 24 positions
    for request in requests:
        engine.add(request)
    found: dict[int, list[int]] = {uid: [] for uid in range(6)}
    while not engine.idle:
        for update in engine.step():
            found[update.uid] += update.ids
        assert sum(each.uid > 0 for each in engine.running) <= 2
        assert engine.slots.soft.num_rows in (0, 25, 49)
    assert engine.slots.soft.num_rows == 0 and found == expected
