"""Values that nobody means, and small sizes that somebody does: each is a sentence, or works."""

from pathlib import Path

import pytest

from benchmarks.random_checkpoint import Shape, llada2_moe_config
from diffray.cluster.cli.bench.datasets import read_rows
from diffray.cluster.cli.bench.sweep import counts
from diffray.components.backend import choose_device


def test_infinity_is_no_count() -> None:
    with pytest.raises(ValueError, match=r"must be whole numbers \(given: 1,inf\)"):
        counts("1,inf", "--max-concurrency")


def test_what_is_no_conversation_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text('["no", {"conversations": [{"value": "yes"}, {"value": "then"}]}, {}]')
    assert [ask.prompt for ask in read_rows("sharegpt", file, 10)] == ["yes"]


@pytest.mark.parametrize("name", ["mps", "meta", "xpu:0"])
def test_a_device_that_is_not_served_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{name}'; expected auto, cpu, cuda or cuda:N"):
        choose_device(name)


@pytest.mark.parametrize("experts", [2, 4, 8, 12, 16, 64])
def test_groups_of_random_experts_have_the_two_that_judge_them(experts: int) -> None:
    config = llada2_moe_config(Shape(experts=experts))
    assert experts % config["n_group"] == 0
    assert experts // config["n_group"] >= 2
