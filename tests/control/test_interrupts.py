"""Ctrl-C anywhere in a call: the next call works, and nothing is left behind."""

import sys
from itertools import count
from types import FrameType
from typing import Any

import pytest

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.control.events import Event
from diffray.cluster.control.request_queue import QueuedRequest, RoundInFlight
from diffray.cluster.frontend.output import Job
from tests.helpers.living import living, only_new
from tests.helpers.paths import GOLDEN

FILES = tuple(
    f"control/{name}.py" for name in ("driver", "llm", "local", "request_queue", "scheduler")
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


def tokens(llm: DiffusionLLM) -> list[list[int]]:
    run, rounds = llm.engine.run, count(1)

    def bounded(*args: Any) -> Any:
        assert next(rounds) < 200, "it does not end"
        return run(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "run", bounded)
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def llm() -> DiffusionLLM:
    options: dict[str, Any] = {"page_size": 8, "max_num_seqs": 2, "steps_per_round": 4}
    options |= {"dtype": "float64", "mask_token_id": 510, "eos_token_id": 511}
    return DiffusionLLM(str(GOLDEN / "llada"), **options)


@pytest.mark.parametrize("places", [4, pytest.param(30, marks=pytest.mark.long)])
def test_after_an_interrupt_anywhere_the_next_call_works(llm: DiffusionLLM, places: int) -> None:
    expected, pages = tokens(llm), llm.engine.kv.num_free
    with Interrupts(at=-1) as whole:
        tokens(llm)
    for at in range(1, whole.lines + 1, max(whole.lines // places, 1)):
        with only_new():
            with pytest.raises(KeyboardInterrupt), Interrupts(at):
                tokens(llm)
            assert tokens(llm) == expected, at
            assert not living(QueuedRequest, Job, RoundInFlight, Event), at
        client: Any = llm.client
        scheduler, slots = client.driver.scheduler, llm.engine.slots
        assert not (scheduler.open or scheduler.running or client.driver.unanswered), at
        assert llm.engine.idle and llm.engine.kv.num_free == pages and slots.num_free == 2, at


@pytest.mark.parametrize("in_round", [True, False])
def test_a_stream_goes_on_after_another_call_was_interrupted(
    llm: DiffusionLLM, in_round: bool
) -> None:
    """In a round that has looked at tokens of the stream before it ended there, or after one."""
    short, long = (
        SamplingParams(max_tokens=most, ignore_eos=True, diffusion={"block_length": 4})
        for most in (24, 48)
    )
    alone = [token for delta in llm.stream(PROMPTS[0], short) for token in delta.token_ids]
    stream = llm.stream(PROMPTS[0], short)
    found = list(next(stream).token_ids)
    step = "_release" if in_round else "run"
    own, ended = getattr(llm.engine, step), list[Any]()

    def once(*args: Any) -> Any:
        result = own(*args)
        if not ended:
            ended.append(args[0])
            raise KeyboardInterrupt
        return result

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as stopped:
        patch.setattr(llm.engine, step, once)
        llm.generate(PROMPTS[1], long)
    assert [each.name for each in stopped.traceback][1:] == ["generate", "_run", "_advance"]
    (line,) = stopped.value._render_traceback_()  # type: ignore[attr-defined]  # IPython's name
    assert line.startswith("KeyboardInterrupt: ")
    assert not in_round or ended[0].params.max_tokens == 24
    found += [token for delta in stream for token in delta.token_ids]
    assert found == alone
