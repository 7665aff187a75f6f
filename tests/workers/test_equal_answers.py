"""On checkpoints in the published layouts, too, a batch has the tokens of each request alone."""

import pytest

from diffray.components.policy import accepted_by
from tests.helpers.equal_answers import draw_requests, main
from tests.helpers.mixed_requests import DECODERS
from tests.helpers.toy import toy_spec


@pytest.mark.parametrize("block_causal", [False, True])
def test_requests_are_of_all_kinds(block_causal: bool) -> None:
    """But for branches, whose tokens depend on what runs beside them."""
    requests = draw_requests(40, 1, block_causal=block_causal)
    asked = [request.params.diffusion for request in requests]
    assert {d.decoder.kind for d in asked if d.decoder} == {*DECODERS} - {"lopa"}
    fitting = accepted_by(toy_spec(block_causal))
    iterations, caches = fitting["iteration"], fitting["cache"]
    assert isinstance(iterations, list) and isinstance(caches, list)
    plain = "block_diffusion" if block_causal else "blockwise"
    assert {d.iteration.kind if d.iteration else plain for d in asked} == set(iterations)
    assert {d.cache.kind for d in asked if d.cache} == set(caches)
    assert any(d.cfg_scale for d in asked)


# In each lane: `tests/workers/test_golden.py` has whole families in one batch.
@pytest.mark.long
def test_batched_equals_alone_in_float64(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dtype", "float64", "--requests", "13", "--batch", "4"])
    assert capsys.readouterr().out.splitlines()[-1] == "float64, 1 ranks: 91 of 91 equal"
