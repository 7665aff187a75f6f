"""A request whose engine is lost resumes in another, from its updates alone, to the same text."""

from functools import partial

import pytest

from diffray.components.params import SamplingParams
from diffray.workers.messages import Request, Resume
from tests.helpers.mixed_requests import BIDIRECTIONAL, CAUSAL, MIXED, MIXED_CAUSAL, mixed_requests
from tests.helpers.resuming import Story, cut_and_resume, updates_of
from tests.helpers.toy import EOS, ScriptedModel, certain, prompt_of, toy_engine


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("early_stop", [False, True])
@pytest.mark.parametrize("where", [3, 8, 15, 20])
@pytest.mark.rotate(6)
def test_end_token_is_reported_once(causal: bool, early_stop: bool, where: int) -> None:
    """Also where the blocks after it are still to be denoised, and in the last place of all."""
    script = {6 + where: EOS, 6 + where + 1: EOS, 6 + where + 9: EOS}
    model = ScriptedModel(certain(script), block_causal=causal)
    kind = "block_diffusion" if causal else "blockwise"
    diffusion = {
        "block_length": 8,
        "iteration": {"kind": kind, "early_stop": early_stop},
        "decoder": {"kind": "fixed", "steps": 16},
    }
    request = Request(0, prompt_of(6), SamplingParams(max_tokens=21, diffusion=diffusion))
    whole = updates_of(toy_engine(model), [request], 1)
    assert Story.of(whole, 0).facts["stop_id"] == EOS
    for cut in range(whole[-1].forwards):
        found = cut_and_resume(partial(toy_engine, model), [request], 1, [cut])
        assert Story.of(found, 0) == Story.of(whole, 0)


def test_only_the_current_block_is_done_again() -> None:
    for model, policies in ((BIDIRECTIONAL, MIXED), (CAUSAL, MIXED_CAUSAL)):
        (request,) = [r for r in mixed_requests(policies) if r.params.diffusion.block_length == 8]
        whole = updates_of(toy_engine(model), [request], 1)
        found = cut_and_resume(partial(toy_engine, model), [request], 1, [9])
        resumed = Resume.after(found[: len(updates_of(toy_engine(model), [request], 1, 9))])
        assert resumed.progress.blocks > 0
        assert whole[-1].forwards < found[-1].forwards <= whole[-1].forwards + 8
