"""The recipe for drafters: what masks see, how guesses are counted, and a run that goes on."""

import argparse
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.golden import EOS, MASK, cases_of
from diffray.components.checkpoints.folder import DRAFTER
from diffray.components.mesh import Mesh
from diffray.components.params import SamplingParams
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from examples.train_drafter.answers import written
from examples.train_drafter.prompts import prompts
from examples.train_drafter.train import MASKS, Drafter, tokens_per_forward, train
from tests.helpers.paths import GOLDEN
from tests.helpers.resuming import updates_of

pytestmark = pytest.mark.slow

MODEL = GOLDEN / "ar_qwen3"


@pytest.fixture
def texts() -> list[dict[str, Any]]:
    cases = cases_of("ar_qwen3")
    return [
        {"number": n, "prompt": case["prompt"], "ids": case["tokens"]}
        for n, case in enumerate(cases)
        if len(case["tokens"]) > MASKS + 2
    ]


def test_masks_see_the_text_before_them_and_each_other(texts: list[dict[str, Any]]) -> None:
    drafter = Drafter(str(MODEL), 4, MASK)
    drafter.model.double()
    prompt, ids = texts[0]["prompt"], texts[0]["ids"][:9]
    with torch.no_grad():
        found = drafter.guess(prompt, ids, 100, random.Random(0))
    rows, text = iter(found.logits_RV), prompt + ids
    for at in range(len(prompt) - 1, len(text) - 2):
        count = min(MASKS, len(text) - at - 2)
        whole = torch.tensor([text[: at + 1] + [MASK] * MASKS])
        with torch.no_grad():
            expected = drafter.model(input_ids=whole).logits[0, at + 1 :]
        for row in expected[:count].float():
            torch.testing.assert_close(next(rows), row, atol=1e-4, rtol=0)
    assert next(rows, None) is None
    assert found.right_R.tolist()[:MASKS] == text[len(prompt) + 1 : len(prompt) + 1 + MASKS]


def test_guesses_are_counted_as_the_engine_takes_them() -> None:
    no, one, whole = [False] * 3, [True, False, True], [True] * 3
    assert tokens_per_forward([no] * 10) == 1
    assert tokens_per_forward([whole] * 9) == pytest.approx(9 / 3)  # 1, 4 and 4 tokens
    assert tokens_per_forward([one] * 9) == pytest.approx(9 / 6)  # 1 and 2, three times


def test_a_run_goes_on_where_it_was_stopped_and_its_adapter_drafts(
    texts: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "bundle" / DRAFTER
    args = argparse.Namespace(out=out, rate=5e-3, minutes=0.06)
    out.mkdir(parents=True)
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("examples.train_drafter.train.KEPT_EVERY", 0.5)
        train(Drafter(str(MODEL), 4, MASK), texts, args)
    first = torch.load(out / "state.pt")
    assert first["step"] > 0
    args.minutes = 0.1
    train(Drafter(str(MODEL), 4, MASK), texts, args)
    assert "tokens a forward" in capsys.readouterr().out
    again = Drafter(str(MODEL), 4, MASK)
    again.load(out)
    again.save(tmp_path / "copy")
    assert all(
        file.read_bytes() == (out / file.name).read_bytes()
        for file in (tmp_path / "copy").iterdir()
    )

    for file in MODEL.glob("*.[js]*"):
        shutil.copy(file, out.parent)
    options = EngineOptions(dtype="float32", device="cpu", max_num_seqs=4, eos_token_id=EOS)
    engine, found = build_rank(str(out.parent), options, Mesh()), []
    policies: list[dict[str, Any]] = [{}, {"iteration": "autoregressive"}]
    for diffusion in policies:
        params = SamplingParams(max_tokens=30, ignore_eos=True, diffusion=diffusion)
        asked = [Request(n, tuple(each["prompt"]), params) for n, each in enumerate(texts[:4])]
        updates = updates_of(engine, asked, 1)
        ids = [[i for u in updates if u.uid == n for i in u.ids] for n in range(4)]
        found.append((ids, sum(u.forwards for u in updates if u.finish_reason)))
    assert found[0][0] == found[1][0] and found[0][1] < found[1][1]


def test_answers_go_on_after_the_last_whole_line(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    assert written(file) == set()
    whole = json.dumps({"number": 7, "prompt": [1], "ids": [2]}) + "\n"
    file.write_text(whole + '{"number": 9, "pro')
    assert written(file) == {7} and file.read_text() == whole


def test_prompts_are_always_the_same(tmp_path: Path) -> None:
    file = tmp_path / "more.jsonl"
    file.write_text('{"question": "How many?"}\n{"prompt": "def f():"}\n')
    found = prompts([file])
    assert found == prompts([file]) and len(found) > 1000
    assert {"How many?", "def f():"} <= set(found) and len(set(found)) == len(found)
