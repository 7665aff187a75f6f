"""Ctrl-C anywhere in a call: the next one answers as ever, and nothing stays behind."""

import sys
from types import FrameType
from typing import Any

import pytest

from diffray import DiffusionLLM, SamplingParams
from tests.helpers.paths import GOLDEN

FILES = tuple(
    f"control/{name}.py" for name in ("driver", "llm", "local", "queued_request", "scheduler")
)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, diffusion={"block_length": 4})
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]


class Interrupts:
    """Raises KeyboardInterrupt at the `at`-th line that these files run."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(FILES):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> "Interrupts":
        sys.settrace(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


def tokens(llm: DiffusionLLM, most: int = 200) -> list[list[int]]:
    advance, rounds = llm._advance, 0

    def bounded(*args: Any) -> None:
        nonlocal rounds
        rounds += 1
        assert rounds < most, "it does not end"
        advance(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm, "_advance", bounded)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> DiffusionLLM:
    options = {"mask_token_id": 510, "eos_token_id": 511, "page_size": 8, "max_num_seqs": 2}
    return DiffusionLLM(str(GOLDEN / "llada"), dtype="float64", **options)  # type: ignore[arg-type]


def test_after_an_interrupt_anywhere_the_next_call_is_as_ever(llm: DiffusionLLM) -> None:
    expected, pages = tokens(llm), llm.engine.kv.num_free
    with Interrupts(at=-1) as whole:
        tokens(llm)
    for at in range(1, whole.lines + 1, max(whole.lines // 40, 1)):
        with pytest.raises(KeyboardInterrupt), Interrupts(at):
            tokens(llm)
        assert tokens(llm) == expected, at
        client: Any = llm.client
        scheduler, slots = client.driver.scheduler, llm.engine.slots
        assert not (scheduler.open or scheduler.running or scheduler._waiting), at
        assert not (scheduler._flying or scheduler._preempting or scheduler._cancelled), at
        assert not (llm._jobs or llm._events or client.driver.flying), at
        assert llm.engine.idle and llm.engine.kv.num_free == pages and slots.num_free == 2, at


def test_a_stream_goes_on_after_another_call_was_interrupted(llm: DiffusionLLM) -> None:
    alone = [token for delta in llm.stream([1, 2, 3], PARAMS) for token in delta.token_ids]
    stream = llm.stream([1, 2, 3], PARAMS)
    found = list(next(stream).token_ids)
    run = llm.engine.run

    def interrupted(*args: Any) -> Any:
        run(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.engine, "run", interrupted)
        llm.generate([4, 5], PARAMS)
    found += [token for delta in stream for token in delta.token_ids]
    assert found == alone
