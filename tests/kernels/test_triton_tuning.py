"""Tiles are measured once for each shape, kept in a file, and never trusted blindly."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.helpers.triton_device import DEVICE  # isort: skip
import triton
from triton.runtime.errors import OutOfResources

from diffray.kernels.experts import experts_forward as plain
from diffray.kernels.triton.experts import experts_forward
from diffray.kernels.triton.tuning import Tile, Tuner, cache_folder, file_name

DEFAULT = Tile(16, 64, 128, 4, 3)
FAST, SLOW, FULL = (DEFAULT._replace(columns=columns) for columns in (32, 128, 256))
GPU = "NVIDIA Test 9000"


def clock(run: Callable[[], object]) -> float:
    """Pretend: a tile's columns are its seconds; of 256 there is not enough memory."""
    tile = run()
    assert isinstance(tile, Tile)
    if tile == FULL:
        raise OutOfResources(300, 200, "shared memory")
    return float(tile.columns)


def pick(tuner: Tuner, shape: tuple[int | str, ...] = (8, "bfloat16")) -> Tile:
    return tuner.pick("experts", shape, DEFAULT, lambda: [FULL, SLOW, FAST], lambda tile: tile)


def test_what_was_measured_once_is_looked_up_by_all_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "tiles.json"
    tuner = Tuner(path, GPU)
    assert pick(tuner) == DEFAULT  # nothing is measured unasked
    with tuner.measuring(clock):
        assert pick(tuner) == FAST
    assert pick(tuner) == pick(Tuner(path, GPU)) == FAST
    assert pick(Tuner(path, GPU), (9, "bfloat16")) == DEFAULT
    assert [file.name for file in path.parent.iterdir()] == ["tiles.json"]  # nothing half-written


def test_a_known_shape_is_not_measured_again(tmp_path: Path) -> None:
    tuner = Tuner(tmp_path / "tiles.json", GPU)

    def never(run: Callable[[], object]) -> float:
        raise AssertionError("measured again")

    with tuner.measuring(clock):
        pick(tuner)
    with tuner.measuring(never):
        assert pick(tuner) == FAST


def content(gpu: str, version: str, tiles: object) -> str:
    return json.dumps({"gpu": gpu, "triton": version, "tiles": tiles})


KNOWN = {"experts/8/bfloat16": list(SLOW)}


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", '{"gpu": 1}', "\0\xff",
        content(GPU, "0.1", KNOWN),
        content("Other", triton.__version__, KNOWN),
        content(GPU, triton.__version__, {"experts/8/bfloat16": [1]}),
        content(GPU, triton.__version__, {"experts/8/bfloat16": [0] * 5}),
        content(GPU, triton.__version__, {"experts/8/bfloat16": [1.5] * 5}),
        content(GPU, triton.__version__, ["experts"]),
    ],
)  # fmt: skip
def test_a_file_that_is_damaged_or_of_another_is_ignored_and_replaced(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "tiles.json"
    path.write_text(text)
    tuner = Tuner(path, GPU)
    assert pick(tuner) == DEFAULT
    with tuner.measuring(clock):
        assert pick(tuner) == FAST
    found = json.loads(path.read_text())
    assert found["tiles"] == {"experts/8/bfloat16": list(FAST)}
    assert (found["gpu"], found["triton"]) == (GPU, triton.__version__)


def test_two_who_measure_keep_each_other_s_tiles(tmp_path: Path) -> None:
    path = tmp_path / "tiles.json"
    one, other = Tuner(path, GPU), Tuner(path, GPU)
    for tuner, shape in ((one, (1,)), (other, (2,))):
        with tuner.measuring(clock):
            pick(tuner, shape)
    assert pick(Tuner(path, GPU), (1,)) == pick(Tuner(path, GPU), (2,)) == FAST


def test_files_stand_in_the_user_s_cache_by_gpu_and_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "diffray/tiles"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/diffray/tiles"
    version = triton.__version__
    assert file_name("NVIDIA H200 (SXM)") == f"nvidia-h200-sxm-triton-{version}.json"
    assert pick(Tuner.of_device(torch.device("cpu"))) == DEFAULT


def test_kernels_run_with_the_tile_that_was_picked() -> None:
    """Any tile computes the same; the tuner sees each and its choice is what runs."""
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(4, 16), torch.randn(3, 32, 16), torch.randn(3, 16, 16)
    weights, ids = torch.rand(4, 3).topk(2)
    x, w13, w2, ids, weights = (part.to(DEVICE) for part in (x, w13, w2, ids, weights))
    seen: list[Tile] = []

    class Other(Tuner):
        def pick(self, kernel, shape, default, others, run):  # type: ignore[no-untyped-def]
            seen.extend([default, others()[0]])
            return default._replace(columns=16, depth=16)

    run = partial(experts_forward, x, w13, w2, ids, weights)
    torch.testing.assert_close(run(tuner=Other()), run(), atol=1e-4, rtol=1e-4)
    assert len(set(seen)) == 2


@pytest.mark.parametrize(
    ("dtype", "hidden", "tried"),
    [(torch.bfloat16, 16, True), (torch.bfloat16, 8, False), (torch.float32, 16, False)],
)
def test_torch_s_grouped_product_is_among_what_is_tried(
    dtype: torch.dtype, hidden: int, tried: bool
) -> None:
    """It is a kernel in bfloat16 alone, of rows of 16 numbers; elsewhere it waits for the host."""
    torch.manual_seed(0)
    x, w13, w2 = torch.randn(4, hidden), torch.randn(3, 32, hidden), torch.randn(3, hidden, 16)
    x, w13, w2 = (part.to(DEVICE, dtype) for part in (x, w13, w2))
    weights, ids = torch.rand(4, 3).to(DEVICE).topk(2)
    seconds = iter([1.0, 0.0])

    def second_wins(run: Callable[[], object]) -> float:
        """Pretend that the second to be tried is the fastest."""
        return next(seconds, 2.0)

    tuner = Tuner()
    with tuner.measuring(second_wins):
        found = experts_forward(x, w13, w2, ids, weights, tuner)
    (chosen,) = tuner._tiles.values()
    assert any(chosen) is not tried
    if tried:
        assert torch.equal(found, plain(x, w13, w2, ids, weights))
        assert torch.equal(experts_forward(x, w13, w2, ids, weights, tuner), found)
