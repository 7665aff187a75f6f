"""K/V in few bits take less memory. Engines run on them in the tests of prefixes and tokens."""

import pytest

from diffray import DiffusionLLM
from diffray.components.kv_pool import kv_format


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
