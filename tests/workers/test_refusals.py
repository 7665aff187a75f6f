"""What an engine refuses before it runs: the field to change, and what to do, in one sentence."""

from functools import cache
from typing import Any

import pytest

from diffray.components.config import InvalidField
from diffray.components.grammar.template import Template
from diffray.components.params import SamplingParams
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Progress, Request, Resume
from diffray.workers.setup import build_engine
from tests.helpers.mixed_requests import (
    BIDIRECTIONAL,
    CAUSAL,
    IN_PIECES,
    SHIFTED_CAUSAL,
    canvas_of,
    grammar,
)
from tests.helpers.paths import GOLDEN
from tests.helpers.toy import EOS, MASK, VOCAB, prompt_of, toy_engine

MODELS = {"bi": BIDIRECTIONAL, "causal": CAUSAL, "sub-blocks": SHIFTED_CAUSAL, "pieces": IN_PIECES}
NOT_SAMPLING = "prompt", "suffix", "resume", "grammar"
UNKNOWN = "not in the vocabulary"
NOTHING_LEFT = "leave no token except"
NO_FIT = "do not fit"
VERIFY = {"speculation": {"kind": "verify"}}


def part(kind: str, **more: Any) -> dict[str, Any]:
    return {"diffusion": {"iteration": {"kind": kind}} | more}


@cache
def noise() -> Engine:
    setup = EngineOptions(dtype="float64", device="cpu", max_num_seqs=1)
    return build_engine(str(GOLDEN / "diffusion_gemma"), setup)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("bi", {"prompt": ()}, "prompt is empty"),
    ("bi", {"prompt": (1,) * 500, "max_tokens": 20}, "shorten"),
    ("causal", {"prompt": (1,), "diffusion": {"block_length": 2**31 - 1}}, "shorten"),
    ("bi", {"prompt": (1,) * 300, "suffix": (1,) * 205, "max_tokens": 8}, "suffix (205)"),
    ("causal", {"suffix": (1, 2)}, "block-causal, so the text cannot depend"),
    ("bi", {"prompt": (64,)}, UNKNOWN),
    ("bi", {"suffix": (64,)}, UNKNOWN),
    ("bi", {"resume": Resume((64,))}, UNKNOWN),
    ("bi", {"stop_token_ids": [99]}, UNKNOWN),
    ("bi", {"bad_token_ids": [64]}, UNKNOWN),
    ("bi", {"allowed_token_ids": [-1]}, UNKNOWN),
    ("bi", {"bad_token_sequences": [[3, VOCAB]]}, UNKNOWN),
    ("bi", {"diffusion": {"zero_confidence_token_ids": [99]}}, UNKNOWN),
    ("bi", {"allowed_token_ids": [MASK]}, NOTHING_LEFT),
    ("bi", {"allowed_token_ids": [EOS, MASK]}, NOTHING_LEFT),
    ("bi", {"allowed_token_ids": [3, 4], "bad_token_ids": [4, 3]}, NOTHING_LEFT),
    ("bi", {"bad_token_ids": range(EOS - 1)}, NOTHING_LEFT),
    ("bi", {"no_repeat_ngram_size": 2}, "needs diffusion.block_length 1"),
    ("causal", {"no_repeat_ngram_size": 2}, "(here 32)"),
    # Iterations, caches and decoders that do not fit the model or each other.
    ("bi", {"diffusion": {"cache": "exact"}}, "bidirectional"),
    ("causal", {"diffusion": {"cache": "vicinity"}}, "use 'exact' or 'none'"),
    ("bi", part("block_diffusion"), "use 'blockwise'"),
    ("bi", part("soft", decoder={"kind": "fixed"}), "takes a decoder with a threshold"),
    ("bi", part("soft", cfg_scale=1), "cfg_scale"),
    ("causal", part("renoise"), "use 'block_diffusion' or 'sub_blocks'"),
    ("sub-blocks", part("block_diffusion", cache={"kind": "sub_block"}), "use 'exact'"),
    ("sub-blocks", part("sub_blocks", decoder={"kind": "fixed"}), "use 'threshold'"),
    (
        "sub-blocks",
        part("sub_blocks", canvas="pinned") | {"grammar": canvas_of(0)},
        "'block_diffusion' alone",
    ),
    # Models that are bidirectional or not, as a policy says.
    ("pieces", {"diffusion": {"cache": "dual"}}, "does not fit block_diffusion"),
    ("pieces", part("blockwise", cache="exact"), "does not fit this model"),
    ("pieces", {"suffix": (1, 2)}, "block-causal, so the text cannot depend"),
    ("pieces", {"diffusion": {"canvas_length": 8}}, "never sees those after it"),
    *(
        (name, {"diffusion": {"iteration": {"kind": "block_diffusion", "context": "causal"}}}, said)
        for name, said in (("causal", "in one way alone"), ("pieces", "in one way alone"))
    ),
    # Canvases of noise.
    ("noise", {"top_p": 0.9}, "top_p does not go with iteration 'renoise'"),
    ("noise", {"top_k": 5}, "top_k does"),
    ("noise", {"min_p": 0.1}, "min_p does"),
    ("noise", {"presence_penalty": 1.0}, "penalties do"),
    ("noise", {"bad_token_sequences": [[3, 4]]}, "bad_words of several tokens do"),
    ("noise", {"diffusion": {"zero_confidence_token_ids": [3]}}, "zero_confidence_token_ids do"),
    ("noise", {"diffusion": {"cfg_scale": 1.0}}, "cfg_scale does not go"),
    ("noise", {"diffusion": {"speculation": {"kind": "verify"}}}, "speculation"),
    ("noise", {"diffusion": {"iteration": {"kind": "block_diffusion"}}}, "use 'renoise'"),
    ("noise", {"diffusion": {"iteration": {"kind": "soft"}}}, "use 'renoise'"),
    ("noise", {"diffusion": {"iteration": {"kind": "blockwise"}}}, "use 'renoise'"),
    ("noise", {"diffusion": {"decoder": {"kind": "threshold"}}}, "use 'entropy_bound'"),
    ("noise", {"diffusion": {"canvas": "pinned"}}, "'pinned' needs structured outputs"),
    ("noise", {"diffusion": {"cache": {"kind": "dual"}}}, "use 'exact' or 'none'"),
    ("noise", {"diffusion": {"cache": {"kind": "sub_block"}}}, "use 'exact'"),
    ("noise", {"grammar": grammar(0)[1]}, "structured outputs do not go with iteration"),
    # A place to resume at that this request cannot have come to, with blocks of 8.
    ("bi", {"resume": Resume((1,) * 20)}, "all tokens were reported"),
    ("bi", {"resume": Resume((1, EOS))}, "the end token was reported"),
    ("bi", {"resume": Resume((1,), progress=Progress(10**19, 10**19))}, NO_FIT),
    ("bi", {"resume": Resume((1, EOS, 1))}, NO_FIT),
    ("bi", {"resume": Resume((1,) * 7, Progress(1, 3))}, NO_FIT),
    ("bi", {"resume": Resume((1,) * 9, Progress(2, 9))}, NO_FIT),
    ("bi", {"resume": Resume((1,) * 9, Progress(1, 0))}, NO_FIT),
    ("bi", {"resume": Resume((1,) * 9, Progress(0, 3))}, NO_FIT),
    ("bi", {"resume": Resume((1,) * 19, Progress(9, 9))}, NO_FIT),
    ("bi", {"resume": Resume((1,) * 21)}, NO_FIT),
]


@pytest.mark.parametrize(("model", "given", "words"), REFUSED)
def test_requests_that_cannot_be_run_are_refused(
    model: str, given: dict[str, Any], words: str
) -> None:
    given = {"prompt": (1, 2), "max_tokens": 20, **given}
    if "resume" in given:
        given["diffusion"] = {"block_length": 8}
    own = {name: given.pop(name) for name in NOT_SAMPLING if name in given}
    engine = noise() if model == "noise" else toy_engine(MODELS[model])
    with pytest.raises(ValueError) as caught:
        engine.add(Request(0, params=SamplingParams(**given), **own))
    assert words in str(caught.value)
    assert engine.idle


@pytest.mark.parametrize(("model", "suffix"), [(BIDIRECTIONAL, (1,) * 60), (CAUSAL, ())])
def test_a_request_larger_than_the_pool_is_refused(model: Any, suffix: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=8 if suffix else 100)
    with pytest.raises(ValueError, match="K/V pages"):
        toy_engine(model, num_pages=5).add(Request(0, (1, 2), params, suffix))


OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"diffusion": {"iteration": {"kind": "soft"}}}, "diffusion.iteration"),
    ({"diffusion": {"cache": {"kind": "sub_block"}}}, "diffusion.cache"),
    ({"diffusion": {"cfg_scale": 1}}, "diffusion.cfg_scale"),
    ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
    ({"presence_penalty": 1}, "repetition_penalty"),
    ({"bad_token_sequences": [[1, 2]]}, "bad_words"),
    ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
]


@pytest.mark.parametrize(
    ("copies", "given", "field"),
    [
        *((VERIFY, *row) for row in OTHERS),
        (VERIFY, {"diffusion": {"decoder": {"kind": "edit"}}}, "diffusion.decoder"),
        (VERIFY, {"diffusion": {"decoder": {"kind": "credit"}}}, "diffusion.decoder"),
        (VERIFY, {"diffusion": {"decoder": {"kind": "schedule"}}}, "diffusion.decoder"),
    ],
)
def test_what_does_not_go_with_copies_of_a_canvas_is_refused(
    copies: dict[str, Any], given: dict[str, Any], field: str
) -> None:
    diffusion = given.get("diffusion", {}) | copies
    params = SamplingParams(**given | {"diffusion": diffusion})
    with pytest.raises(InvalidField, match="not go with") as caught:
        toy_engine(CAUSAL if "cache" in diffusion else BIDIRECTIONAL).add(
            Request(0, (1, 2), params)
        )
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 3}, "max_tokens is 3"),
        ({"ignore_eos": True}, "ignore_eos does not go with"),
        ({"diffusion": {"iteration": {"kind": "soft"}}}, "goes with iteration 'blockwise'"),
        ({"diffusion": {"decoder": {"kind": "edit"}}}, "'edit' replaces tokens"),
        ({"suffix": (1,)}, "a suffix does not go with"),
        ({"grammar": b""}, "needs structured outputs"),
        ({"bad_token_sequences": ((1, 2),)}, "bad_words of several tokens do not go with"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size does not go with"),
        ({"diffusion": {"canvas": "growing", "slot_length": 3}}, "slot_length is about"),
        ({"diffusion": {"canvas": "growing", "decoder": "whole_slots"}}, "add canvas: 'pinned'"),
        ({"bad_token_ids": "a literal"}, "stands on the pinned canvas"),
    ],
)
def test_what_does_not_go_with_a_pinned_canvas_is_refused(
    given: dict[str, Any], words: str
) -> None:
    found = next(c for c in map(canvas_of, range(99)) if Template.from_bytes(c).cells[0] >= 0)
    cells = Template.from_bytes(found).cells
    if "bad_token_ids" in given:
        given = {"bad_token_ids": [cells[0]]}
    given = {"prompt": (1, 2), "grammar": found, "max_tokens": len(cells), **given}
    given["diffusion"] = {"canvas": "pinned"} | given.get("diffusion", {})
    own = {name: given.pop(name) for name in NOT_SAMPLING if name in given}
    with pytest.raises(InvalidField) as caught:
        toy_engine(BIDIRECTIONAL).add(Request(0, params=SamplingParams(**given), **own))
    assert words in str(caught.value)


def test_what_does_not_go_with_a_grammar_is_refused() -> None:
    automaton, data = next(found for n in range(99) if (found := grammar(n))[0].shortest > 2)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"max_tokens": automaton.shortest - 1}, f"takes {automaton.shortest} tokens"),
        ({"max_tokens": 30, "ignore_eos": True}, "ignore_eos does not go with"),
        ({"max_tokens": 30, "min_tokens": 3}, "min_tokens does not go with"),
    ]
    for given, words in wrong:
        request = Request(0, prompt_of(5), SamplingParams(**given), grammar=data)
        with pytest.raises(InvalidField, match=words):
            toy_engine(BIDIRECTIONAL).add(request)
