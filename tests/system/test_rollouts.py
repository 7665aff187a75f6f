"""The example that trains the demo model: it sees what the engine saw, and its reward rises."""

import math
from statistics import mean, variance

import pytest

from diffray import DiffusionLLM
from diffray.components.checkpoints.folder import resolve
from examples.rollouts import PROMPTS, Policy, logprobs, rollouts, sampling
from examples.train_demo.model import products_dtype

pytestmark = pytest.mark.slow


def test_the_trainer_finds_the_log_probabilities_of_the_trajectory() -> None:
    with DiffusionLLM("demo", dtype="float32", device="cpu") as llm:
        model = Policy(resolve("demo"))
        mask, ends = llm.limits.mask_token_id, [*llm.limits.eos_token_ids]
        outputs = llm.generate(list(PROMPTS[:2]), sampling(3, seed=1), use_tqdm=False)
    count = 0
    close = 2e-3 if products_dtype().itemsize == 4 else 0.2
    for output in outputs:
        told_of = (each.detach() for each in logprobs(model, output, mask, ends))
        for choice, place, found in zip(*told_of, strict=True):
            told = output.outputs[int(choice)].logprobs
            assert told is not None
            assert float(found) == pytest.approx(told[int(place)], abs=close, rel=close)
            count += 1
    assert count == sum(len(each.token_ids) for output in outputs for each in output.outputs)


@pytest.mark.long
def test_the_reward_rises() -> None:
    """By a quarter of what was missing, and by far more than chance would change."""
    first, *_, last = rollouts(steps=8, choices=8, seed=3)
    error = math.sqrt(sum(variance(each) / len(each) for each in (first, last)))
    risen = mean(last) - mean(first)
    assert risen > 0.25 * (1 - mean(first)) and risen > 6 * error
