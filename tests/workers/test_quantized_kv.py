"""The engine's promises hold with K/V in few bits: what a query reads depends on nobody else."""

import pytest

from diffray import DiffusionLLM
from diffray.components.kv_pool import kv_format
from diffray.components.params import SamplingParams
from diffray.kernels.formats import Format
from diffray.workers.messages import Request
from tests.helpers.toy import ToyModel, prompt_of, run, toy_engine

FORMS = [Format("uint8"), Format("uint4", 8)]  # a toy's heads have 8 numbers


def request(uid: int, prompt: tuple[int, ...]) -> Request:
    diffusion = {"block_length": 16}
    params = SamplingParams(
        max_tokens=40, temperature=0.9, seed=7, ignore_eos=True, diffusion=diffusion
    )
    return Request(uid, prompt, params)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
@pytest.mark.parametrize("shift", [0, 1])
def test_shared_prefixes_and_chunks_change_nobody_s_tokens(form: Format, shift: int) -> None:
    """A request that stores a prefix reads it as those that find it do; so does a chunked one."""
    model, prompt = ToyModel(block_causal=True, logit_shift=shift), prompt_of(100)
    apart = toy_engine(model, form=form)
    apart.kv.prefixes.enabled = False
    first, other = request(0, prompt), request(1, prompt[:70] + prompt_of(30, seed=3))
    expected = run(apart, [first, other])
    for chunk in (16, 48, 512):
        sharing = toy_engine(model, form=form, chunk=chunk)
        assert run(sharing, [first, other]) == expected  # at once
        assert run(sharing, [other, first]) == expected  # from what is there
        assert sharing.kv.prefixes.num_idle > 0


def test_the_same_memory_holds_more_positions() -> None:
    pages = {}
    for name in ("auto", "int8", "uint4"):
        with DiffusionLLM(
            "demo", dtype="float32", device="cpu", kv_cache_dtype=name, kv_cache_memory="4MiB"
        ) as llm:
            pages[name] = llm.limits.num_pages
            assert llm.engine.kv.nbytes <= (4 << 20) + llm.engine.kv.nbytes // pages[name]
    assert pages["int8"] / pages["auto"] == pytest.approx(32 / 9, rel=0.05)  # 128 to 36 bytes
    assert pages["uint4"] / pages["auto"] == pytest.approx(32 / 5, rel=0.05)  # 128 to 20 bytes


def test_heads_that_do_not_fit_a_format_are_refused_in_one_sentence() -> None:
    message = (
        "kv_cache_dtype 'uint4' has a scale for each 32 numbers of a head, and this model's heads "
        "have 80; choose int8 or auto"
    )
    with pytest.raises(ValueError, match=message):
        kv_format("uint4", [(4, 64), (4, 80)])
    assert kv_format("int8", [(4, 80)]) is not None and kv_format("auto", [(4, 80)]) is None
