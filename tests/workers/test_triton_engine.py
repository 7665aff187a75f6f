"""The whole engine over Triton's kernels, in the interpreter: the same tokens as over torch's."""

from collections.abc import Callable

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
from benchmarks.golden import FAMILIES, Case, cases_of
from benchmarks.gpu.check_engine import Way, engine_of, requests_of
from diffray import DiffusionLLM, SamplingParams
from diffray.kernels.choose import TORCH, Kernels, choose_kernels
from diffray.kernels.triton import attention
from tests.helpers.paths import GOLDEN

CPU = torch.device("cpu")
DEFAULTS = Way("float32", "triton", None)


def is_cached(case: Case) -> bool:
    cached = case["cache"] != "none" and "stop_ids" not in case
    return bool(cached and case.get("threshold", 1) <= 0.4)


def is_credit(case: Case) -> bool:
    """Its decoder needs the logits."""
    return bool(case["decoder"] == "credit")


def check_first_block(
    family: str, way: Way = DEFAULTS, wanted: Callable[[Case], bool] = is_cached
) -> None:
    """Compare the first block of the shortest such case, as a forward takes seconds."""
    cases = cases_of(FAMILIES[family])
    number, case = min(
        ((number, case) for number, case in enumerate(cases) if wanted(case)),
        key=lambda each: (each[1].get("forwards", 0), each[1]["block_length"]),
    )
    block_length = case["block_length"]
    # Of block-causal models the first block begins in the prompt.
    first = block_length - (len(case["prompt"]) % block_length if case["cache"] == "block" else 0)
    engine = engine_of(family, way, DEVICE)
    assert engine.kv.kernels.name == "triton"
    engine.add(requests_of(family)[number])
    found: list[int] = []
    while len(found) < first and not engine.idle:
        for update in engine.step():
            found += update.ids
    assert len(found) >= first and found == case["tokens"][: len(found)]


@pytest.mark.long
def test_golden_tokens_come_out_of_split_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which small models do not need: splits of 32 keys, and in float32 too."""
    choose, found = attention.num_splits, set()

    def num_splits(programs: int, max_keys: int, _split_keys: int) -> int:
        found.add(splits := choose(programs, max_keys, 32))
        return splits

    monkeypatch.setattr(attention, "num_splits", num_splits)
    check_first_block("llada")
    assert max(found) > 1


@pytest.mark.long
@pytest.mark.rotate(2)
@pytest.mark.parametrize(  # layouts load alike
    ("family", "wanted"),
    [
        pytest.param("llada", is_cached, marks=pytest.mark.core),
        pytest.param("llada2_moe", is_cached, marks=pytest.mark.core),
        ("dream", is_cached),
        ("fast_dllm_v2", is_cached),
        ("sdar_moe", is_cached),
        ("llada_moe", is_credit),
    ],
)
def test_golden_tokens_come_out_of_triton_s_kernels(
    family: str, wanted: Callable[[Case], bool]
) -> None:
    check_first_block(family, wanted=wanted)


@pytest.mark.long
def test_sampled_tokens_are_those_of_torch() -> None:
    """Temperature is drawn in the kernel; top-p makes the same request write its logits."""
    wishes = [
        SamplingParams(
            max_tokens=4, temperature=2.0, top_p=top_p, seed=6, ignore_eos=True,
            diffusion={"decoder": {"kind": "fixed", "steps": 2}},
        )
        for top_p in (1.0, 0.3)
    ]  # fmt: skip
    found = []
    for kernels in ("torch", "triton"):
        with DiffusionLLM(
            str(GOLDEN / "llada"), dtype="float32", device="cpu", kernels=kernels,
            mask_token_id=510, eos_token_id=511, max_num_seqs=2, max_model_len=64,
        ) as llm:  # fmt: skip
            # Each alone: a batch in which one writes its logits has all written.
            outputs = [llm.generate([5, 6, 7], each, use_tqdm=False)[0] for each in wishes]
            found.append([out.outputs[0].token_ids for out in outputs])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_kernels_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert choose_kernels("triton", CPU, torch.float32).name == "triton"
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(ValueError, match="do not support float64; choose a dtype of bfloat16"):
        choose_kernels("triton", CPU, torch.float64)
    with pytest.raises(ValueError, match="kernels is 'cuda'; expected one of auto, torch, triton"):
        choose_kernels("cuda", CPU, torch.float32)
    with pytest.raises(ValueError, match=r"the device is cpu; choose cuda, or .* TRITON_INTERPRET"):
        choose_kernels("triton", CPU, torch.float32)


def test_torch_s_kernels_run_for_those_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton import knobs

    monkeypatch.setattr(knobs.runtime, "interpret", True)
    for refused in (set(), {"attend", "settle"}):
        kernels = choose_kernels("triton", CPU, torch.float32, refused)
        pairs = zip(Kernels._fields, kernels, TORCH, strict=True)
        same = {name for name, ours, torchs in pairs if ours is torchs}
        assert same == refused | {"confidence_of_logits"}, "no kernel is for stored logits"


def test_auto_is_triton_where_it_is_installed_and_the_gpu_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda")
    assert choose_kernels("torch", CPU, torch.float32) is TORCH
    assert choose_kernels("auto", CPU, torch.float64) is TORCH
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert choose_kernels("auto", gpu, torch.float32) is TORCH
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    assert choose_kernels("auto", gpu, torch.float32).name == "triton"
    monkeypatch.setattr("diffray.kernels.choose.find_spec", lambda _name: None)
    assert choose_kernels("auto", gpu, torch.float32) is TORCH
    with pytest.raises(ValueError, match=r"is not installed; pip install 'diffray\[triton\]'"):
        choose_kernels("triton", CPU, torch.float32)
