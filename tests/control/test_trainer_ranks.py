"""New weights from a trainer for two ranks of a Ray, and for those that come after them."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from diffray import DiffusionLLM
from tests.helpers.short_answers import ids
from tests.helpers.tiny_checkpoints import LLADA, random_weights, save, shifted
from tests.helpers.trainer import Trainer, listing

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("shared_ray")]

OPTIONS: dict[str, Any] = {"dtype": "float64", "device": "cpu"}


def test_two_ranks_and_those_after_them_have_what_was_sent(tmp_path: Path) -> None:
    old = save(tmp_path / "old", LLADA, random_weights(LLADA))
    new = save(tmp_path / "new", LLADA, shifted(LLADA))
    with DiffusionLLM(str(old), **OPTIONS) as before, DiffusionLLM(str(new), **OPTIONS) as after:
        expected = ids(before), ids(after)
    (file,) = new.glob("*.safetensors")
    root = tmp_path / "received"
    with DiffusionLLM(
        str(old), tensor_parallel_size=2, received_weights=str(root), **OPTIONS
    ) as llm:
        for last in (0, 3):  # it hangs, it dies
            with Trainer(file, 3, last) as trainer:
                join = {**trainer.group, "rank_offset": 1, "world_size": 3}
                llm.init_weights_update_group(**join, timeout_s=5)
                with pytest.raises(ValueError, match="did not arrive, so the old ones stay"):
                    llm.update_weights_from_distributed(**listing(trainer.tensors))
            assert ids(llm) == expected[0] and list(root.iterdir()) == []
        with Trainer(file, 3) as trainer:
            llm.init_weights_update_group(**trainer.group, rank_offset=1, world_size=3)
            told = listing(trainer.tensors)
            wrong = told | {"names": ["tail", *told["names"][1:]]}
            with pytest.raises(ValueError, match="1 unexpected: tail"):
                llm.update_weights_from_distributed(**wrong)
            assert llm.update_weights_from_distributed(**told) == "1"
            assert ids(llm) == expected[1]
            *_, rank = pids(llm)
            os.kill(rank, signal.SIGKILL)
            assert ids(llm) == expected[1]
            with pytest.raises(ValueError, match="ranks were replaced; create it again"):
                llm.update_weights_from_distributed(**told)
            assert ids(llm) == expected[1]


def pids(llm: DiffusionLLM) -> list[int]:
    client: Any = llm.client
    found: list[int] = client._wait(client._engine.pids())
    return found
