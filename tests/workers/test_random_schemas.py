"""Whatever the model, decoder and budget, answers follow their schema.

    pytest -s -m long tests/workers/test_random_schemas.py

prints how many answers were valid, by the kind of schema.
"""

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from diffray import DiffusionLLM, SamplingParams
from diffray.components.config import InvalidField
from tests.helpers.random_schemas import KINDS, checked, random_schema
from tests.helpers.tiny import tiny_checkpoint

pytestmark = pytest.mark.long

POLICIES: list[dict[str, Any]] = [
    {},
    {"decoder": {"kind": "fixed", "steps": 6}, "block_length": 8},
    {"decoder": {"kind": "credit", "threshold": 0.3}, "block_length": 4},
    {"decoder": {"kind": "hierarchy", "threshold": 0.5, "low_threshold": 0.1}},
    {"decoder": {"kind": "entropy_bound", "gamma": 0.5}, "block_length": 16},
    {"decoder": {"kind": "sequential"}, "block_length": 8},
    {"decoder": {"kind": "factor"}},
]
PROMPT = "Answer in JSON."


def shortest(llm: DiffusionLLM, schema: dict[str, Any]) -> int:
    """Return the fewest tokens of an answer, from the text of a refusal."""
    wish = SamplingParams(max_tokens=1, structured_outputs={"json": schema})
    with pytest.raises(InvalidField, match="shortest text takes") as refusal:
        llm.generate(PROMPT, wish, use_tqdm=False)
    (found,) = re.findall(r"takes (\d+) tokens", str(refusal.value))
    return int(found)


@pytest.mark.parametrize("model", ["demo", "demo-llada2", "random", "random block-causal"])
def test_300_random_schemas_are_followed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if model.startswith("random"):
        family = "llada2_moe" if "causal" in model else "llada"
        path = tiny_checkpoint(tmp_path / "model", family)
    else:
        path = model
    draw = random.Random(3)
    asked: list[tuple[str, dict[str, Any]]] = []
    wishes: list[SamplingParams] = []
    with DiffusionLLM(path, device="cpu", max_num_seqs=16) as llm:
        for number in range(300):
            kind = KINDS[number % len(KINDS)]
            schema = random_schema(draw, kind=kind) | {"$defs": {"T": random_schema(draw, 0)}}
            least = shortest(llm, schema)
            for temperature in (0, 1):
                for spare in (0, draw.randint(1, 20)):
                    policy = POLICIES[len(wishes) % len(POLICIES)]
                    wish = SamplingParams(
                        max_tokens=least + spare,
                        temperature=temperature,
                        seed=number,
                        structured_outputs={"json": schema},
                        diffusion=policy,
                    )
                    asked.append((kind, schema))
                    wishes.append(wish)
        outputs = llm.generate([PROMPT] * len(wishes), wishes, use_tqdm=False)
    given, valid, wrong = Counter[str](), Counter[str](), []
    for (kind, schema), output in zip(asked, outputs, strict=True):
        (answer,) = output.outputs
        given[kind] += 1
        try:
            checked(schema, json.loads(answer.text))
        except (ValueError, jsonschema.ValidationError) as error:
            wrong.append((schema, answer.text, str(error)))
        else:
            valid[kind] += answer.finish_reason == "stop"
    print(f"\n| {model} | {' | '.join(f'{kind} {valid[kind]}/{given[kind]}' for kind in KINDS)} |")
    assert not wrong and valid == given, wrong[:3]
