"""What travels between the processes arrives as it was, and needs no torch to be passed on."""

import pickle
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffray.components.params import SamplingParams
from diffray.workers.messages import Progress, Request, Resume, Update

IDS = st.lists(st.integers(0, 1 << 20), max_size=5)
REALS = st.floats(allow_nan=False, allow_infinity=False)
SEEDS = st.none() | st.integers(-(2**63), 2**63 - 1)
BIASES = st.dictionaries(st.integers(0, 1 << 20), st.floats(-100, 100))


def travelled(record: Any, how: str) -> Any:
    """Return it as another process gets it: over the control channel, or through Ray."""
    if how == "pickle":
        return pickle.loads(pickle.dumps(record))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=type(record))


HOW = pytest.mark.parametrize("how", ["pickle", "msgpack"])
POLICIES: list[dict[str, object]] = [
    {},
    {"block_length": 7, "decoder": {"kind": "edit"}, "cfg_scale": 0.5},
    {"iteration": {"kind": "soft"}, "cache": {"kind": "vicinity", "refresh": 3}},
]
COUNT = st.integers(0, 99)
PROGRESS = st.builds(Progress, COUNT, COUNT)
RESUME = st.none() | st.builds(Resume, IDS.map(tuple), PROGRESS, COUNT)


@HOW
@given(ids=IDS, seed=SEEDS, bias=BIASES, policy=st.sampled_from(POLICIES), resume=RESUME)
def test_a_request_arrives_as_it_was(
    how: str,
    ids: list[int],
    seed: int | None,
    bias: dict[int, float],
    policy: dict[str, object],
    resume: Resume | None,
) -> None:
    params = SamplingParams(
        seed=seed, logit_bias=bias, stop=["a", "\N{SNOWMAN}"], stop_token_ids=ids,
        temperature=0.1 + 0.2, logprobs=True, top_logprobs=4, bad_token_ids=ids, diffusion=policy,
    )  # fmt: skip
    request = Request(
        2**53 + 1, (1, 2), params, tuple(ids), len(ids) > 2, resume, "salt",
        answer=tuple(ids), places=tuple(ids[:1]),
    )  # fmt: skip
    wire = travelled(request.to_wire(), how)
    assert (wire.uid, wire.prompt, wire.max_tokens) == (2**53 + 1, (1, 2), 128)
    assert wire.restarts == (policy.get("iteration") == {"kind": "soft"})
    arrived = wire.to_request()
    assert arrived == request and hash(arrived.resume) == hash(resume)
    assert arrived.params.model_dump() == params.model_dump()
    assert isinstance(arrived.params.stop_token_ids, tuple)


UPDATES = st.builds(
    Update,
    COUNT,
    ids=IDS,
    steps=IDS,
    logprobs=st.lists(REALS, max_size=3),
    finish_reason=st.sampled_from([None, "stop", "length"]),
    stop_id=st.none() | COUNT,
    forwards=COUNT,
    progress=PROGRESS,
    top_logprobs=st.lists(st.lists(st.tuples(COUNT, REALS), max_size=3), max_size=3),
    canvas=st.none() | st.lists(st.none() | COUNT, max_size=4),
    cached_tokens=COUNT,
    fields=st.just({"job": (0.5, {"nurse": -0.25, "pilot": -1.5})}),
)


@HOW
@given(update=UPDATES)
def test_an_update_arrives_as_it_was(how: str, update: Update) -> None:
    arrived = travelled(update, how)
    assert arrived == update
    assert isinstance(arrived.progress, Progress)


def test_passing_messages_on_needs_no_torch() -> None:
    program = (
        "import sys; from diffray.workers.messages import Resume, Update; "
        "Resume.after([Update(1, [2])]); "
        "sys.exit('torch' in sys.modules or 'pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
