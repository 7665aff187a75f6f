"""The ablation script: what a setting may hold, and what its table says of it."""

import sys
from pathlib import Path

import pytest

from benchmarks import ablate, random_checkpoint
from tests.helpers.paths import GOLDEN

SMALL = "--repeats 1 --cpu-time --requests 2 --input-len 32 --output-len 32".split()


def rows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str | Path
) -> list[dict[str, str]]:
    """Run the script; return the cells of each row, by their columns."""
    monkeypatch.setattr(sys, "argv", ["ablate", *SMALL, *map(str, words)])
    ablate.main()
    _, head, _, *body = capsys.readouterr().out.splitlines()
    names, *cells = ([cell.strip() for cell in line.split("|")[1:-1]] for line in [head, *body])
    return [dict(zip(names, each, strict=True)) for each in cells]


@pytest.fixture
def tiny(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A random LLaDA2 with one adapter."""
    sizes = "--layout llada2_moe --hidden 32 --layers 2 --heads 2 --kv-heads 2 --mlp 64"
    rest = f"--experts 4 --expert-mlp 16 --vocab 80 --adapters 1 {tmp_path}"
    monkeypatch.setattr(sys, "argv", ["random_checkpoint", *sizes.split(), *rest.split()])
    random_checkpoint.main()
    capsys.readouterr()
    return tmp_path


def test_settings_of_requests_and_engines_are_compared_with_the_first(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = tiny, "--common", "32", "--at-once", "1", "--all", "block_length=32"
    fixed = "decoder=fixed decoder.steps=32 at_once=2"
    alone = "enable_prefix_caching=false"
    found = rows(capsys, monkeypatch, *options, "", fixed, alone)
    first, slow, apart = found
    assert [each["setting"] for each in found] == ["defaults", f"`{fixed}`", f"`{alone}`"]
    assert first["to the first"] == "1.00 (1.00 to 1.00)"
    assert (first["equal"], apart["equal"]) == ("2/2", "2/2")
    assert (apart["cached"], slow["forwards"]) == ("0%", str(2 * 32))
    assert int(first["cached"].rstrip("%")) > 0
    assert int(first["forwards"]) < 2 * 32


def test_adapters_go_round_the_requests(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = f'lora_modules={{"a":"{tiny}/adapter-0"}}'
    found = rows(capsys, monkeypatch, tiny, "--all", adapters, "", 'lora=["a",""]')
    assert [each["equal"] for each in found] == ["2/2", "1/2"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("quantisation=int8", "did you mean 'quantization'"),
        ("decoder.threshold=0.7", "diffusion.decoder: a 'kind' is needed"),
        ("structured_outputs.json=@/gone.json", "/gone.json"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(
    setting: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit):
        rows(capsys, monkeypatch, GOLDEN / "llada", "", setting)
    assert reason in capsys.readouterr().err.splitlines()[-1]


def test_prompts_of_data_sets_are_answered_to_their_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--data chat,demo --at-once 1 --output-len 64".split()
    first, again = rows(capsys, monkeypatch, "demo", *options, "", "cache=prefix")
    assert (first["equal"], first["slowest to the first"]) == ("2/2", "1.00")
    assert float(again["slowest to the first"]) > 0
