"""A start runs a full batch: it fits, or the start is refused in one sentence."""

from typing import Any

import pytest
import torch

from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.workers.engine_options import EngineOptions
from diffray.workers.full_batch import try_full_batch
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers.paths import GOLDEN
from tests.helpers.resuming import updates_of

SIZES = {"diffusion_gemma": 8, "llada": 5, "llada2_moe": 16, "ar_llama": 64}


def engine(name: str, **options: Any) -> Any:
    masks = {} if name in ("diffusion_gemma", "ar_llama") else {"mask_token_id": 510}
    setup = EngineOptions(
        max_num_seqs=SIZES[name], device="cpu", eos_token_id=511, **masks, **options
    )
    return build_rank(str(GOLDEN / name), setup, Mesh())


@pytest.mark.parametrize("name", SIZES)
def test_all_run_at_once_and_nothing_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, at_once = engine(name), list[int]()

    def counting(x_TH: torch.Tensor, *args: Any) -> torch.Tensor:
        at_once.append(len(made.running))
        return torch.zeros_like(x_TH)

    before = made.stats()
    monkeypatch.setattr(made.model, "forward", counting)
    try_full_batch(made)
    monkeypatch.undo()
    assert at_once == [SIZES[name]]
    assert made.idle and made.stats() == before
    request = Request(0, (5, 6, 7), SamplingParams(max_tokens=9, ignore_eos=True))
    assert updates_of(made, [request], 1) == updates_of(engine(name), [request], 1)


def test_a_device_that_is_too_small_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine("diffusion_gemma")

    def out_of_memory(*args: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(made.model, "head", out_of_memory)
    with pytest.raises(RuntimeError, match=r"no memory for a full batch of 8 .* lower"):
        try_full_batch(made)
    assert made.idle


def test_the_published_batch_of_eight_canvases_runs() -> None:
    """vLLM's DiffusionGemma ran out of memory at the first of these."""
    made = engine("diffusion_gemma")
    params = SamplingParams(max_tokens=70, ignore_eos=True, temperature=1)
    found = updates_of(made, [Request(uid, (5, 6, uid), params) for uid in range(8)], 3)
    assert sum(len(update.ids) for update in found) == 8 * 70
