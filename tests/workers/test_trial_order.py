"""Variants that are expected to win are tried first, in the order of what they are to gain."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers import triton_device  # isort: skip  # noqa: F401
from triton.runtime.jit import KernelInterface

from benchmarks.gpu.costs import Step
from benchmarks.gpu.predict import MOE, STAGES
from benchmarks.gpu.random_model import config_of
from benchmarks.gpu.shapes import SHAPES, Work
from diffray.kernels.triton import launch, table
from diffray.kernels.variants import Kernel
from diffray.workers.bring_up import sum_trial, trials
from diffray.workers.bring_up.one_layer import OneLayer, Sizes
from diffray.workers.bring_up.trial_order import EXPECTED, rank
from diffray.workers.bring_up.trial_process import Calls, Trial, collecting, trials_of
from tests.helpers.paths import ROOT


def as_its_default(kernel: Kernel) -> Kernel:
    """Return a kernel whose reference launches what the default does, which needs no values."""

    def run(*args: Any, **options: Any) -> Any:
        return kernel.variants(*args, **options)[0].run(*args, **options)

    return replace(kernel, reference=run)


@pytest.fixture
def of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Trial]]:
    """List the trials of a published model as on a GPU that starts kernels early."""
    monkeypatch.setattr(launch, "can_overlap", lambda: True)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda *_: lambda *_, **__: None)

    def listed(quantization: str | None = None) -> list[Trial]:
        calls: Calls = {}
        config = config_of(SHAPES[MOE], 4096)
        sizes = Sizes(config=config, dtype="bfloat16", quantization=quantization)
        kernels = collecting([*map(as_its_default, table.KERNELS)], calls)
        OneLayer(sizes, torch.device("meta"), kernels).run()
        return trials_of(calls, ())

    return listed


def named(trial: Trial) -> str:
    return f"{trial.begin.kernel} {trial.variant.name}"


def is_expected(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in EXPECTED)


@pytest.mark.parametrize("quantization", [None, "experts_fp8", "experts=w8a8_fp8"])
def test_expected_winners_are_tried_before_anything_but_torch(
    quantization: str | None, of_a_gpu: Callable[..., list[Trial]]
) -> None:
    tried = of_a_gpu(quantization)
    names = [named(trial) for trial in tried if not trial.needed]
    assert [trial.needed for trial in tried] == sorted((t.needed for t in tried), reverse=True)
    expected = [is_expected(name) for name in names]
    count = sum(expected)
    assert 20 < count < len(tried) / 3 and all(expected[:count])
    defaults = [t.default for t in tried if not t.needed and not is_expected(named(t))]
    assert defaults == sorted(defaults, reverse=True)


def test_the_head_takes_no_more_trials_than_the_experts(
    of_a_gpu: Callable[..., list[Trial]],
) -> None:
    """Its eleven calls of a model, best and drawn, had 394 of 650 trials."""
    kernels = [trial.begin.kernel for trial in of_a_gpu()]
    assert kernels.count("confidence") <= kernels.count("experts_add_norm")
    assert len(kernels) < 420


OF_EXPERTS = {
    "large tiles": "experts_forward triton pdl 128x128x64 w8 s3",
    "float8 products": "float8_experts_forward scaled_grouped_mm pdl",
    "head by cuBLAS": "confidence triton after product pdl",
    "64 rows": "experts_forward triton pdl 64x64x64 w4 s4",
    "persistent blocks": "experts_add_norm triton fused stay pdl 64x64x64 w4 s4",
    "router kernels": "softmax_router triton fused pdl",
    "own output product": "linear_add_norm triton fused pdl",
    "shorter splits": "attend triton 128 keys pdl 64x64x128 w4 s3",
    "wide head tiles": "confidence triton pdl 64x256x64 w8 s3",
}
OF_DENSE = {
    "float8 products": "quantized_linear scaled_mm pdl",
    "head by cuBLAS": "confidence triton after product pdl",
    "wide byte tiles": "quantized_linear triton half pdl 64x128x128 w8 s3",
    "own output product": "linear_add_norm triton fused pdl",
    "wide head tiles": "confidence triton pdl 64x256x64 w8 s3",
}


@pytest.mark.parametrize(("name", "changes"), [(MOE, OF_EXPERTS), ("llada-8b", OF_DENSE)])
def test_the_order_is_that_of_the_predicted_gains(name: str, changes: dict[str, str]) -> None:
    """Of the change that a variant makes, wherever it gains most."""
    built = STAGES["built"]

    def gain(change: str) -> float:
        return max(
            Step(SHAPES[name], work, weights, 1, built - {change}, hot=0.25).ms
            - Step(SHAPES[name], work, weights, 1, built, hot=0.25).ms
            for work in (Work(1, 64, 1024), Work(32, 64, 1024))
            for weights in ("bfloat16", "float8", "float8_rows")
        )

    by_gain = sorted(changes, key=gain, reverse=True)
    by_rank = sorted(changes, key=lambda each: rank(*changes[each].split(" ", 1), index=9))
    assert by_rank == by_gain


def test_each_variant_that_the_document_names_is_expected() -> None:
    text = (ROOT / "docs/gpu.md").read_text()
    rows = text.partition("| variant | kernel: registers")[2].partition("\n\n")[0]
    predicted = re.findall(
        r"^\| [^|]*`((?:triton|scaled)[^`]*)`[^|]*\|[^|]*\|[^|]*\| \d", rows, re.M
    )
    kernels = [kernel.name for kernel in table.KERNELS]
    assert len(predicted) > 10
    for variant in predicted:
        assert any(is_expected(f"{kernel} {variant}") for kernel in kernels), variant


def test_all_trials_of_a_start_take_less_than_a_minute() -> None:
    """Two processes may have to be ended, of the kernels' trials and of the ranks'."""
    alone, before = trials.TimeLimits(), trials.BEFORE_THE_GROUP
    assert alone.budget + alone.trial < alone.limit
    assert alone.limit + 3 * trials._ENDING_S < 60
    assert before.limit + sum_trial.PATIENCE_S + 6 * trials._ENDING_S < 60
