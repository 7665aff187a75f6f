"""New weights for a running engine: no answer mixes versions, and a refusal changes nothing."""

import asyncio
import gc
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from diffray import DiffusionLLM
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import LocalEngine, WaitingEngine
from diffray.cluster.control.weight_changes import UpdateWeights
from diffray.components.checkpoints.quantize import quantize_checkpoint
from diffray.components.denoiser import Denoiser
from diffray.workers.admission import check_request
from diffray.workers.engine import Engine
from diffray.workers.messages import Change, Request, Round, Update
from tests.helpers.own_process import in_own_process
from tests.helpers.short_answers import ids
from tests.helpers.tiny_checkpoints import LLADA, LLADA_MOE, SDAR, random_weights, save, shifted
from tests.helpers.updatable_toy import asked, resident_bytes, updatable, weights, written

MODES = ["finish", "restart"]
TIMES = 300
INTERRUPT = Mock(side_effect=KeyboardInterrupt)
# It reports whole blocks only.
LATE = {"block_length": 8, "decoder": {"kind": "edit"}}


async def answer(engine: LocalEngine, request: Request, priority: int = 0) -> list[Update]:
    checked = check_request(request, engine.limits)
    async with aclosing(engine.submit(checked, priority=priority)) as updates:
        return [update async for update in updates]


def tokens(updates: list[Update]) -> list[int]:
    return [token for update in updates for token in update.ids]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("block_causal", [False, True])
@pytest.mark.rotate(2)
def test_no_answer_mixes_versions_under_load(mode: Any, block_causal: bool) -> None:
    """Requests come, give way to each other and end while updates alternate two sets of weights."""
    requests = [asked(uid, length=3 + uid % 13, temperature=uid % 2) for uid in range(24)]
    expected = {seed: written(seed, requests, block_causal) for seed in (0, 1)}
    assert all(left != right for left, right in zip(*expected.values(), strict=True))
    inner = updatable(block_causal, num_slots=4, num_pages=24)
    config = EngineConfig(time_slice=4, steps_per_round=2, max_queued_requests=99)

    async def story(engine: LocalEngine) -> tuple[list[list[Update]], list[str]]:
        async def one(request: Request) -> list[Update]:
            await asyncio.sleep(0.01 * request.uid)
            return await answer(engine, request, priority=request.uid % 3)

        answers = asyncio.gather(*(one(request) for request in requests))
        versions = []
        for number in count(1):
            if answers.done():
                break
            await asyncio.sleep(0.02)
            version = f"{number} of seed {number % 2}"
            versions.append(await engine.apply(UpdateWeights(weights(number % 2), mode, version)))
        return await answers, versions

    with LocalEngine(inner, config) as engine:
        answers, versions = asyncio.run(story(engine))
    assert len(versions) > 3
    used = set()
    for number, updates in enumerate(answers):
        (version,) = {update.version for update in updates}
        used.add(version)
        assert tokens(updates) == expected[0 if version == "0" else int(version[-1])][number]
    assert len(used) > 2


class Client(WaitingEngine):
    """An engine in the caller's thread, and what it has told of each request."""

    def __init__(self, engine: Engine | None = None, **options: Any) -> None:
        super().__init__(engine or updatable(**options), 1)
        self.found: dict[int, list[Update]] = {}

    def ask(self, request: Request) -> None:
        self.submit(check_request(request, self.limits))

    def run(self, rounds: int = 10**6) -> None:
        for _ in range(rounds):
            if not self.open:
                return
            for event in self.advance():
                assert event.update is not None, event.reason
                self.found.setdefault(event.uid, []).append(event.update)

    def update_weights(self, *given: Any, **named: Any) -> str:
        return self.apply(UpdateWeights(*given, **named))

    def answer(self, request: Request) -> list[int]:
        """Answer a request to its end."""
        self.ask(request)
        self.run()
        return tokens(self.found[request.uid])


@pytest.mark.parametrize("mode", MODES)
def test_requests_that_have_reported_end_on_the_old_weights(mode: Any) -> None:
    client = Client(num_slots=2)
    # The first reports its first block; the second has just begun; the third waits.
    requests = [asked(0), asked(1, diffusion=LATE), asked(2)]
    client.ask(requests[0])
    while not client.found:
        client.run(1)
    for request in requests[1:]:
        client.ask(request)
    client.run(1)
    assert client.found.keys() == {0}
    assert client.update_weights(weights(1), mode) == "1"
    client.run()
    old, new = (written(seed, requests) for seed in (0, 1))
    begun = ("0", old[1]) if mode == "finish" else ("1", new[1])
    for uid, (version, answer) in enumerate([("0", old[0]), begun, ("1", new[2])]):
        assert {update.version for update in client.found[uid]} == {version}
        assert tokens(client.found[uid]) == answer


@pytest.mark.parametrize("watch", [False, True])
def test_a_watched_canvas_counts_as_reported(watch: bool) -> None:
    client, request = Client(), replace(asked(0, diffusion=LATE), watch=watch)
    client.ask(request)
    client.run(1)
    assert tokens(client.found.get(0, [])) == []
    client.update_weights(weights(1), "restart")
    client.ask(asked(1))
    client.run()
    assert {update.version for update in client.found[0]} == {"0" if watch else "1"}
    assert tokens(client.found[0]) == written(0 if watch else 1, [request])[0]


def test_versions_count_up_or_have_names() -> None:
    client = Client()
    assert client.driver.load().weights_version == "0"
    assert client.update_weights(weights(1)) == "1"
    assert client.update_weights(weights(0), version="step 7") == "step 7"
    assert client.update_weights(weights(1)) == "3"
    with pytest.raises(ValueError, match="already have version 3"):
        client.update_weights(weights(1), version="3")
    with pytest.raises(ValueError, match="allowed are finish, restart"):
        client.update_weights(weights(1), "abort")
    assert client.driver.load().weight_updates == 3
    engine = updatable()
    engine.changes = None
    with pytest.raises(ValueError, match="cannot be replaced"):
        Client(engine).update_weights(weights(1))


WRONG: list[tuple[dict[str, Tensor], str]] = [
    ({}, "names no tensor"),
    ({"head": cast(Tensor, "x")}, "head is str; give a torch.Tensor"),
    ({"tail": torch.zeros(3)}, "1 unexpected: tail"),
    (weights(1) | {"head": torch.zeros(3, 4)}, r"head is \[3, 4\], not \[64, 16\]"),
    (weights(1) | {"head": weights(1)["head"].long()}, "head is torch.int64"),
    (weights(1) | {"head": weights(1)["head"] / 0}, "head in the state dict is NaN or infinite"),
]


@pytest.mark.parametrize(("given", "reason"), WRONG, ids=[each[1][:12] for each in WRONG])
def test_a_refused_update_changes_nothing(given: dict[str, Tensor], reason: str) -> None:
    engine = updatable()
    client, request = Client(engine), asked(0)
    with pytest.raises(ValueError, match=reason):
        client.update_weights(given)
    assert client.answer(request) == written(0, [request])[0]
    assert client.found[0][0].version == "0"
    assert engine.changes is not None and engine.changes.given == {}
    assert client.update_weights({"head": weights(1)["head"]}) == "1"  # a part is enough


def test_stored_prefixes_are_forgotten() -> None:
    client, request = Client(block_causal=True), asked(0, length=40)
    for uid, seed in enumerate((0, 0, 1, 1)):
        if uid == 2:
            client.update_weights(weights(1))
        found = client.answer(replace(request, uid=uid))
        assert found == written(seed, [request], block_causal=True)[0]
    assert [client.found[uid][-1].cached_tokens for uid in range(4)] == [0, 40, 0, 40]


def test_after_an_interrupted_update_only_another_one_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client, request = Client(), asked(0)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("diffray.components.checkpoints.update.NewWeights.copy", INTERRUPT)
        client.update_weights(weights(1))
    client.ask(request)
    (event,) = client.advance()
    assert "was interrupted" in event.reason
    with pytest.raises(ValueError, match="with all tensors"):
        client.update_weights({"head": weights(1)["head"]})
    client.update_weights(weights(1))
    assert client.answer(request) == written(1, [request])[0]


def test_an_interrupted_wait_withdraws_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(engine := updatable())
    client.ask(asked(0))
    client.advance()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine, "run", INTERRUPT)
        client.update_weights(weights(1))
    client.run()
    assert client.driver.load().weights_version == "0"


def test_what_must_be_restored_cannot_be_refused() -> None:
    order: Round[Any] = Round(1, [], [], 1, change=Change(1, "1", "/nowhere", restores=True))
    with pytest.raises(RuntimeError, match="1 could not be restored: there is no folder"):
        updatable().run(order, lambda _: _)


# Real models.


MODELS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *((config, {"dtype": "float32"}) for config in (LLADA, LLADA_MOE, SDAR)),
    *((config, {"dtype": "float64"}) for config in (LLADA, LLADA_MOE, SDAR)),
    *((LLADA, {"quantization": name}) for name in ("int8", "uint4", "w8a8", "w8a8_fp8")),
    (LLADA, {"quantization": {"mlp": "fp8"}}),
]


@pytest.mark.parametrize(("config", "options"), MODELS)
@pytest.mark.rotate(5)
def test_an_updated_model_is_a_fresh_one(
    tmp_path: Path, config: dict[str, Any], options: dict[str, Any]
) -> None:
    """In float32 matrices are packed anew, and quantized ones are rounded anew."""
    config = config | {"mask_token_id": 62, "eos_token_id": 63}
    weights = {name: tensor.float() for name, tensor in random_weights(config).items()}
    folders = [
        save(tmp_path / "old", config, weights),
        save(tmp_path / "new", config | {"use_cache": False}, shifted(config)),
    ]
    old, new = (DiffusionLLM(str(each), device="cpu", **options) for each in folders)
    first, second = ids(old), ids(new)
    assert first != second
    model = old.engine.model
    assert isinstance(model, Denoiser)
    places = {n: p.data_ptr() for n, p in model.named_parameters() if not p.is_mkldnn}
    assert old.update_weights(folders[1]) == "1"
    assert ids(old) == second
    assert old.update_weights(weights, version="first") == "first"
    assert ids(old) == first
    (output,) = old.generate([[1, 2]], max_tokens=2, use_tqdm=False)
    assert output.weights_version == output.outputs[0].weights_version == "first"
    now = dict(model.named_parameters())
    assert all(now[name].data_ptr() == place for name, place in places.items())


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    old = save(tmp_path / "old", LLADA, weights := random_weights(LLADA))
    other = LLADA | {"rope_theta": 500000.0, "rms_norm_eps": 1e-6}
    last = "model.transformer.ln_f.weight"
    quantize_checkpoint(old, tmp_path / "int8", "int8", progress=False)
    save(tmp_path / "nan", LLADA, {name: each / 0 for name, each in weights.items()})
    save(tmp_path / "other", other, random_weights(other))
    save(tmp_path / "moe", LLADA_MOE, random_weights(LLADA_MOE))
    save(tmp_path / "short", LLADA, {name: weights[name] for name in weights if name != last})
    llm = DiffusionLLM(str(old), quantization="int8", device="cpu")
    before = ids(llm)
    for folder, reason in (
        ("int8", "give unquantized weights"),
        ("nan", "is NaN or infinite"),
        ("other", "config.json differs in rms_norm_eps, rope_theta"),
        ("moe", "differs in architectures"),
        ("short", f"1 missing: {last}"),
        ("none", "there is no folder"),
    ):
        with pytest.raises(ValueError, match=reason):
            llm.update_weights(tmp_path / folder)
        assert ids(llm) == before


@pytest.mark.long
def test_many_updates_leave_memory_flat(tmp_path: Path) -> None:
    assert in_own_process(growth_by_updates, tmp_path) < 4 * TIMES << 10


def growth_by_updates(tmp_path: Path) -> int:
    """Return by how many bytes the process grows in many updates, some with requests between."""
    config = LLADA | {"d_model": 128, "mlp_hidden_size": 256}
    states = [random_weights(config), shifted(config)]
    folder = save(tmp_path / "old", config, states[0])
    llm = DiffusionLLM(str(folder), dtype="float32", device="cpu")

    def resident_after(times: int) -> int:
        for number in range(times):
            llm.update_weights(states[number % 2])
            if number % 20 == 0:
                ids(llm)
        gc.collect()
        return resident_bytes()

    before = resident_after(TIMES // 5)
    grown = resident_after(TIMES) - before
    assert llm.engine.kv.num_free == llm.limits.num_pages
    return grown
