"""Tiles are tried for the shapes that an engine is about to record, and change no token."""

from collections.abc import Callable

import pytest

from tests.helpers.triton_device import DEVICE  # isort: skip
from diffray import DiffusionLLM, SamplingParams
from diffray.kernels.triton.tuning import Tile
from diffray.workers.graphs import buckets_for
from diffray.workers.tune import tune
from tests.helpers.paths import GOLDEN


@pytest.mark.long
@pytest.mark.parametrize("family", ["llada_moe", "llada2_moe"])
def test_tiles_are_tried_for_every_bucket_and_tokens_stay(family: str) -> None:
    tried: list[float] = []

    def clock(run: Callable[[], object]) -> float:
        """Pretend: the later the faster; so that tiles change, the default is never the best."""
        if not tried:
            run()
        tried.append(0)
        return -len(tried)

    policy = {"block_length": 8, "decoder": {"kind": "fixed", "steps": 2}}
    params = SamplingParams(max_tokens=8, ignore_eos=True, diffusion=policy)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12]]
    with DiffusionLLM(
        str(GOLDEN / family), dtype="float32", kernels="triton", device=str(DEVICE),
        mask_token_id=510, eos_token_id=511, max_num_seqs=1, max_model_len=16,
    ) as llm:  # fmt: skip
        engine = llm.engine
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
        tuner = engine.kv.kernels.tuner
        assert tuner is not None and not tuner._tiles
        tune(engine.model, engine.kv, engine.slots, buckets_for(1, 8), 16, seconds=clock)
        kernels = {key.split("/")[0] for key in tuner._tiles}
        assert kernels == {"attention", "experts", "confidence"}
        assert len(tried) > len(tuner._tiles) >= 3
        assert any(isinstance(tile, Tile) for tile in tuner._tiles.values())
        assert not engine.slots.ids_SN.any()
        found = [out.outputs[0].token_ids for out in llm.generate(prompts, params)]
    assert found == expected


def test_without_a_gpu_it_is_refused() -> None:
    with pytest.raises(ValueError, match="tune_kernels needs Triton's kernels on a CUDA device"):
        DiffusionLLM(str(GOLDEN / "llada"), device="cpu", tune_kernels=True)
