"""Invalid and boundary values: each is refused in one sentence, or works."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.random_checkpoint import Shape, config_of
from diffray.cluster.cli.bench.datasets import read_rows
from diffray.cluster.cli.bench.sweep import counts
from diffray.cluster.cli.main import app
from diffray.components.backend import choose_device


def test_infinity_is_not_a_count() -> None:
    with pytest.raises(ValueError, match=r"must be whole numbers \(given: 1,inf\)"):
        counts("1,inf", "--max-concurrency")


def test_lines_that_are_not_conversations_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text('["no", {"conversations": [{"value": "yes"}, {"value": "then"}]}, {}]')
    assert [ask.prompt for ask in read_rows("sharegpt", file, 10)] == ["yes"]


@pytest.mark.parametrize("name", ["mps", "meta", "xpu:0"])
def test_a_device_that_is_not_served_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"device is '{name}'; expected auto, cpu, cuda or cuda:N"):
        choose_device(name)


@pytest.mark.parametrize("experts", [2, 4, 8, 12, 16, 64])
def test_groups_of_random_experts_have_the_two_that_judge_them(experts: int) -> None:
    config = config_of("llada2_moe", Shape(experts=experts))
    assert experts % config["n_group"] == 0
    assert experts // config["n_group"] >= 2


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("serve --gpu-memory-utilization 0.9", "--gpu-memory-utilization; --kv-cache-memory SIZE"),
        ("serve --gpu_memory_utilization=0.9", "--kv-cache-memory SIZE"),
        ("serve --dp 2", "--replicas N"),
        ("serve --pipeline-parallel-size 2", "--tensor-parallel-size N"),
        ("serve --trust-remote-code", "no code of a checkpoint is run"),
        ("generate --enforce-eager", "--no-cuda-graphs"),
    ],
)
def test_flags_of_other_servers_get_a_hint(typed: str, words: str) -> None:
    result = CliRunner().invoke(app, typed.split())
    assert result.exit_code == 2
    assert f"No such option: {typed.split()[1].partition('=')[0]}; " in result.stderr
    assert words in result.stderr


def test_a_hint_names_only_flags_that_the_command_has() -> None:
    result = CliRunner().invoke(app, ["generate", "--gpu-memory-utilization", "1"])
    assert "kv-cache-memory" not in result.stderr and "No such option" in result.stderr


@pytest.mark.parametrize(
    "flags",
    [
        "--max-model-len 4096 --max-num-seqs 8 --tensor-parallel-size 2 --dtype half",
        "--enable-prefix-caching --served-model-name mine --api-key key",
    ],
)
def test_flags_of_vllm_that_are_here_too(flags: str) -> None:
    result = CliRunner().invoke(app, ["serve", *flags.split(), "--print-config"])
    assert result.exit_code == 0, result.stderr


def test_a_model_in_the_wrong_place_is_told_where_it_goes() -> None:
    result = CliRunner().invoke(app, ["generate", "demo", "What is 12 plus 30?"])
    assert result.exit_code == 2
    assert "extra argument(s) (What is 12 plus 30?); the model goes after --model" in result.stderr
