"""On checkpoints in the published layouts, too, a batch has the tokens of each request alone."""

import pytest

from tests.helpers.equal_answers import main


# In each lane: `tests/workers/test_golden.py` has whole families in one batch.
@pytest.mark.long
def test_batched_equals_alone_in_float64(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--dtype", "float64", "--requests", "13", "--batch", "4"])
    assert capsys.readouterr().out.splitlines()[-1] == "float64, 1 ranks: 104 of 104 equal"
