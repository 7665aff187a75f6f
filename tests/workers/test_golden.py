"""Token for token what the original systems generate, on tiny checkpoints in their layouts."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.golden import (
    EOS,
    FAMILIES,
    MASK,
    MASKED,
    Case,
    adapters_of,
    cases_of,
    described,
    differences,
    golden,
    images_of,
    main,
    params_of,
)
from benchmarks.mix_rule import by_rule
from diffray import DiffusionLLM, SamplingParams
from tests.helpers.paths import GOLDEN


@cache
def model(family: str, dtype: str) -> DiffusionLLM:
    ids: dict[str, Any] = {"mask_token_id": mask(family), "eos_token_id": EOS}
    adapters = adapters_of(GOLDEN / family)
    return DiffusionLLM(
        str(GOLDEN / family), dtype=dtype, max_num_seqs=64, lora_modules=adapters, **ids
    )


def mask(family: str) -> int | None:
    """Return the mask token, where there is one."""
    return MASK if FAMILIES[family] in MASKED else None


def shortest_of_each(cases: list[Case]) -> list[Case]:
    """Return one case for each decoder and cache, with and without what else there is."""
    longest_first = sorted(cases, key=lambda case: (-case["gen_length"], -case.get("forwards", 0)))
    found = {
        (case["decoder"], case["cache"], "image" in case, case.get("draft_lora")): case
        for case in longest_first
    }
    return list(found.values())


def unequal(family: str, dtype: str, cases: list[Case]) -> list[Any]:
    """Run cases of a family in one batch; return what differs, also more forwards."""
    found = differences(model(family, dtype), cases, images_of(golden(FAMILIES[family])))
    return [(what, described(cases[number])) for number, what in found.items()]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_originals(family: str) -> None:
    assert unequal(family, "float64", shortest_of_each(cases_of(FAMILIES[family]))) == []


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.rotate(6)
def test_all_tokens_equal_the_originals(family: str, dtype: str) -> None:
    assert unequal(family, dtype, cases_of(FAMILIES[family])) == []


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.long)])
@pytest.mark.rotate(2)
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llada", "llada_factor"),  # Fast-dLLM's dynamic rule, with its three caches
        ("llada", "llada_end_tokens"),  # LLaDA's two options against early end tokens
        ("llada2_moe", "llada2_steps"),  # LLaDA2's threshold and schedule together
        ("llada2_moe", "llada2_edit/golden"),  # LLaDA2.1's editing
    ],
)
def test_tokens_equal_the_originals_for_one_more_rule(family: str, name: str, dtype: str) -> None:
    cases = json.loads((GOLDEN / f"{name}.json").read_text())["cases"]
    found = differences(model(family, dtype), cases)
    assert not found, [(what, described(cases[number])) for number, what in found.items()]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_end_at_the_end_tokens_of_both_configs(family: str, tmp_path: Path) -> None:
    """Chat models name the token that ends an answer in generation_config.json alone."""
    for file in (GOLDEN / family).iterdir():
        (tmp_path / file.name).symlink_to(file)
    case = cases_of(FAMILIES[family])[0]
    end = case["tokens"][9]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [end, 509]}))
    config = json.loads((tmp_path / "config.json").read_text())
    named = config.get("text_config", config).get("eos_token_id")
    params = params_of(case).model_copy(update={"ignore_eos": False, "seed": 0})
    with DiffusionLLM(str(tmp_path), dtype="float64", mask_token_id=mask(family)) as llm:
        assert llm.engine.eos_token_ids == ((end, 509) if named is None else (named, end, 509))
        with by_rule({0: case}):
            (output,) = llm.generate([case["prompt"]], params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "stop"
    assert output.outputs[0].token_ids == case["tokens"][: case["tokens"].index(end) + 1]


def test_a_difference_is_reported_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another token, more forwards than the original's, and what cannot be asked for."""
    for file in (GOLDEN / "dream").iterdir():
        (tmp_path / file.name).symlink_to(file)
    told = golden("dream")
    right, token, forwards, unknown = (dict(case) for case in told["cases"][-4:])
    token["tokens"] = [*token["tokens"][:-1], 1]
    forwards["forwards"] = 3
    unknown["decoder"] = "nobody's"
    (tmp_path / "golden.json").unlink()
    cases = [right, token, forwards, unknown]
    (tmp_path / "golden.json").write_text(json.dumps(told | {"cases": cases}))
    monkeypatch.setattr("sys.argv", ["golden", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == "1 of 4 exact" and ended.value.code == 1
    assert "case 1: other tokens from position" in printed
    assert "case 2: " in printed and "forwards instead of 3" in printed
    assert "case 3: cannot be requested: " in printed and "nobody's" in printed


@pytest.mark.parametrize(("batch", "most"), [(1, 2), (8, 8)])
def test_rounds_of_several_steps_waste_next_to_no_forward(
    batch: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks at results before any block is likely to end: no row idles."""
    prompts = [[5 + (13 * i + 7 * j) % 200 for j in range(30 + i)] for i in range(8)]
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    options: dict[str, Any] = {"mask_token_id": MASK, "eos_token_id": EOS, "max_num_seqs": batch}
    found = []
    for steps in (1, 8):
        options |= {"dtype": "float32", "steps_per_round": steps}
        with DiffusionLLM(str(GOLDEN / "llada"), **options) as llm:
            step = Mock(wraps=llm.engine.step)
            monkeypatch.setattr(llm.engine, "step", step)
            outputs = llm.generate(prompts[:most], params, use_tqdm=False)
            ids = [out.outputs[0].token_ids for out in outputs]
            found.append((ids, llm.engine.forwards, step.call_count))
    (tokens, forwards, rounds), (unrolled_tokens, unrolled, unrolled_rounds) = found
    assert unrolled_tokens == tokens and rounds == forwards
    assert unrolled <= 1.01 * forwards
    assert unrolled_rounds < 0.3 * unrolled
