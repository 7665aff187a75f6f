"""Likelihoods of given answers are those of the models written out plainly."""

import json
import math
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, combinations
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from benchmarks.golden import EOS, MASK, UNMASKED
from diffray import DiffusionLLM
from diffray.cluster.frontend.likelihood import LogLikelihood
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers import plain_models
from tests.helpers.paths import GOLDEN
from tests.helpers.resuming import Story, cut_and_resume, updates_of

BLOCK = 32  # of LLaDA2
ANSWER = (21, 7, 60, 33, 12, 300)
PROMPTS = {
    "llada": (5, 9, 17, 30, 2, 44, 8),
    "dream": (5, 9, 17, 30, 2, 44, 8),
    "llada2_moe": tuple(range(100, 100 + BLOCK - 3)),  # half of the answer is in its block
}


@cache
def llm(name: str) -> DiffusionLLM:
    mask = None if name in UNMASKED else MASK
    return DiffusionLLM(
        str(GOLDEN / name), dtype="float64", max_model_len=512, page_size=8, mask_token_id=mask,
        eos_token_id=EOS,
    )  # fmt: skip


@cache
def logprobs_of(name: str) -> Callable[[list[int]], Tensor]:
    """Return the plain model, as the log-probabilities of the token at each position."""
    folder = GOLDEN / name
    config = json.loads((folder / "config.json").read_text())
    stored = [load_file(file) for file in folder.glob("*.safetensors")]
    weights = {key: value.double() for part in stored for key, value in part.items()}
    more = (BLOCK,) if name == "llada2_moe" else ()
    shift = int(name == "dream")

    def found(ids: list[int]) -> Tensor:
        logits_NV: Tensor = getattr(plain_models, name)(weights, config, torch.tensor(ids), *more)
        return logits_NV.log_softmax(-1).roll(shift, 0)

    return found


def masked(name: str, shown: set[int], stop: int) -> list[float]:
    """Return each token's log-probability where these places of the answer are shown.

    Masks follow up to `stop`, as far as an answer may.
    """
    prompt = PROMPTS[name]
    answer = [token if at in shown else MASK for at, token in enumerate(ANSWER)]
    ids = [*prompt, *answer]
    ids += [MASK] * (stop - len(ids))
    found = logprobs_of(name)(ids)
    return [found[len(prompt) + at, token].item() for at, token in enumerate(ANSWER)]


def stop_of(name: str, place: int) -> int:
    """Return the end of the canvas that a token of the answer depends on."""
    prompt = len(PROMPTS[name])
    blocks = (prompt + place) // BLOCK + 1
    return blocks * BLOCK if name == "llada2_moe" else prompt + len(ANSWER)


@pytest.mark.parametrize("name", PROMPTS)
def test_left_to_right_each_token_follows_those_before_it(name: str) -> None:
    (found,) = llm(name).loglikelihood([PROMPTS[name]], [ANSWER], method="left_to_right")
    places = range(len(ANSWER))
    expected = [masked(name, {*range(at)}, stop_of(name, at))[at] for at in places]
    assert found.logprobs == pytest.approx(expected, rel=1e-5)
    assert found.logprob == pytest.approx(sum(expected), rel=1e-5)
    assert found.is_greedy is False and found.error == 0 and found.forwards >= len(ANSWER)


def test_greedy_answers_are_known_as_such() -> None:
    prompt, policy = PROMPTS["llada"], {"decoder": "sequential", "cache": "none", "canvas": "fixed"}
    (output,) = llm("llada").generate(
        [prompt], max_tokens=6, ignore_eos=True, logprobs=True, diffusion=policy, use_tqdm=False
    )
    answer = tuple(output.outputs[0].token_ids)
    (found,) = llm("llada").loglikelihood([prompt], [answer], method="left_to_right")
    assert found.is_greedy
    assert found.logprobs == pytest.approx(output.outputs[0].logprobs)


@pytest.mark.parametrize("name", ["ar_qwen3", "ar_llama"])
def test_autoregressive_equals_transformers(name: str) -> None:
    """The long answer takes several forwards, and top log-probabilities are those of each place."""
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float64)
    prompt, answers = (5, 9, 17), [ANSWER, tuple(n * 7 % 500 for n in range(1, 300)), (44,)]
    found = llm(name).loglikelihood([prompt] * 3, answers, top_logprobs=2)
    for answer, each in zip(answers, found, strict=True):
        with torch.no_grad():
            logits_NV = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logprobs_NV = logits_NV.log_softmax(-1)
        expected = logprobs_NV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert each.logprobs == pytest.approx(expected.tolist(), rel=1e-4)
        assert each.top_logprobs is not None
        best = [[token for token, _ in top] for top in each.top_logprobs]
        assert best == logprobs_NV.topk(2).indices.tolist()
    assert found[1].forwards <= 5


def patterns(block: range) -> Iterator[tuple[float, set[int]]]:
    """Yield what may be masked of a block, and the weight of its log-probabilities."""
    for count in range(1, len(block) + 1):
        chance = 1 / len(block) / math.comb(len(block), count)
        for each in combinations(block, count):
            yield chance * len(block) / count, set(each)


def exact_bound(name: str) -> float:
    """Return the bound that `monte_carlo` estimates, from all patterns of masks."""
    total, blocks = 0.0, [range(6)] if name != "llada2_moe" else [range(3), range(3, 6)]
    for block in blocks:
        for weight, hidden in patterns(block):
            shown = {*range(block.start), *block} - hidden
            logprobs = masked(name, shown, stop_of(name, block.start))
            total += weight * sum(logprobs[at] for at in hidden)
    return total


@pytest.mark.parametrize("name", PROMPTS)
def test_monte_carlo_converges_to_the_bound_over_all_patterns(name: str) -> None:
    def ask(seed: int, samples: int) -> LogLikelihood:
        return llm(name).loglikelihood(
            [PROMPTS[name]], [ANSWER], samples=samples, seed=seed, use_tqdm=False
        )[0]

    expected = exact_bound(name)
    found = ask(0, 1000)
    assert found.method == "monte_carlo" and found.logprobs is None and found.is_greedy is None
    assert abs(found.logprob - expected) < 3 * found.error
    assert found.error < 0.02 * abs(expected)
    few = [ask(seed, 8) for seed in range(1, 40)]
    assert len({each.logprob for each in few}) > 30
    # Not biased with few samples either, and the error is not understated.
    spread = math.sqrt(fmean((each.logprob - expected) ** 2 for each in few))
    assert abs(fmean(each.logprob for each in few) - expected) < 3 * spread / math.sqrt(len(few))
    assert spread < 1.5 * fmean(each.error for each in few)


def test_an_estimate_depends_on_its_seed_and_on_no_other_question() -> None:
    prompt, others = PROMPTS["llada"], [ANSWER[:2], ANSWER[::-1], ANSWER]
    ask = llm("llada").loglikelihood
    (alone,) = ask([prompt], [ANSWER], samples=16, use_tqdm=False)
    *_, beside = ask([prompt] * 3, others, samples=16, use_tqdm=False)
    assert beside.logprob == pytest.approx(alone.logprob, abs=1e-9)
    (single,) = ask([prompt], [ANSWER[:1]], use_tqdm=False)  # there is one pattern alone
    assert single.error == 0 and single.forwards == 1


def test_texts_are_split_where_the_prompt_ends() -> None:
    demo = DiffusionLLM("demo")
    prompt, answer = "2 plus 3 is", " five."
    (found,) = demo.loglikelihood(prompt, answer, method="left_to_right")
    assert demo.tokenizer is not None
    whole, first = (demo.tokenizer.encode(text, True) for text in (prompt + answer, prompt))
    (same,) = demo.loglikelihood([first], [whole[len(first) :]], method="left_to_right")
    assert found == same and found.logprobs is not None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"answers": [()]}, "at least one token each"),
        ({"answers": [ANSWER, ANSWER]}, "1 prompts for 2 answers"),
        ({"answers": [(MASK,)]}, "mask token has no log-probability"),
        ({"answers": [(7000,)]}, "7000 is not in the vocabulary"),
        ({"method": "autoregressive"}, "use monte_carlo or left_to_right"),
        ({"samples": 0}, "samples"),
    ],
)
def test_what_has_no_likelihood_is_refused(given: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"prompts": [PROMPTS["llada"]], "answers": [ANSWER]} | given
    with pytest.raises(ValueError, match=words):
        llm("llada").loglikelihood(**asked)


def test_noise_has_no_likelihood() -> None:
    with pytest.raises(ValueError, match="canvases of this model are noise"):
        llm("diffusion_gemma").loglikelihood([(5, 6)], [ANSWER])


def asked(name: str) -> list[Request]:
    """Requests with given answers of all kinds, between others."""
    own = "autoregressive" if name == "ar_qwen3" else None
    policy = {"iteration": own, "decoder": None if own else "sequential"}
    params = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=True, diffusion=policy)
    answers = [tuple((7 * n + 13 * uid) % 500 for n in range(40)) for uid in range(4)]
    places = tuple(range(1, 40, 3)) if own is None else ()
    plain = [Request(uid, (5, 9, uid), params) for uid in range(2)]
    given = [Request(2 + n, (5, 9, n), params, answer=ids) for n, ids in enumerate(answers[:2])]
    shown = [Request(4 + n, (5, 9), params, answer=a, places=places) for n, a in enumerate(answers)]
    return [*plain, *given, *shown]


@pytest.mark.parametrize("name", ["llada", "llada2_moe", "ar_qwen3"])
def test_interrupted_equals_uninterrupted_and_alone(name: str) -> None:
    @cache
    def engine() -> Engine:
        setup = EngineOptions(
            dtype="float64", device="cpu", max_num_seqs=8, page_size=8, max_model_len=256,
            mask_token_id=None if name in UNMASKED else MASK, eos_token_id=EOS,
        )  # fmt: skip
        return build_rank(str(GOLDEN / name), setup, Mesh())

    def another() -> Engine:
        engine().cancel_all()
        return engine()

    requests = asked(name)
    whole = updates_of(engine(), requests, 1)
    parts = cut_and_resume(another, requests, 1, [1, 7])
    alone = list(chain(*(updates_of(engine(), [each], 2) for each in requests)))
    for each in requests:
        story = Story.of(whole, each.uid)
        if each.answer:
            assert story.facts["ids"] == [*each.answer]
        for other in (parts, alone):
            found = Story.of(other, each.uid)
            assert found.facts == story.facts
            assert found.numbers == pytest.approx(story.numbers, abs=1e-9)
