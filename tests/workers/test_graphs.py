"""Recorded steps: padded to a bucket and replayed, they find the tokens that plain steps find.

Without a GPU two stand-ins record: one runs the same function again, the other replays a trace of
tensor operations, in which whatever Python computed while it was made is fixed, as in a CUDA graph.
Both return the same tensors each time, as a graph does.
"""

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from diffray import SamplingParams
from diffray.components.backend import Record, choose_recorder
from diffray.components.mesh import Mesh
from diffray.kernels.acceptance import settle
from diffray.kernels.choose import TORCH
from diffray.workers import batch_plan
from diffray.workers.batch_state import BatchState
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.graphs import Bucket, Graphs, Recorded, buckets_for, halves
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from diffray.workers.sleeper import Sleeper
from tests.helpers.mixed_requests import (
    BIDIRECTIONAL,
    BOTH,
    CAUSAL,
    MIXED,
    Policies,
    alone,
    mixed_requests,
)
from tests.helpers.paths import GOLDEN
from tests.helpers.replays import again, frozen, into_the_same, replays
from tests.helpers.threads import ThreadMesh, on_ranks
from tests.helpers.toy import EOS, ToyModel, prompt_of, run, toy_engine


def traced(work: Callable[[], Any]) -> Callable[[], Any]:
    out = work()
    return into_the_same(out, make_fx(lambda: work())())


def with_graphs(engine: Engine, buckets: list[Bucket], record: Record = again) -> Engine:
    engine.graphs = Graphs(engine.model, engine.kv, engine.slots, buckets, record)
    return engine


SMALL = [Bucket(8, 112), Bucket(3, 40), Bucket(1, 33)]


@BOTH
@pytest.mark.rotate(1)
def test_ragged_and_padded_equals_run_as_it_is(
    model: ToyModel, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together; and alone, with one kernel at the end of the steps that it can end."""
    policies = [p for p in policies if "iteration" not in p and "cfg_scale" not in p]
    requests = mixed_requests(policies)
    monkeypatch.setattr("diffray.workers.engine.steps_ahead", lambda _: 3)
    expected = run(toy_engine(model), requests, steps=3)
    seen = replays(monkeypatch)
    assert run(with_graphs(toy_engine(model), SMALL), requests, steps=3) == expected
    assert len(set(seen)) > 1
    settled = Mock(wraps=settle)
    for request in requests:
        engine = with_graphs(toy_engine(model), SMALL)
        engine.kv.kernels = TORCH._replace(name="other", settle=settled)
        assert run(engine, [request])[request.uid] == expected[request.uid]
    assert settled.call_count > 0


def test_what_was_forgotten_in_sleep_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests([p for p in MIXED if "iteration" not in p and "cfg_scale" not in p])
    engine = with_graphs(toy_engine(BIDIRECTIONAL), SMALL)
    sleeper = Sleeper(engine.model, engine.kv, engine.graphs)  # type: ignore[arg-type]  # a toy
    expected = run(engine, requests)
    sleeper.sleep(1)
    assert engine.graphs is not None and engine.graphs.fit(1, 8) is None
    sleeper.wake()
    sleeper.settle()
    seen = replays(monkeypatch)
    assert run(engine, requests) == expected
    assert seen


def test_what_no_bucket_is_for_runs_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = mixed_requests(MIXED)  # some are guided, some are soft
    seen = replays(monkeypatch)
    expected = alone(BIDIRECTIONAL)
    assert run(with_graphs(toy_engine(BIDIRECTIONAL), SMALL), requests) == expected
    assert run(with_graphs(toy_engine(BIDIRECTIONAL), [Bucket(1, 3)]), requests) == expected
    assert Bucket(1, 3) not in seen


def test_a_replay_begins_before_the_rest_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that waits for the host gets its forward first."""
    seen: list[str] = []

    def noted(owner: object, name: str) -> None:
        inner = getattr(owner, name)

        def call(*args: Any) -> Any:
            seen.append(name)
            return inner(*args)

        monkeypatch.setattr(owner, name, call)

    noted(batch_plan, "plan_head")
    noted(BatchState, "__init__")
    noted(BatchState, "now")
    noted(Recorded, "forward")
    noted(Recorded, "fill")
    params = SamplingParams(max_tokens=16, diffusion={"block_length": 8})
    engine = with_graphs(toy_engine(BIDIRECTIONAL), [Bucket(2, 32)])
    seen.clear()
    run(engine, [Request(0, prompt_of(5), params), Request(1, prompt_of(6), params)])
    steps = " ".join(seen).split("forward")
    assert len(steps) == engine.forwards + 1
    assert steps[0].split() == ["fill"]
    ends = [step.split()[-1:] for step in steps[1:]]
    assert all(end in ([], ["now"], ["plan_head"], ["fill"]) for end in ends)
    assert steps[1].split()[:2] == ["__init__", "now"]


@pytest.mark.parametrize("model", [BIDIRECTIONAL, CAUSAL], ids=["bi", "causal"])
def test_a_recording_holds_nothing_of_the_requests_it_was_made_with(model: ToyModel) -> None:
    """A trace made on padding alone is replayed for others: slots, pages, positions, tokens."""
    engine = with_graphs(toy_engine(model), [Bucket(3, 24)], traced)
    for wave in range(3):
        cache = {"kind": "prefix", "refresh": 100} if model is BIDIRECTIONAL else {"kind": "none"}
        policy, requests = {"block_length": 6 + wave, "cache": cache}, []
        for number in range(1 + wave):
            params = SamplingParams(max_tokens=9 + number, ignore_eos=True, diffusion=policy)
            prompt = prompt_of(4 + 3 * number + wave, seed=wave)
            requests.append(Request(10 * wave + number, prompt, params))
        assert run(engine, requests, steps=2) == run(toy_engine(model), requests)


def test_padding_reaches_no_request() -> None:
    """Whatever the pool's padding page and the trash of the canvases hold."""
    request = Request(0, prompt_of(5), SamplingParams(max_tokens=20, ignore_eos=True))
    expected = run(toy_engine(BIDIRECTIONAL), [request])
    engine = with_graphs(toy_engine(BIDIRECTIONAL), [Bucket(4, 40)])
    engine.kv.keys_LSGD[:, : engine.kv.page_size] = 1e6
    engine.kv.values_LSGD[:, : engine.kv.page_size] = -1e6
    engine.slots.ids_SN[-1] = EOS
    assert run(engine, [request]) == expected


def test_buckets_grow_by_doubling_and_hold_all_sequences() -> None:
    assert buckets_for(6, 32) == [
        Bucket(6, 64), Bucket(4, 64), Bucket(6, 32), Bucket(2, 64), Bucket(4, 32),
        Bucket(1, 64), Bucket(2, 32), Bucket(1, 32),
    ]  # fmt: skip
    assert buckets_for(2, 64, 32) == [
        Bucket(2, 128), Bucket(2, 96), Bucket(1, 128), Bucket(2, 64), Bucket(1, 96), Bucket(1, 64),
    ]  # fmt: skip
    assert buckets_for(6, 32, 32) == buckets_for(6, 32)
    assert list(halves(100)) == [100, 50, 25]
    assert list(halves(32)) == [32]


def test_the_smallest_bucket_that_fits_is_taken() -> None:
    graphs = with_graphs(toy_engine(BIDIRECTIONAL), SMALL).graphs
    assert graphs is not None
    for windows, length, expected in (
        (1, 5, Bucket(1, 33)), (1, 34, Bucket(3, 40)), (2, 33, Bucket(3, 40)),
        (4, 1, Bucket(8, 112)), (9, 1, None), (1, 113, None),
    ):  # fmt: skip
        found = graphs.fit(windows, length)
        assert (found and found.bucket) == expected


@pytest.mark.long
def test_ranks_replay_the_same_collectives_and_find_the_tokens_of_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = EngineOptions(
        dtype="float64", mask_token_id=510, eos_token_id=511, max_num_seqs=2, max_model_len=96
    )
    params = SamplingParams(max_tokens=24, ignore_eos=True, diffusion={"block_length": 8})
    requests = [Request(uid, prompt_of(5 + 3 * uid), params) for uid in range(3)]
    seen: dict[int, list[object]] = defaultdict(list)  # of each rank, which is a thread
    gather, smallest = ThreadMesh.all_gather, Mesh.smallest

    def gathered(mesh: ThreadMesh, x: Tensor) -> Tensor:
        seen[threading.get_ident()].append(x.shape)
        return gather(mesh, x)

    def agreed(mesh: Mesh, name: str, value: int) -> int:
        seen[threading.get_ident()].append(name)
        return smallest(mesh, name, value)

    def work(mesh: Mesh) -> dict[int, list[int]]:
        return run(build_rank(str(GOLDEN / "llada_moe"), options, mesh), requests)

    expected = work(Mesh())
    monkeypatch.setattr("diffray.workers.setup.choose_recorder", lambda *_: again)
    monkeypatch.setattr("diffray.workers.graphs.peak_memory", lambda _device, run: run() or 0)
    monkeypatch.setattr(ThreadMesh, "all_gather", gathered)
    monkeypatch.setattr(Mesh, "smallest", agreed)
    replayed = replays(monkeypatch)
    assert on_ranks(2, work) == [expected, expected]
    one, other = (events for events in seen.values() if len(events) > 1)
    assert one == other
    assert one[0] == "loaded"  # no rank waits in a collective for one that is still loading
    assert replayed


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (frozen, "replays of 1 x 32 positions differ from launched steps"),
        (Mock(side_effect=OSError("not permitted")), r"recorded here \(OSError: not permitted"),
    ],
)
def test_a_start_without_right_replays_is_refused(
    record: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffray.workers.setup.choose_recorder", lambda *_: record)
    monkeypatch.setattr("diffray.workers.setup.memory_for", lambda *_: 0)
    options = EngineOptions(mask_token_id=510, eos_token_id=511, max_num_seqs=1, device="cpu")
    with pytest.raises(RuntimeError, match=f"{why}.*; start with --no-cuda-graphs"):
        build_rank(str(GOLDEN / "llada_moe"), options, Mesh())


@pytest.mark.parametrize(
    "family", ["llada", "dream", "fast_dllm_v2", "sdar", "llada_moe", "llada2_moe", "sdar_moe"]
)
def test_steps_of_every_family_are_recorded(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffray.workers.setup.choose_recorder", lambda *_: again)
    options = EngineOptions(mask_token_id=510, eos_token_id=511, max_num_seqs=1, device="cpu")
    assert build_rank(str(GOLDEN / family), options, Mesh()).graphs is not None


@pytest.mark.parametrize(
    ("family", "lengths"), [("llada_moe", {64, 96, 128}), ("llada2_moe", {64, 128})]
)
def test_blocks_with_their_neighbours_are_recorded_where_vicinity_runs_them(
    family: str, lengths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only attention that goes both ways can run under vicinity."""
    monkeypatch.setattr("diffray.workers.setup.choose_recorder", lambda *_: again)
    options = EngineOptions(
        mask_token_id=510, eos_token_id=511, max_num_seqs=1, graph_block_length=64, device="cpu"
    )
    engine = build_rank(str(GOLDEN / family), options, Mesh())
    assert engine.graphs is not None
    recorded = (engine.graphs.fit(1, length) for length in range(1, 129))
    assert {each.bucket.length for each in recorded if each is not None} == lengths


def test_graphs_are_refused_where_they_cannot_be() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert choose_recorder(None, cpu, "triton") is None
    assert choose_recorder(False, gpu, "triton") is None
    assert choose_recorder(None, gpu, "torch") is None
    with pytest.raises(ValueError, match="cuda_graphs needs a CUDA device, and this is cpu"):
        choose_recorder(True, cpu, "torch")
    with pytest.raises(ValueError, match="cuda_graphs needs kernels 'triton', and these are"):
        choose_recorder(True, gpu, "torch")
