"""Trajectories of thousands of requests at once: complete, right, and in bounded memory."""

import gc
from pathlib import Path
from typing import Any

import pytest

from diffray import DiffusionLLM, RequestOutput, SamplingParams
from diffray.components.checkpoints.checkpoint import load_model
from tests.helpers.tiny_checkpoints import LLADA, full_forward, random_weights, save
from tests.helpers.updatable_toy import resident_bytes

COUNT, LENGTH = 2000, 8
PROMPTS = [[number % 60, number // 60, 7] for number in range(COUNT)]


def params(number: int) -> SamplingParams:
    """Each draws its own tokens; some accept one token a step, some several."""
    options: dict[str, Any] = {"temperature": 1.0, "seed": number, "ignore_eos": True}
    decoder = [{"kind": "fixed", "steps": 4}, {"kind": "threshold", "threshold": 0.05}][number % 2]
    diffusion = {"block_length": LENGTH, "decoder": decoder, "cache": {"kind": "none"}}
    return SamplingParams(max_tokens=LENGTH, logprobs=True, diffusion=diffusion, **options)


def trajectory(output: RequestOutput) -> tuple[list[int], list[int], list[float]]:
    (choice,) = output.outputs
    assert choice.logprobs is not None
    return choice.token_ids, choice.steps, choice.logprobs


def recomputed(model: Any, output: RequestOutput) -> list[float]:
    """Return each token's log-probability on the canvas of its step, one forward a step."""
    ids, steps, _ = trajectory(output)
    found = [0.0] * len(ids)
    prompt, mask = output.prompt_token_ids, LLADA["mask_token_id"]
    for now in {*steps}:
        canvas = [token if step < now else mask for token, step in zip(ids, steps, strict=True)]
        logits_LV = full_forward(model, [*prompt, *canvas])[len(prompt) :]
        logprobs_LV = logits_LV.double().log_softmax(-1)
        for at, step in enumerate(steps):
            if step == now:
                found[at] = float(logprobs_LV[at, ids[at]])
    return found


@pytest.mark.slow
def test_two_thousand_requests_in_one_call(tmp_path: Path) -> None:
    folder = str(save(tmp_path / "model", LLADA, random_weights(LLADA)))
    wishes = [params(number) for number in range(COUNT)]
    with DiffusionLLM(folder, dtype="float64", device="cpu", max_num_seqs=64) as llm:

        def ask(numbers: range) -> list[RequestOutput]:
            prompts = [PROMPTS[number] for number in numbers]
            return llm.generate(prompts, [wishes[number] for number in numbers], use_tqdm=False)

        some = range(0, COUNT, 20)
        apart = [trajectory(output) for output in ask(some)]
        gc.collect()
        before = resident_bytes()
        outputs = ask(range(COUNT))
        gc.collect()
        # The answers themselves are a few kilobytes each.
        assert resident_bytes() - before < 32 << 20
        assert llm.engine.kv.num_free == llm.limits.num_pages and llm.engine.idle
        assert llm.engine.slots.num_free == 64
    assert [output.prompt_token_ids for output in outputs] == PROMPTS
    for output in outputs:
        ids, steps, logprobs = trajectory(output)
        assert len(ids) == len(steps) == len(logprobs) == LENGTH
        assert min(steps) == 0 and {*steps} == {*range(max(steps) + 1)}
        assert all(logprob < 0 for logprob in logprobs)
        assert output.outputs[0].forwards == max(steps) + 1
    assert [trajectory(outputs[number]) for number in some] == apart
    model = load_model(folder, dtype="float64", device="cpu", progress=False)
    for number in range(0, COUNT, 40):
        found = recomputed(model, outputs[number])
        assert trajectory(outputs[number])[2] == pytest.approx(found, abs=1e-6)
    assert len({tuple(trajectory(output)[0]) for output in outputs}) > 0.9 * COUNT
