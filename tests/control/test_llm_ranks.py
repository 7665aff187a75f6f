"""DiffusionLLM on several ranks of a Ray: the tokens of one process, and no end of calls."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import DEFAULT, Mock

import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.frontend.output import RequestOutput
from diffray.components.grammar.structured import StructuredOutputs
from tests.helpers.shared import CPUS

pytestmark = pytest.mark.slow

MESSAGES = [
    [{"role": "user", "content": f"Tom buys {n} pens for 4 dollars each. How much does he pay?"}]
    for n in range(2, 7)
]
PARAMS = SamplingParams(max_tokens=40, n=2, temperature=0.7, seed=4, logprobs=True)
FORMS: dict[str, Any] = {"dtype": "float64", "max_num_seqs": 4}


@pytest.fixture(scope="module", autouse=True)
def four_processors(shared_ray: None) -> Iterator[None]:
    """Take the others."""
    others = placement_group([{"CPU": CPUS - 4}])
    ray.get(others.ready())
    yield
    remove_placement_group(others)


@pytest.fixture(scope="module")
def one() -> Iterator[DiffusionLLM]:
    with DiffusionLLM("demo", **FORMS) as llm:
        yield llm


@pytest.fixture(scope="module")
def two(four_processors: None) -> Iterator[DiffusionLLM]:
    with DiffusionLLM("demo", tensor_parallel_size=2, expert_parallel=True, **FORMS) as llm:
        yield llm
    form = StructuredOutputs(choice=("Tom", "Tim"))  # never compiled before
    for params in SamplingParams(), SamplingParams(structured_outputs=form):
        with pytest.raises(ValueError, match="has been shut down"):
            llm.generate("Tom", params)


def tokens(outputs: list[RequestOutput]) -> list[list[tuple[list[int], list[int], str]]]:
    return [[(c.token_ids, c.steps, c.text) for c in output.outputs] for output in outputs]


def test_two_ranks_answer_as_one_does(one: DiffusionLLM, two: DiffusionLLM) -> None:
    wishes = [
        *[PARAMS] * 2,
        SamplingParams(max_tokens=33, temperature=1.0, top_k=7, top_p=0.9, seed=6, ignore_eos=True),
        SamplingParams(max_tokens=32, diffusion={"decoder": {"kind": "credit"}}, logprobs=True),
        SamplingParams(max_tokens=32, diffusion={"cfg_scale": 0.5}, logprobs=True),
    ]
    found, expected = (llm.chat(MESSAGES, wishes) for llm in (two, one))
    assert tokens(found) == tokens(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].finish_reason == theirs.outputs[0].finish_reason
        assert ours.outputs[0].logprobs == pytest.approx(theirs.outputs[0].logprobs, abs=1e-6)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    calls: list[Callable[[DiffusionLLM], list[RequestOutput]]] = [
        lambda llm: llm.infill("Tom has ", " pens.", max_tokens=6, ignore_eos=True),
        lambda llm: llm.generate("Tom", max_tokens=24, structured_outputs={"json": schema}),
        lambda llm: llm.generate("Tom", max_tokens=24, stop="e"),
    ]
    for call in calls:
        assert tokens(call(two)) == tokens(call(one))


def test_streams_and_canvases_are_those_of_one(one: DiffusionLLM, two: DiffusionLLM) -> None:
    asked = {"max_tokens": 48, "diffusion": {"decoder": {"kind": "fixed", "steps": 12}}}
    params = SamplingParams(**asked)  # type: ignore[arg-type]
    assert list(two.watch(MESSAGES[0], params)) == list(one.watch(MESSAGES[0], params))
    first, second = two.stream(MESSAGES[0], params), two.stream(MESSAGES[1], params)
    found = next(first).text
    other = "".join(delta.text for delta in second)
    found += "".join(delta.text for delta in first)
    expected = one.chat(MESSAGES[:2], params)
    assert [found, other] == [output.outputs[0].text for output in expected]


@pytest.mark.long
def test_what_was_left_or_interrupted_is_cancelled(
    two: DiffusionLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = SamplingParams(max_tokens=256, ignore_eos=True)
    stream = two.stream("Tom", long)
    next(stream)
    assert two.client.open
    stream.close()  # type: ignore[attr-defined]
    assert not two.client.open

    third = Mock(wraps=two.client.advance, side_effect=[DEFAULT, DEFAULT, KeyboardInterrupt])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(two.client, "advance", third)
        two.generate(["Tom"] * 6, long)
    assert not two.client.open
    (output,) = two.generate("Tom", max_tokens=4, ignore_eos=True)
    assert output.completion_tokens == 4


def test_two_ranks_sleep_and_wake(two: DiffusionLLM) -> None:
    before = tokens(two.chat(MESSAGES[:2], PARAMS))
    two.sleep(2)
    assert two.is_sleeping
    with pytest.raises(ValueError, match="the model is asleep; wake it up first"):
        two.chat(MESSAGES[:2], PARAMS)
    assert not two.client.open
    two.wake_up()
    assert not two.is_sleeping
    assert tokens(two.chat(MESSAGES[:2], PARAMS)) == before


def test_what_cannot_run_is_one_sentence(
    two: DiffusionLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffray.cluster.control.ranks._ROOM_S", 1.0)
    with pytest.raises(ValueError, match=r"needs 3 CPU, and Ray has 1 CPU free; shut down"):
        DiffusionLLM("demo", tensor_parallel_size=2)
    with pytest.raises(ValueError, match="the prompt is empty"):
        two.generate([[]])
    assert repr(two) == "DiffusionLLM('demo', tensor_parallel_size=2)"
    with pytest.raises(ValueError, match="the engine runs in 2 other processes; use limits"):
        _ = two.engine


SCRIPT = """
from diffray import DiffusionLLM

llm = DiffusionLLM("demo", tensor_parallel_size=2, dtype="float64")
(output,) = llm.generate("Tom", max_tokens=4, ignore_eos=True)
print(output.outputs[0].token_ids)
"""


@pytest.mark.long
def test_a_script_starts_a_ray_of_its_own_and_ends_it(one: DiffusionLLM) -> None:
    """Nothing is shut down by the script itself, and no process stays."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        settings = {"RAY_TMPDIR": folder, "PYTHONPATH": os.pathsep.join(sys.path), "HOME": folder}
        env = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | settings
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        (expected,) = one.generate("Tom", max_tokens=4, ignore_eos=True)
        assert done.stdout == f"{expected.outputs[0].token_ids}\n"
        assert "Error" not in done.stderr and "Traceback" not in done.stderr, done.stderr
        assert not any(folder.encode() in command for command in commands())
    assert ray.is_initialized(), "the script has a Ray of its own"


def commands() -> Iterator[bytes]:
    """Yield the command lines of all processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            yield path.read_bytes()
