"""An engine that sleeps gives its memory back, and is the same when it wakes."""

import asyncio
import gc
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from diffray import AsyncDiffusionLLM, DiffusionLLM
from diffray.cluster.api.request_handle import Phase
from diffray.components.checkpoints.quantize import quantize_checkpoint
from diffray.components.denoiser import Denoiser
from diffray.components.kv_pool import KVPool
from diffray.components.weight import Weight
from diffray.workers.messages import Change, Round
from tests.helpers.adapters import Story
from tests.helpers.own_process import in_own_process
from tests.helpers.short_answers import ids
from tests.helpers.tiny_checkpoints import LLADA, LLADA_MOE, SDAR, random_weights, save, shifted
from tests.helpers.updatable_toy import resident_bytes

LEVELS = [1, 2]


def made(folder: Path, config: dict[str, Any], weights: dict[str, Tensor] | None = None) -> Path:
    config = config | {"mask_token_id": 62, "eos_token_id": 63}
    return save(folder, config, weights or random_weights(config))


def load(folder: Path, **options: Any) -> DiffusionLLM:
    return DiffusionLLM(str(folder), **({"dtype": "float32", "device": "cpu"} | options))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return made(tmp_path / "model", LLADA)


@pytest.fixture
def llm(folder: Path) -> DiffusionLLM:
    return load(folder)


def parameters(llm: DiffusionLLM) -> list[torch.nn.Parameter]:
    model: Any = llm.engine.model
    return list(model.parameters())


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
@pytest.mark.rotate(2)
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


def test_adapters_are_loaded_again(tmp_path: Path) -> None:
    story = Story(tmp_path)
    llm = load(story.base, lora_modules=story.adapters, mask_token_id=62, eos_token_id=63)

    def written() -> list[list[list[int]]]:
        asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "use_tqdm": False}
        outputs = (llm.generate([[1, 2, 3]], lora=name, **asked) for name in ("", "a0", "a1"))
        return [[each.token_ids for each in output.outputs] for (output,) in outputs]

    before = written()
    assert before[0] not in before[1:]
    model: Any = llm.engine.model
    weights = [each for each in model.modules() if isinstance(each, Weight)]
    for level in LEVELS:
        llm.sleep(level)
        assert any(each.lora is not None for each in weights) == (level == 1)
        llm.wake_up()
        assert written() == before


@pytest.mark.long
def test_memory_is_given_back(tmp_path: Path) -> None:
    in_own_process(sleep_and_wake_up, tmp_path)


def use_every_page(kv: KVPool) -> None:
    """Pages that were never used take no memory.

    In a function, as a variable that outlives the loop would keep the last store.
    """
    for store in chain(*kv.stores.values()):
        store.fill_(1.0)


def sleep_and_wake_up(tmp_path: Path) -> None:
    """A model of about 64 MiB of K/V and 100 MiB of weights."""
    config = LLADA | {"d_model": 512, "n_heads": 8, "n_kv_heads": 8, "mlp_hidden_size": 4096}
    config |= {"n_layers": 3, "max_sequence_length": 4096}
    llm = load(made(tmp_path / "model", config), kv_cache_memory=64 << 20)
    before = ids(llm)
    for _ in range(2):
        use_every_page(llm.engine.kv)
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
        # New ranks begin with the checkpoint's weights, whatever those before them had.
        fresh, change = load(old), Change(9, "9", str(new), level=level, restores=True)
        fresh.engine.run(Round(1, [], [], 1, change=change), fresh.engine.check)
        assert fresh.engine.kv.nbytes == 0
        fresh.engine.run(Round(2, [], [], 1, change=Change(10, level=0)), fresh.engine.check)
        assert ids(fresh) == second


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


def test_what_is_refused_leaves_it_as_it_is(llm: DiffusionLLM, folder: Path) -> None:
    before = ids(llm)
    for level in (0, 3, -1):
        with pytest.raises(ValueError, match=f"level is {level}; 1 frees the K/V memory"):
            llm.sleep(level)
    assert not llm.is_sleeping
    llm.sleep(2)
    away = folder.rename(folder.with_name("away"))
    with pytest.raises(ValueError, match="model"):
        llm.wake_up()
    assert llm.is_sleeping
    away.rename(folder)
    llm.wake_up()
    assert ids(llm) == before


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("home", "step"), [(KVPool, "give_back"), (Denoiser, "unpack"), (KVPool, "take_back")]
)
@pytest.mark.rotate(2)
def test_after_an_interrupt_it_can_be_woken(
    llm: DiffusionLLM, monkeypatch: pytest.MonkeyPatch, level: int, home: type, step: str
) -> None:
    before = ids(llm)
    with monkeypatch.context() as patch:
        patch.setattr(home, step, Mock(side_effect=KeyboardInterrupt))
        if (level, step) == (1, "unpack"):  # on a CPU the weights stay
            llm.sleep(level)
        else:
            with pytest.raises(KeyboardInterrupt):
                llm.sleep(level)
                llm.wake_up()
    with pytest.raises((ValueError, RuntimeError), match="the model is asleep; wake it up first"):
        ids(llm)
    llm.wake_up()
    assert ids(llm) == before


async def test_coroutines_sleep_and_wake_their_model(folder: Path) -> None:
    """Requests that have begun end first, and those that come while it sleeps wait."""
    asked: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True, "diffusion": {"block_length": 4}}
    async with AsyncDiffusionLLM(str(folder), dtype="float32", device="cpu") as llm:
        begun = await llm.submit([1, 2, 3], **asked)
        await begun.get()
        await llm.sleep(2)
        assert await llm.is_sleeping()
        first = await asyncio.wait_for(begun.result(), 60)
        handle = await llm.submit([1, 2, 3], **asked)
        await asyncio.sleep(0.05)
        assert handle.status.phase == Phase.QUEUED
        await llm.wake_up()
        assert not await llm.is_sleeping()
        output = await handle.result()
        assert output.outputs[0].token_ids == first.outputs[0].token_ids
