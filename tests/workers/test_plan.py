"""A plan says what the engine then takes: the bytes of weights, canvases and K/V, and its pages."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.gpu.floor import step_ms
from benchmarks.gpu.random_model import config_of
from benchmarks.gpu.shapes import SHAPES, Work
from diffray.components.cards import CARDS, Card, named_card
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.components.roofline import Ceilings, least_seconds
from diffray.components.weight import Weight
from diffray.workers import plan as planning
from diffray.workers.engine import Engine
from diffray.workers.engine_options import EngineOptions
from diffray.workers.plan import Plan, Share
from diffray.workers.setup import build_rank
from diffray.workers.step_time import Windows, step_parts
from tests.helpers import gguf_files
from tests.helpers.adapters import adapter_of
from tests.helpers.paths import GOLDEN

IDS = {"mask_token_id": 510, "eos_token_id": 511}
FREE = 3 << 20  # bytes once weights and canvases are there
# A model, the options of its engine, and its mesh.
CASES: list[tuple[str, dict[str, Any], Mesh]] = [
    ("demo", {}, Mesh()),
    ("demo-llada2", {"quantization": "int4", "max_model_len": 300}, Mesh()),
    ("demo", {"quantization": "experts=int8,attention=uint4,head=int8"}, Mesh()),
    ("llada", {"dtype": "bfloat16", "kv_cache_dtype": "uint4", "max_num_seqs": 3}, Mesh()),
    ("llada", {"quantization": "q8_0", "kv_cache_dtype": "int8", "page_size": 8}, Mesh()),
    ("llada", {"quantization": "w8a8", "kv_cache_memory": 1 << 20}, Mesh()),
    ("dream", {"quantization": "q4_1", "max_num_seqs": 1, "max_model_len": 77}, Mesh()),
    ("diffusion_gemma", {"quantization": "experts=fp8", "mask_token_id": None}, Mesh()),
    ("ar_llama", {"quantization": "int8"}, Mesh()),
    ("llada_moe", {}, Mesh(1, 2)),
    ("llada_moe", {"quantization": "int8"}, Mesh(1, 2, expert_parallel=True)),
    ("sdar", {"kv_cache_dtype": "int8"}, Mesh(3, 4)),  # with half as many key heads as ranks
]


def planned(path: str, setup: EngineOptions, mesh: Mesh) -> tuple[Share, Plan]:
    """Plan for a CPU on which so many bytes are free once the ranks have loaded the weights."""
    none = Share.of(path, setup, mesh, Card("none", 0, device="cpu")).plan(1.0)
    memory = FREE + mesh.size * (none.weights + none.canvases)
    share = Share.of(path, setup, mesh, Card("here", memory, device="cpu"))
    return share, share.plan(1.0)


def bytes_of_weights(engine: Engine) -> int:
    assert isinstance(engine.model, nn.Module)
    return sum(each.nbytes for each in (*engine.model.parameters(), *engine.model.buffers()))


def bytes_of_adapters(engine: Engine) -> int:
    assert isinstance(engine.model, nn.Module)
    loaded = [each.lora for each in engine.model.modules() if isinstance(each, Weight)]
    deltas = [d for lora in loaded if lora for own in lora.deltas.values() for d in own.values()]
    return sum(part.nbytes for each in deltas for down, up, _ in each for part in (down, up))


@pytest.mark.parametrize(("model", "options", "mesh"), CASES)
def test_the_engine_takes_what_the_plan_says(
    model: str, options: dict[str, Any], mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffray.workers.setup.free_memory", lambda _: FREE)
    is_demo = model.startswith("demo")
    path = model if is_demo else str(GOLDEN / model)
    given = ({} if is_demo else IDS) | {"device": "cpu", "bring_up": False} | options
    setup = EngineOptions(**given)
    (share, plan), engine = planned(path, setup, mesh), build_rank(path, setup, mesh)
    assert plan.weights == pytest.approx(bytes_of_weights(engine), rel=0.01)
    assert plan.dtype == str(engine.kv.dtype).removeprefix("torch.")
    assert plan.canvases == engine.slots.nbytes
    assert (plan.num_pages, plan.kv_cache) == (engine.kv.num_pages, engine.kv.nbytes)
    assert plan.kv_bytes_per_token * setup.page_size * plan.num_pages == engine.kv.nbytes
    assert plan.context == engine.limits.context
    assert plan.adapters == bytes_of_adapters(engine)
    assert plan.graphs == plan.activations == 0 and plan.steps == ()
    held = plan.requests * share.pages_per_request
    assert held <= engine.limits.num_pages
    assert (
        plan.requests == setup.max_num_seqs or held + share.pages_per_request > plan.num_pages - 1
    )


def test_a_gguf_file_a_drafter_and_given_adapters_count(tmp_path: Path) -> None:
    file, folder = tmp_path / "model.gguf", tmp_path / "idlm"
    gguf_files.write(file, "llada", "Q8_0")
    shutil.copytree(GOLDEN / "idlm", folder)
    (folder / "linear_spec_lora").rename(folder / "drafter")
    for path in (str(file), str(folder)):
        setup = EngineOptions(device="cpu", **IDS)
        _, plan = planned(path, setup, Mesh())
        engine = build_rank(path, setup, Mesh())
        assert plan.weights == pytest.approx(bytes_of_weights(engine), rel=0.01)
        assert plan.adapters == bytes_of_adapters(engine)
        assert (plan.adapters > 0) is (path == str(folder))
    adapter = adapter_of(str(GOLDEN / "llada"), tmp_path / "adapter", rank=5)
    setup = EngineOptions(device="cpu", dtype="float32", lora_modules={"mine": str(adapter)}, **IDS)
    written = (adapter / "adapter_model.safetensors").stat().st_size  # in float64
    assert planned(str(file), setup, Mesh())[1].adapters == pytest.approx(written / 2, rel=0.05)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("rows", [1, 32])
def test_steps_are_those_of_the_benchmarks_floor(name: str, rows: int) -> None:
    work, found = Work(rows, 64, 1024), Ceilings(4e12, 8e14)
    model = build_model(config_of(SHAPES[name], 1024), Mesh(), torch.bfloat16)
    seconds = least_seconds(step_parts(model, None, Windows(*work)), found)
    assert seconds * 1e3 == pytest.approx(step_ms(SHAPES[name], work, "bfloat16", found), rel=0.01)


def share_of(model: str, card: Card, mesh: Mesh | None = None, **options: Any) -> Share:
    return Share.of(model, EngineOptions(**options), mesh or Mesh(), card)


SMALL = named_card("L4")._replace(memory=(1 << 30) + (200 << 20))  # beside CUDA 200 MiB


def test_the_most_requests_fit_and_one_more_does_not() -> None:
    for model in ("demo", "demo-llada2"):
        share = share_of(model, SMALL)
        most = share.most_requests
        assert 1 < most < 100
        for count in (most, most + 1):
            plan = share_of(model, SMALL, max_num_seqs=count).plan(1.0)
            assert (plan.requests == count) is (count == most)
            assert plan.activations > 0 and plan.graphs > 0
            assert plan.limit == ("max_num_seqs" if count == most else "activations")
    few = share_of("demo", SMALL, kv_cache_memory=7 << 20).plan(1.0)
    assert (few.requests, few.most_requests, few.limit) == (2, 2, "kv_cache")


def test_memory_adds_up_on_a_gpu() -> None:
    plan = share_of("demo", SMALL, quantization="int8").plan(1.0)
    parts = plan.taken + plan.weights + plan.canvases + plan.graphs + plan.kv_cache + plan.left
    assert parts == plan.memory
    assert share_of("demo", SMALL, cuda_graphs=False).plan(1.0).graphs == 0
    assert share_of("demo", SMALL, kernels="torch").plan(1.0).graphs == 0
    with pytest.raises(ValueError, match="cuda_graphs needs kernels 'triton'"):
        share_of("demo", SMALL, kernels="torch", cuda_graphs=True)


def test_more_tokens_a_step_or_ranks_are_faster_and_more_requests_slower_each() -> None:
    h100 = named_card("H100")
    one, more = (share_of("demo", h100).plan(rate) for rate in (1.0, 4.0))
    two = share_of("demo", h100, Mesh(1, 2)).plan(1.0)
    assert [step.requests for step in one.steps] == [1, 16, one.most_requests]
    assert one.steps[0].ms == more.steps[0].ms > two.steps[0].ms
    assert one.steps[0].tokens_per_s < more.steps[0].tokens_per_s < 4 * one.steps[0].tokens_per_s
    assert one.steps[0].ms < one.steps[1].ms < 16 * one.steps[0].ms


def test_cards_have_the_names_that_people_and_drivers_use(monkeypatch: pytest.MonkeyPatch) -> None:
    for said in ("RTX 4090", "rtx4090", "NVIDIA GeForce RTX 4090"):
        assert named_card(said).name == "RTX-4090"
    with pytest.raises(ValueError, match="'H20' in the table, did you mean 'H200'"):
        named_card("H20")
    monkeypatch.setattr(planning, "free_memory", lambda _: 7)
    monkeypatch.setattr(planning, "gpu_facts", lambda _: {"gpu": CARDS["H100"].driver})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    here = planning.card_here(torch.device("cuda"))
    h100 = named_card("H100")
    assert here == h100._replace(name=h100.driver, memory=7, taken=0, driver="")
