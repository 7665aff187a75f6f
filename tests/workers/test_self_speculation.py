"""Verified drafts are what the autoregressive mode writes, whatever a request asks for."""

import math
import random
from functools import cache, partial
from typing import Any

import pytest

from benchmarks.golden import EOS, MASK, cases_of
from diffray.components.drafted_canvas import DraftedCanvas
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.components.speculation import DRAFTER, strided_pace
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers import rank_cases
from tests.helpers.paths import GOLDEN
from tests.helpers.ranks import on_ranks
from tests.helpers.resuming import Story, cut_and_resume, updates_of

pytestmark = pytest.mark.slow

KINDS = {"nemotron_labs_diffusion": "self_speculation", "idlm": "introspective"}
ASKED: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"top_logprobs": 3, "min_tokens": 4, "ignore_eos": False},
    {"stop_token_ids": list(range(0, 512, 9)), "temperature": 1.2},
    {"logit_bias": {7: 2.0, 90: -3.0}, "bad_token_ids": [40, 41], "temperature": 0.5},
    {"allowed_token_ids": list(range(30, 200))},
    {"repetition_penalty": 1.3, "temperature": 0.9},
    {"presence_penalty": 1.0, "no_repeat_ngram_size": 2},
    {"bad_token_sequences": [[65, 66], [250, 251, 252]]},
]
POLICIES: list[dict[str, Any]] = [{}, {"block_length": 1}, {"cache": "none", "block_length": 8}]
OWN: dict[str, list[dict[str, Any]]] = {
    "idlm": [{"block_length": 2}, {"block_length": 10**9}],
    "nemotron_labs_diffusion": [
        {"decoder": {"kind": "threshold", "threshold": 0.7}, "block_length": 16},
        {"decoder": "sequential", "block_length": 5},
    ],
}


@cache
def engine(name: str = "nemotron_labs_diffusion", **options: Any) -> Engine:
    setup = EngineOptions(
        dtype="float64", device="cpu", max_num_seqs=8, page_size=8, max_model_len=256,
        mask_token_id=MASK, eos_token_id=EOS, **options,
    )  # fmt: skip
    return build_rank(str(GOLDEN / name), setup, Mesh())


def requests(name: str, count: int, *, drafted: bool, seed: int = 0) -> list[Request]:
    """Return random requests; prompts begin as others do."""
    rng, found = random.Random(seed), []
    texts = [(*case["prompt"], *case["tokens"]) for case in cases_of(name)]
    for uid in range(count):
        prompt = rng.choice(texts)[: rng.choice((1, 7, 16, 24, 31))]
        asked = {"ignore_eos": True, "max_tokens": rng.randrange(4, 24)} | rng.choice(ASKED)
        kind = KINDS[name] if drafted else "autoregressive"
        own = {"iteration": {"kind": kind, "early_stop": rng.random() < 0.8}}
        policy = rng.choice(POLICIES + OWN[name])
        diffusion = own | (policy if drafted else {})
        params = SamplingParams(seed=uid, logprobs=True, diffusion=diffusion, **asked)
        found.append(Request(uid, prompt, params))
    return found


def written(updates: Any, uid: int) -> tuple[dict[str, object], list[float]]:
    """Return what a request wrote; only its steps and forwards tell how."""
    story = Story.of(updates, uid)
    facts = {
        name: fact for name, fact in story.facts.items() if name in ("finish", "stop_id", "ids")
    }
    return facts, story.numbers


def check(name: str, seed: int, count: int, steps: int) -> None:
    """Compare requests in batches; some drafts are right, so blocks have more than one token."""
    asked = requests(name, count, drafted=True, seed=seed)
    plain = updates_of(engine(name), requests(name, count, drafted=False, seed=seed), steps)
    found = updates_of(engine(name), asked, steps)
    tokens = blocks = 0
    for uid in range(count):
        facts, numbers = written(found, uid)
        expected, probabilities = written(plain, uid)
        assert facts == expected, asked[uid]
        assert numbers == pytest.approx(probabilities, abs=1e-6)
        tokens += len(probabilities)
        blocks += max(u.progress.blocks for u in found if u.uid == uid)
    assert blocks < 0.9 * tokens


@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_those_of_the_autoregressive_mode(name: str) -> None:
    """Greedy or drawn: a position's noise is the same in both."""
    check(name, 0, 40, 3)


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_thousand_answers_are_those_of_the_autoregressive_mode(name: str) -> None:
    for seed in range(10):
        check(name, seed, 100, seed + 1)


@pytest.mark.parametrize("name", KINDS)
def test_a_watched_answer_shows_drafts_and_what_was_accepted(name: str) -> None:
    diffusion = {"iteration": KINDS[name], "block_length": 8}
    params = SamplingParams(max_tokens=40, ignore_eos=True, diffusion=diffusion)
    final, drafts, accepted = list[int](), list[int](), 0
    request = Request(0, tuple(cases_of(name)[0]["prompt"]), params, watch=True)
    before = engine(name).stats().drafts
    for update in updates_of(engine(name), [request], 1):
        assert update.canvas is not None
        final += update.ids
        if update.ids and drafts:
            right = len(update.ids) - 1  # the token after them is the model's
            assert update.ids[:right] == drafts[:right]
            accepted += right
        shown = [token for token in update.canvas if token is not None]
        known = len(shown) - update.drafts
        assert shown[:known] == final[:40]
        drafts = shown[known:]
    assert len(final) == 40 and drafts == [] and accepted > 3
    after = engine(name).stats().drafts
    right = after.right - before.right  # of the last block, drafts behind the end too
    assert accepted <= right <= min(accepted + 8, after.run - before.run)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_verified_after_an_end_is_no_draft(name: str) -> None:
    diffusion = {"iteration": {"kind": KINDS[name], "early_stop": False}, "block_length": 4}
    ends = cases_of(name)[0]["tokens"][3:4]
    params = SamplingParams(max_tokens=40, stop_token_ids=ends, diffusion=diffusion)
    request = Request(0, tuple(cases_of(name)[0]["prompt"]), params, watch=True)
    updates = updates_of(engine(name), [request], 1)
    assert max(update.drafts for update in updates) <= 4
    assert updates[-1].canvas is not None and None not in updates[-1].canvas


@pytest.mark.parametrize("name", KINDS)
def test_interrupted_equals_uninterrupted(name: str) -> None:
    asked = requests(name, 12, drafted=True)
    whole = updates_of(engine(name), asked, 1)

    def another() -> Engine:
        engine(name).cancel_all()
        return engine(name)

    parts = cut_and_resume(another, asked, 1, [9, 14])
    for each in asked:
        assert written(parts, each.uid) == written(whole, each.uid)


def canvas_in_blocks(length: int) -> DraftedCanvas:
    params = SamplingParams(max_tokens=100, diffusion={"block_length": length})
    canvas = engine("idlm").check(Request(0, (1, 2), params)).canvas
    assert isinstance(canvas, DraftedCanvas)
    return canvas


def drafts_of(canvas: DraftedCanvas, chance: float, forwards: int) -> tuple[int, int, int]:
    """Run forwards whose drafts are right by chance; return what they drafted, ran and wrote."""
    rng, made, ran, wrote = random.Random(1), 0, 0, 0
    for _ in range(forwards):
        canvas.final = [5]
        block = canvas.block_at(0)
        right = 0
        while right < block.num_drafts and rng.random() < chance:
            right += 1
        made, ran = made + block.length - 1 - block.num_drafts, ran + block.length
        wrote += right + 1
        canvas.cut(block, right + 1)
    return made, ran, wrote


@pytest.mark.parametrize(
    ("chance", "overhead", "least", "most"),
    [
        (0.9, 14, 1.6, 2.0),
        (0.1, 14, 0.0, 0.25),  # tried again now and then
        (0.9, 0, 0.0, 0.0),
        (0.6, 2, 0.0, 0.1),  # in a batch of seven
        (0.3, math.inf, 2.0, 2.0),
    ],
)
def test_as_many_drafts_are_made_as_pay(
    chance: float, overhead: float, least: float, most: float
) -> None:
    canvas = canvas_in_blocks(3)
    canvas.overhead = overhead
    made, _, _ = drafts_of(canvas, chance, 4000)
    assert least <= made / 4000 <= most


@pytest.mark.parametrize("chance", [0.3, 0.6, 0.85])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_pace_of_drafts_is_foreseen(chance: float, length: int) -> None:
    canvas = canvas_in_blocks(length)
    _, ran, wrote = drafts_of(canvas, chance, 20_000)
    fixed = 7 + (DRAFTER if length > 1 else 0)
    expected = wrote / (fixed * 20_000 + ran)
    assert strided_pace(length - 1, chance, 7) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("overhead", [0, 10_000])
def test_a_batch_drafts_less_and_writes_the_same(overhead: int) -> None:
    """Which forwards draft depends on the batch, and no token does."""
    asked = requests("idlm", 12, drafted=True)
    expected = updates_of(engine("idlm"), asked, 1)
    other = engine("idlm", draft_overhead=overhead)
    found = updates_of(other, asked, 1)
    assert [written(found, n) for n in range(12)] == [written(expected, n) for n in range(12)]
    assert (max(len(update.ids) for update in found) == 1) == (overhead == 0)


def run_on_rank(mesh: Mesh, name: str) -> dict[int, list[int]]:
    setup = EngineOptions(
        dtype="float64", device="cpu", max_num_seqs=8, page_size=8, max_model_len=256,
        mask_token_id=MASK, eos_token_id=EOS,
    )  # fmt: skip
    found: dict[int, list[int]] = {}
    made = build_rank(str(GOLDEN / name), setup, mesh)
    for update in rank_cases.updates_of(mesh, made, requests(name, 8, drafted=True)):
        found.setdefault(update.uid, []).extend(update.ids)
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_equal_one(name: str) -> None:
    assert on_ranks(2, partial(run_on_rank, name=name)) == [run_on_rank(Mesh(), name)] * 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"iteration": "autoregressive", "block_length": 4}, "block_length does not go with"),
        ({"iteration": "autoregressive", "decoder": "threshold"}, "decoder does not go with"),
        ({"iteration": "autoregressive", "cfg_scale": 1}, "cfg_scale does not go with"),
        ({"iteration": "self_speculation", "decoder": "fixed"}, "use 'threshold' or 'sequential'"),
        ({"iteration": "self_speculation", "speculation": {"kind": "verify"}}, "leave it out"),
        ({"iteration": "self_speculation", "zero_confidence_token_ids": [3]}, "leave it out"),
        ({"iteration": "soft"}, "use 'block_diffusion'"),
    ],
)
def test_what_such_a_policy_cannot_use_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError) as caught:
        engine().check(Request(0, (1, 2), SamplingParams(diffusion=given)))
    assert words in str(caught.value)


def test_introspection_takes_the_mask_of_its_adapter_and_no_decoder() -> None:
    def check(options: dict[str, Any], diffusion: dict[str, Any]) -> None:
        made = build_rank(str(GOLDEN / "ar_qwen3"), EngineOptions(device="cpu", **options), Mesh())
        made.check(Request(0, (1, 2), SamplingParams(diffusion=diffusion)))

    check({"mask_token_id": MASK}, {"iteration": "introspective"})
    with pytest.raises(ValueError, match="start with --mask-token-id"):
        check({}, {"iteration": "introspective"})
    with pytest.raises(ValueError, match="decoder does not go with iteration 'introspective'"):
        check({"mask_token_id": MASK}, {"iteration": "introspective", "decoder": "threshold"})
