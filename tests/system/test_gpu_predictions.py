"""Predictions of a step: they list what is launched, and changes reach what they promise."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers import triton_device  # isort: skip  # noqa: F401
from triton.runtime.jit import KernelInterface

from benchmarks.gpu import predict
from benchmarks.gpu.choices import Expected
from benchmarks.gpu.costs import Step
from benchmarks.gpu.measure import noted_variants
from benchmarks.gpu.predict import (
    BUILT,
    CHANGES,
    MOE,
    STAGES,
    WEIGHTS,
    Generation,
    Parts,
    made_by,
    sizes,
    tables,
)
from benchmarks.gpu.random_model import config_of, quantization_of
from benchmarks.gpu.shapes import SHAPES, Shape, Work
from benchmarks.gpu.step import make_step
from diffray.components.experts import Experts
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model
from diffray.components.quantization import parse_quantization
from diffray.kernels.choose import TORCH, triton_kernels
from diffray.kernels.variants import UNTRIED, Choices
from tests.helpers.paths import ROOT

SHAPE, DENSE = SHAPES[MOE], "llada-8b"
ONE, BATCH = Work(1, 64, 1024), Work(32, 64, 1024)
ALL = STAGES["all"]
# They launch nothing.
VIEWS = set("empty empty_like new_empty slice split t unbind unsqueeze view".split())


@pytest.mark.parametrize("choices", [UNTRIED, Expected({})], ids=["defaults", "expected"])
@pytest.mark.parametrize("rows", [1, 32])
@pytest.mark.parametrize(
    ("name", "weights"),
    [*((name, "bfloat16") for name in SHAPES), *((DENSE, weights) for weights in WEIGHTS[1:])],
)
def test_a_step_launches_what_is_predicted(
    name: str, weights: str, rows: int, choices: Choices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the changes that those variants make that ran."""
    launched: Counter[str] = Counter()

    def note(kernel: Any, _grid: object) -> Callable[..., None]:
        launched[kernel.fn.__name__] += 1
        return lambda *_, **__: None

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            launched[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(KernelInterface, "__getitem__", note)
    work = Work(rows, SHAPES[name].block or 64, 1024)
    with noted_variants() as ran:
        how = torch.device("meta"), triton_kernels(choices), "bfloat16", weights
        step = make_step(SHAPES[name], work, *how)
        assert step.batch.windows.paged.max_queries == work.window  # prepared on the host
        launched.clear()
        with Operations():  # type: ignore[no-untyped-call]  # torch's
            step.run()
    predicted: Counter[str] = Counter()
    for kernel in Step(SHAPES[name], work, weights, changes=made_by(ran)).kernels:
        predicted[kernel.name.split()[0]] += kernel.calls
    assert {op: count for op, count in launched.items() if op not in VIEWS} == predicted


@pytest.mark.parametrize(
    ("name", "weights"), [*((name, "bfloat16") for name in SHAPES), (DENSE, "int8")]
)
def test_the_floor_is_of_the_bytes_of_the_published_models(name: str, weights: str) -> None:
    shape, work = SHAPES[name], Work(1, 64, 64)
    model = build_model(config_of(shape, 64), Mesh(), torch.bfloat16, TORCH)
    if (quantized := quantization_of(shape, weights)) is not None:
        model.quantize(parse_quantization(quantized))
    read = sum(p.nbytes for p in model.parameters()) - model.embedding.weight_VH.nbytes
    for module in model.modules():
        if isinstance(module, Experts) and shape.sparse is not None:
            share = shape.distinct_experts(work.tokens) / shape.sparse.experts
            read -= int((1 - share) * sum(p.nbytes for p in module.parameters()))
    predicted = sum(kernel.calls * kernel.bytes for kernel in Step(shape, work, weights).kernels)
    # Activations are moved too, and float32 parts of products with matrices in bytes.
    assert read < predicted < (1.07 if weights == "bfloat16" else 1.15) * read


def test_no_prediction_is_below_its_floor() -> None:
    for _, _, _, _, floor, *stages in sizes()[1:]:
        assert all(float(floor) < float(ms) for ms in stages)


def test_a_dense_model_in_bytes_gains_of_few_rows_and_in_float8_products_of_many() -> None:
    """Of many rows a product that widens each weight again is slower than bfloat16's."""

    def gains(work: Work) -> list[float]:
        plain, *others = (Step(SHAPES[DENSE], work, kind, changes=ALL).ms for kind in WEIGHTS)
        return [plain / ms for ms in others]

    assert WEIGHTS == ("bfloat16", "float8", "float8_rows", "int8")
    assert all(gain > 1.3 for gain in gains(ONE))
    float8, rows, int8 = gains(BATCH)
    assert float8 < 0.9 and int8 < 0.9 and rows > 1.4


@pytest.mark.parametrize(
    ("step", "ms"),
    [
        (Step(SHAPE, ONE), 4.5),
        (Step(SHAPE, ONE, "float8"), 3.2),
        (Step(SHAPE, ONE, "int8"), 3.0),
        (Step(SHAPE, Work(8, 64, 1024)), 6.5),
        (Step(SHAPE, Work(32, 64, 1024)), 20),
        (Step(SHAPE, Work(1, 1152, 1152), read=64), 12),
        (Step(SHAPE, Work(32, 1152, 1152), read=2048), 270),
    ],
)
def test_before_any_change_it_is_what_was_estimated_by_hand(step: Step, ms: float) -> None:
    assert step.ms == pytest.approx(ms, rel=0.06)
    assert step.floor_ms() < step.ms


def test_float8_rows_gain_where_many_meet_an_expert() -> None:
    """Of few rows reading weights takes the time, and rounding is added to it."""
    few, many = (
        [Step(SHAPE, work, weights, changes=ALL) for weights in ("float8", "float8_rows")]
        for work in (ONE, Work(32, 64, 1024))
    )
    assert few[0].ms < few[1].ms < 1.2 * few[0].ms
    assert many[1].ms < 0.9 * many[0].ms


def test_eight_ranks_without_graphs_wait_for_the_host() -> None:
    step = Step(SHAPE, ONE, ranks=8)
    assert 4 < step.ms == step.host_ms < 6.5 and step.device_ms == pytest.approx(2.4, rel=0.06)
    changed = Step(SHAPE, ONE, ranks=8, changes=frozenset({"graphs over ranks"}))
    assert changed.ms == step.device_ms


def test_what_is_built_reaches_the_targets() -> None:
    built = STAGES["built"]
    assert Step(SHAPE, ONE, changes=built).ms <= 3.8
    assert Step(SHAPE, ONE, "float8", changes=built).ms <= 2.9
    assert Step(SHAPE, ONE, ranks=8, changes=built).ms <= 2.2
    assert 32 * Step(SHAPE, ONE, changes=built).ms >= 8 * Step(SHAPE, BATCH, changes=built).ms


def test_the_document_shows_what_batch_32_is_to_batch_1_by_each_reading() -> None:
    """Of steps it is reached with what is built, of whole texts not."""
    built, before = STAGES["built"], Generation().tokens_per_s(SHAPE, STAGES["no change"])

    def readings(weights: str) -> Iterator[float]:
        one, many = (Step(SHAPE, work, weights, changes=built) for work in (ONE, BATCH))
        yield 32 * one.ms / many.ms
        texts = [
            [
                Generation(n, cache=cache, weights=weights).tokens_per_s(SHAPE, built)
                for n in (1, 32)
            ]
            for cache in ("dual", "vicinity")
        ]
        yield from (many / one for one, many in texts)
        yield from (many / before for _, many in texts)

    shown = (ROOT / "docs/gpu.md").read_text().partition("| batch 32 to batch 1 |")[2]
    for line, weights in zip(shown.splitlines()[2:4], ("bfloat16", "float8_rows"), strict=True):
        numbers = [float(cell) for cell in re.findall(r" ([\d.]+) \|", line)]
        assert numbers == [round(reading, 1) for reading in readings(weights)]


def test_no_order_of_steps_brings_texts_of_batch_32_to_8_times_batch_1() -> None:
    """By the bounds that the document gives."""

    def parts(cache: str) -> tuple[Parts, Parts]:
        one, many = (Generation(n, cache=cache).parts_ms(SHAPE, BUILT) for n in (1, 32))
        return one, many

    one, many = parts("dual")
    most = 32 * sum(one) / 8 - many.blocks - many.between
    assert most / Generation().over_everything == pytest.approx(69, abs=0.5)
    kernels = Step(SHAPE, Work(32, 1152, 1152), changes=BUILT, read=1368).kernels
    operations = sum(kernel.calls * kernel.flops for kernel in kernels)
    assert operations / 989e9 == pytest.approx(87, abs=0.5)
    # Two texts run everything in each step, as much as 18 blocks, and the others one.
    spread = Step(SHAPE, Work(2 * 18 + 30, 64, 1152), changes=BUILT, read=1368)
    assert 265 * spread.ms + many.between == pytest.approx(6600, abs=50)
    assert sum(many) == pytest.approx(6200, abs=50)
    one, many = parts("vicinity")
    left = 32 * (one.blocks + one.between) / (many.blocks + many.between)
    assert left == pytest.approx(7.4, abs=0.05)


def test_all_changes_together_reach_the_targets() -> None:
    assert Step(SHAPE, ONE, changes=ALL).ms <= 3.8
    assert Step(SHAPE, ONE, "float8", changes=ALL).ms <= 2.9
    assert Step(SHAPE, ONE, ranks=8, changes=ALL).ms <= 2.2
    # Each change for several ranks is needed for theirs.
    for name in ("graphs over ranks", "one-shot all-reduce", "packed gather"):
        assert (
            Step(SHAPE, ONE, ranks=8, changes=ALL - {name}).ms
            > Step(SHAPE, ONE, ranks=8, changes=ALL).ms
        )


@pytest.mark.parametrize("name", CHANGES)
def test_without_one_of_the_changes_something_is_slower(name: str) -> None:
    saved = [
        Step(shape, work, weights, ranks, ALL - {name}, hot=0.25).ms
        - Step(shape, work, weights, ranks, ALL, hot=0.25).ms
        for shape in (SHAPE, SHAPES[DENSE])
        for work in (ONE, Work(32, 64, 1024))
        for weights in ("bfloat16", "float8", "float8_rows")
        for ranks in (1, 8)
    ]
    text = Generation(cache="vicinity", decoder="credit")
    gained = text.tokens_per_s(SHAPE, ALL) - text.tokens_per_s(SHAPE, ALL - {name})
    assert max(*saved, gained) > 0.001


def test_the_document_shows_the_predictions_and_what_is_measured() -> None:
    begin = "<!-- python -m benchmarks.gpu.predict --markdown -->\n"
    shown = (ROOT / "docs/gpu.md").read_text().partition(begin)[2].partition("\n<!-- end -->")[0]
    predicted = tables(MOE, 1, "bfloat16", 1, markdown=True)
    for line, ours in zip(shown.splitlines(), predicted.splitlines(), strict=True):
        *cells, measured = line.removesuffix(" |").split(" | ")
        if ours.endswith("| unmeasured |"):
            assert " | ".join([*cells, "unmeasured |"]) == ours
            assert re.fullmatch(r"unmeasured|[\d.]+", measured)
        else:
            assert line == ours


def test_the_document_shows_what_each_variant_saves() -> None:
    """A step's ms, or a text's tokens per second, without and with it, in the table's order."""
    dense = SHAPES[DENSE]
    staying = {"persistent blocks", "experts in the cache"}

    def row(
        names: str | set[str],
        shape: Shape = SHAPE,
        work: Work = ONE,
        weights: str = "bfloat16",
        ranks: int = 1,
        hot: float = 0.0,
    ) -> list[float]:
        less = BUILT - ({names} if isinstance(names, str) else names)
        steps = (Step(shape, work, weights, ranks, made, hot=hot) for made in (less, BUILT))
        return [round(step.ms, 2) for step in steps]

    def text(name: str, **more: Any) -> list[float]:
        texts = (Generation(**more).tokens_per_s(SHAPE, c) for c in (BUILT - {name}, BUILT))
        return [round(speed) for speed in texts]

    predicted = [
        row("64 rows", hot=0.25),
        row("router kernels"),
        row("larger pair chunks", SHAPE, BATCH),
        row("dependent launch"),
        row("sum and norm"),
        row("shorter splits"),
        row(staying),
        row(staying, SHAPE, ONE, "float8"),
        row("own output product"),
        row("wide head tiles"),
        row("float16 activations", SHAPE, ONE, "float8"),
        row("large tiles", SHAPE, BATCH),
        row("wide byte tiles", dense, ONE, "int8"),
        row("wide byte tiles", dense, ONE, "float8"),
        row("float8 products", dense, BATCH, "float8_rows"),
        row("float8 products", SHAPE, BATCH, "float8_rows"),
        row("head by cuBLAS", SHAPE, BATCH),
        text("one kernel to settle"),
        text("credit's kernels", decoder="credit"),
        row("graphs over ranks", SHAPE, ONE, ranks=8),
        row("one-shot all-reduce", SHAPE, ONE, ranks=8),
        row("packed gather", SHAPE, ONE, ranks=8),
        text("bucket with neighbours", cache="vicinity", rows=32),
    ]
    table = (ROOT / "docs/gpu.md").read_text().partition("| variant | kernel: ")[2]
    cells = (line.split("|") for line in table.partition("\n\n")[0].splitlines()[2:])
    shown = [[*map(float, row[4:6])] for row in cells if row[3] != " not predicted "]
    assert shown == predicted


def test_the_changes_are_those_that_the_variants_make() -> None:
    always = made_by({})
    assert {"larger pair chunks", "packed gather", "bucket with neighbours"} <= always
    ran = {
        "experts_add_norm/64/64": "triton fused stay pdl 64x64x64 w4 s4",
        "attend/64": "triton 64 keys pdl 64x64x128 w4 s3",
        "linear_add_norm/64": "triton",
        "linear_add_norm/2048": "torch",
        "softmax_router/64": "triton",
        "settle/1": "torch",
    }
    assert made_by(ran) - always == {
        "64 rows",
        "sum and norm",
        "shorter splits",
        "persistent blocks",
        "experts in the cache",
    }
    ran["rms_norm/64"] = "triton pdl"  # half of them start early now, but for the settled one
    assert "dependent launch" not in made_by(ran)
    del ran["linear_add_norm/2048"]
    assert "dependent launch" in made_by(ran)


def test_a_change_is_built_once_the_code_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "ROOT", tmp_path)
    assert not any(change.built for change in CHANGES.values())
    change = CHANGES["one-shot all-reduce"]
    file, text = change.sign.split(": ", 1)
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(f"import {text}\n")
    assert change.built
