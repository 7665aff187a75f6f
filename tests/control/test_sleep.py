"""An engine that sleeps gives its memory back, and is the same when it wakes."""

import asyncio
import gc
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffray import AsyncDiffusionLLM, DiffusionLLM
from diffray.cluster.api.request_handle import Phase
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.control.local import LocalEngine
from diffray.components.checkpoints.quantize import quantize_checkpoint
from diffray.components.denoiser import Denoiser
from diffray.components.kv_pool import KVPool
from diffray.components.weight import Weight
from diffray.workers.admission import check_request
from tests.helpers.adapters import Story
from tests.helpers.own_process import in_own_process
from tests.helpers.short_answers import ids
from tests.helpers.tiny_checkpoints import LLADA, LLADA_MOE, SDAR, random_weights, save, shifted
from tests.helpers.updatable_toy import asked, resident_bytes, updatable, written

LEVELS = [1, 2]


def made(folder: Path, config: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Path:
    config = config | {"mask_token_id": 62, "eos_token_id": 63}
    return save(folder, config, weights or random_weights(config))


def load(folder: Path, **options: Any) -> DiffusionLLM:
    return DiffusionLLM(str(folder), **({"dtype": "float32", "device": "cpu"} | options))


@pytest.fixture
def llm(tmp_path: Path) -> DiffusionLLM:
    return load(made(tmp_path / "model", LLADA))


def stored_bytes(llm: DiffusionLLM) -> int:
    plain = (each for each in parameters(llm) if not each.is_mkldnn)
    return sum(each.untyped_storage().nbytes() for each in plain)


WIDE = LLADA | {"mlp_hidden_size": 128, "d_model": 64}
MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "llada": (LLADA, {}),
    "llada_moe": (LLADA_MOE, {}),
    "sdar": (SDAR, {}),
    "int8": (WIDE, {"quantization": "int8"}),
    "w8a8": (WIDE, {"quantization": "w8a8"}),
    "stored in int8": (WIDE, {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_writes_the_same_afterwards(tmp_path: Path, name: str) -> None:
    """A light sleep may become a deeper one, but not the other way round."""
    config, options = MODELS[name]
    folder = made(tmp_path / "model", config)
    if name == "stored in int8":
        quantize_checkpoint(folder, tmp_path / "int8", "int8", progress=False)
        folder = tmp_path / "int8"
    llm = load(folder, **options)
    before = ids(llm)
    assert not llm.is_sleeping and stored_bytes(llm)
    for levels in ([1], [2], [2, 2], [1, 2, 1]):
        for level in levels:
            llm.sleep(level)
        assert llm.is_sleeping and llm.engine.kv.nbytes == 0
        assert (stored_bytes(llm) == 0) == (2 in levels)
        with pytest.raises(ValueError, match="the model is asleep; wake it up first"):
            ids(llm)
        llm.wake_up()
        llm.wake_up()
        assert not llm.is_sleeping and llm.engine.kv.num_free == llm.limits.num_pages
        assert ids(llm) == before


@pytest.mark.parametrize("level", LEVELS)
def test_adapters_are_loaded_again(tmp_path: Path, level: int) -> None:
    story = Story(tmp_path)
    options: dict[str, Any] = {"mask_token_id": 62, "eos_token_id": 63}
    llm = load(story.base, lora_modules=story.adapters, **options)

    def written() -> list[list[int]]:
        asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "use_tqdm": False}
        outputs = [llm.generate([[1, 2, 3]], lora=name, **asked) for name in ("", "a0", "a1")]
        return [output.outputs[0].token_ids for (output,) in outputs]

    before = written()
    assert before[0] not in before[1:]
    model: Any = llm.engine.model
    llm.sleep(level)
    kept = [each for each in model.modules() if isinstance(each, Weight) and each.lora is not None]
    assert bool(kept) == (level == 1)
    llm.wake_up()
    assert written() == before


def test_only_vllm_s_levels(tmp_path: Path) -> None:
    llm = load(made(tmp_path / "model", LLADA))
    for level in (0, 3, -1):
        with pytest.raises(ValueError, match=f"level is {level}; 1 frees the K/V memory"):
            llm.sleep(level)
    assert not llm.is_sleeping


def parameters(llm: DiffusionLLM) -> list[torch.nn.Parameter]:
    model: Any = llm.engine.model
    return list(model.parameters())


@pytest.mark.long
def test_memory_is_given_back(tmp_path: Path) -> None:
    in_own_process(sleep_and_wake_up, tmp_path)


def sleep_and_wake_up(tmp_path: Path) -> None:
    """A model of about 64 MiB of K/V and 100 MiB of weights."""
    config = LLADA | {"d_model": 512, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 4096}
    config |= {"n_layers": 3, "max_sequence_length": 4096}
    llm = load(made(tmp_path / "model", config), kv_cache_memory=64 << 20)
    before = ids(llm)
    for _ in range(2):
        for kept in chain(*llm.engine.kv.stores.values()):
            kept.fill_(1.0)  # pages that were never used take no memory
        weights = sum(each.numel() * 4 for each in parameters(llm))
        pages = llm.engine.kv.nbytes
        assert weights > 80 << 20 and pages > 60 << 20
        gc.collect()
        awake = resident_bytes()
        llm.sleep(1)
        light = resident_bytes()
        assert awake - light > 0.9 * pages
        llm.sleep(2)
        assert light - resident_bytes() > 0.9 * weights
        llm.wake_up()
        assert ids(llm) == before
    assert resident_bytes() < awake


def test_new_weights_while_it_sleeps(tmp_path: Path) -> None:
    old, new = made(tmp_path / "old", LLADA), made(tmp_path / "new", LLADA, shifted(LLADA))
    llm, other = load(old), load(new)
    first, second = ids(llm), ids(other)
    assert first != second
    for level in LEVELS:
        llm.sleep(level)
        with pytest.raises(ValueError, match="a sleeping engine takes weights from folders only"):
            llm.update_weights(shifted(LLADA))
        with pytest.raises(ValueError, match="there is no folder"):
            llm.update_weights(tmp_path / "none")
        assert llm.update_weights(new, version=f"new {level}") == f"new {level}"
        assert llm.is_sleeping
        llm.wake_up()
        assert ids(llm) == second
        (output,) = llm.generate([[1, 2]], max_tokens=2, use_tqdm=False)
        assert output.weights_version == f"new {level}"
        llm.sleep(level)
        llm.update_weights(old)
        llm.wake_up()
        assert ids(llm) == first


def test_tensors_that_were_given_up_have_to_be_given_again(llm: DiffusionLLM) -> None:
    llm.update_weights(shifted(LLADA))
    before = ids(llm)
    llm.sleep(1)
    llm.wake_up()
    assert ids(llm) == before
    llm.sleep(2)
    llm.wake_up()
    with pytest.raises(RuntimeError, match="discarded in sleep; update them again"):
        ids(llm)
    some = "model.transformer.ln_f.weight"
    with pytest.raises(ValueError, match="with all tensors"):
        llm.update_weights({some: shifted(LLADA)[some]})
    llm.update_weights(shifted(LLADA))
    assert ids(llm) == before


def test_an_engine_that_cannot_find_its_weights_stays_asleep(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", LLADA)
    llm = load(folder)
    before = ids(llm)
    llm.sleep(2)
    folder.rename(tmp_path / "away")
    with pytest.raises(ValueError, match="model"):
        llm.wake_up()
    assert llm.is_sleeping
    (tmp_path / "away").rename(folder)
    llm.wake_up()
    assert ids(llm) == before


def test_a_stream_that_has_begun_ends_first(tmp_path: Path) -> None:
    llm = load(made(tmp_path / "model", LLADA), diffusion={"block_length": 4})
    options: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
    (whole,) = llm.generate([[1, 2, 3]], use_tqdm=False, **options)
    stream = llm.stream([1, 2, 3], **options)
    found = list(next(stream).token_ids)
    llm.sleep()
    found += [token for delta in stream for token in delta.token_ids]
    assert found == whole.outputs[0].token_ids


def test_stored_prefixes_are_forgotten(tmp_path: Path) -> None:
    llm = load(made(tmp_path / "model", SDAR), page_size=4)
    prompt = [list(range(1, 41))]

    def cached() -> int:
        (output,) = llm.generate(prompt, max_tokens=4, use_tqdm=False)
        return output.cached_tokens

    assert [cached(), cached()] == [0, 40]
    llm.sleep()
    llm.wake_up()
    assert [cached(), cached()] == [0, 40]


class Interrupted(BaseException):
    """What Ctrl-C raises."""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("home", "step"),
    [(KVPool, "give_back"), (Denoiser, "unpack"), (KVPool, "take_back")],
)
def test_after_an_interrupt_it_can_be_woken(
    llm: DiffusionLLM, monkeypatch: pytest.MonkeyPatch, level: int, home: type, step: str
) -> None:
    before = ids(llm)

    def interrupt(self: object) -> None:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(home, step, interrupt)
        if (level, step) == (1, "unpack"):  # on a CPU the weights stay
            llm.sleep(level)
        else:
            with pytest.raises(Interrupted):
                llm.sleep(level)
                llm.wake_up()
    with pytest.raises((ValueError, RuntimeError), match="the model is asleep; wake it up first"):
        ids(llm)
    llm.wake_up()
    assert ids(llm) == before


def test_requests_that_come_while_it_sleeps_wait() -> None:
    requests = [asked(uid) for uid in range(3)]

    async def story(engine: LocalEngine) -> None:
        async def answer(uid: int) -> list[int]:
            checked = check_request(requests[uid], engine.limits)
            return [token async for update in engine.submit(checked) for token in update.ids]

        async def until_waiting(count: int) -> None:
            async with asyncio.timeout(60):
                while (await engine.load()).waiting < count:
                    await asyncio.sleep(0.001)

        begun = asyncio.create_task(answer(0))
        while (await engine.load()).rounds == 0:
            await asyncio.sleep(0.001)
        await engine.sleep(1)
        await asyncio.wait_for(begun, 60)  # what has begun ends first
        late = [asyncio.create_task(answer(uid)) for uid in (1, 2)]
        await until_waiting(2)
        load = await engine.load()
        assert (load.sleep_level, load.running, load.waiting) == (1, 0, 2)
        await engine.check_health()
        await engine.sleep(0)
        assert [await begun, *await asyncio.gather(*late)] == written(0, requests)

    with LocalEngine(updatable(), EngineConfig()) as engine:
        asyncio.run(story(engine))


async def test_coroutines_sleep_and_wake_their_model(tmp_path: Path) -> None:
    folder = made(tmp_path / "model", LLADA)

    async with AsyncDiffusionLLM(str(folder), dtype="float32", device="cpu") as llm:
        await llm.sleep(2)
        assert await llm.is_sleeping()
        handle = await llm.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
        await asyncio.sleep(0.05)
        assert handle.status.phase == Phase.QUEUED
        await llm.wake_up()
        assert not await llm.is_sleeping()
        output = await handle.result()
        assert len(output.outputs[0].token_ids) == 4
