"""Tuning finds a fast policy that is as accurate, and no other, however fast it is."""

import asyncio
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diffray.cluster.api.batch_lines import Answer, Reply
from diffray.cluster.cli.evaluation.policies import NamedPolicy
from diffray.cluster.cli.evaluation.run import Asked
from diffray.cluster.cli.evaluation.tasks import read_items
from diffray.cluster.cli.evaluation.tuning import (
    Outcome,
    Tuning,
    as_yaml,
    sizes,
    space,
    table,
)
from diffray.cluster.cli.main import app
from diffray.components.checkpoints.info import describe
from diffray.components.decoders.threshold import Threshold
from diffray.components.params import SamplingParams
from diffray.components.policy import DiffusionParams

QUESTIONS = 400
# By threshold: the share of right answers, and the seconds that one takes.
REFERENCE, SAFE, FAST, WRONG = 1.0, 0.9, 0.7, 0.1
SPEEDS = {REFERENCE: 0.02, SAFE: 0.008, FAST: 0.002, WRONG: 0.0}
RIGHT = {REFERENCE: 0.9, SAFE: 0.9, FAST: 0.9, WRONG: 0.6}


def policy(threshold: float) -> NamedPolicy:
    decoder = {"kind": "threshold", "threshold": threshold}
    return NamedPolicy(f"t {threshold}", {"diffusion": {"decoder": decoder}})


def questions(folder: Path, count: int = QUESTIONS) -> Asked:
    path = folder / "t.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}", "answer": "yes"}}\n' for n in range(count)))
    return Asked("m", read_items(str(path), None), concurrency=4)


class Model:
    """Answers after a while, right as often as said; its policies differ in few questions."""

    def __init__(self, right: dict[float, float]) -> None:
        self.right, self.asked = right, Counter[float]()

    async def __call__(self, url: str, body: dict[str, Any]) -> Reply:
        threshold = body["diffusion"]["decoder"]["threshold"]
        if body["cache_salt"] != "warm-up":
            self.asked[threshold] += 1
            await asyncio.sleep(SPEEDS[threshold])
        draw = random.Random(body["messages"][0]["content"]).random()
        text = "yes" if draw < self.right[threshold] else "no"
        trajectory = {"token_ids": [1, 2], "steps": [0, 0], "logprobs": [0, 0]}
        message = {"message": {"content": text}, "finish_reason": "stop", "stop_reason": None}
        choices = [message | {"trajectory": trajectory}]
        return Reply(200, "id", {"choices": choices, "diffusion": {"forwards": 1}})


def tuned(
    folder: Path,
    answer: Answer,
    *thresholds: float,
    allowed: float = 0.02,
    minutes: float = 9.0,
) -> Outcome:
    policies = [policy(each) for each in (REFERENCE, *thresholds)]
    asked = questions(folder)
    end = time.monotonic() + 60 * minutes
    search = Tuning(folder / "out", asked, answer, allowed, end)
    return asyncio.run(search.best(policies))


def test_the_fastest_that_loses_nothing_is_chosen_and_the_bad_one_never(tmp_path: Path) -> None:
    model = Model(RIGHT)
    outcome = tuned(tmp_path, model, WRONG, SAFE, FAST)
    assert outcome.chosen.policy == policy(FAST)
    assert outcome.chosen.speed > 3 * outcome.reference.speed
    assert outcome.chosen.loss.high <= 0.02
    assert outcome.rejected == 1
    assert model.asked[WRONG] < QUESTIONS == model.asked[REFERENCE] == model.asked[FAST]
    text = as_yaml(outcome, questions(tmp_path), "mine", 0.01)
    assert DiffusionParams(**yaml.safe_load(text)).decoder == Threshold(threshold=FAST)
    assert "# m, 400 questions of mine, seed 0: t 0.7\n# accuracy" in text
    said = table(outcome, 0.02)
    assert "| t 0.7 | 400 | 9" in said
    assert "| t 0.1 | " in said, "what was left out is listed, too"
    before = model.asked.copy()
    again = tuned(tmp_path, model, WRONG, SAFE, FAST)
    assert again.chosen.policy == policy(FAST)
    assert model.asked == before, "all answers were there"


def test_without_one_that_holds_the_reference_stays(tmp_path: Path) -> None:
    outcome = tuned(
        tmp_path, Model(RIGHT | {FAST: 0.87, SAFE: 0.88}), WRONG, SAFE, FAST, allowed=0.01
    )
    assert outcome.chosen is outcome.reference
    assert "no other policy" in as_yaml(outcome, questions(tmp_path), "mine", 0.01)
    lost = {each.policy.name: each for each in outcome.finalists}
    assert all(each.needed(0.01) is None for each in lost.values()), "they lose 2 and 3 points"


def test_what_may_be_lost_decides(tmp_path: Path) -> None:
    outcome = tuned(tmp_path, Model(RIGHT | {FAST: 0.88}), SAFE, FAST, allowed=0.05)
    assert outcome.chosen.policy == policy(FAST)
    outcome = tuned(tmp_path, Model(RIGHT | {FAST: 0.88}), SAFE, FAST, allowed=0.01)
    assert outcome.chosen.policy == policy(SAFE)


def test_it_ends_in_time(tmp_path: Path) -> None:
    model = Model(RIGHT)
    outcome = tuned(tmp_path, model, WRONG, SAFE, FAST, minutes=0)
    assert (outcome.chosen, outcome.unmeasured) == (outcome.reference, 3)
    assert set(model.asked) == {REFERENCE}


def test_a_policy_that_is_refused_is_left_out(tmp_path: Path) -> None:
    model = Model(RIGHT)

    async def picky(url: str, body: dict[str, Any]) -> Reply:
        if body["diffusion"]["decoder"]["threshold"] == FAST:
            return Reply(400, "id", {"error": {"message": "no such decoder"}})
        return await model(url, body)

    outcome = tuned(tmp_path, picky, SAFE, FAST)
    assert outcome.chosen.policy == policy(SAFE)
    assert "t 0.7: the server answers 400: no such decoder" in table(outcome, 0.01)


@pytest.mark.slow
def test_a_loss_that_is_too_large_seldom_passes(tmp_path: Path) -> None:
    """Twelve policies lose just what is allowed, in questions of their own, and are chosen among
    by the very questions that test them: one passes in at most about 5 % of all searches."""
    draws, passed, times, allowed = random.Random(1), 0, 100, 0.05
    named = [policy(REFERENCE), *(policy(n / 100) for n in range(12))]
    for _ in range(times):
        rows = {
            each.name: [{"task": "t", "item": n, "sample": 0, **ROW} for n in range(QUESTIONS)]
            for each in named
        }
        for name, own in rows.items():
            for row in own:
                lost = name != named[0].name and draws.random() < allowed
                row["score"] = 0.0 if lost else 1.0
        search = Simulated(tmp_path, questions(tmp_path), Model({}), allowed, time.monotonic() + 60)
        search.rows = rows
        outcome = asyncio.run(search.best(named))
        passed += outcome.chosen is not outcome.reference
    assert passed / times <= 0.1


ROW = {"tokens": [1], "forwards": 1, "began": 0.0, "text": "", "finish_reason": "stop"}


class Simulated(Tuning):
    """A search whose answers are there, all but the reference's equally fast."""

    rows: dict[str, list[dict[str, Any]]]

    async def _measure(
        self, policies: Any, questions: int
    ) -> list[tuple[NamedPolicy, list[dict[str, Any]]]]:
        return [
            (each, [row | {"seconds": 1 + (each == policy(REFERENCE))} for row in own[:questions]])
            for each in policies
            for own in [self.rows[each.name]]
        ]


def test_rounds_double() -> None:
    assert [sizes(n) for n in (400, 100, 48, 47, 3)] == [
        [25, 50, 100, 200, 400], [25, 50, 100], [24, 48], [47], [3],
    ]  # fmt: skip


@pytest.mark.parametrize("model", ["demo", "demo-llada2"])
def test_the_space_fits_the_model(model: str) -> None:
    accepts = describe(model).accepts
    found = space(accepts)
    assert found[0].name == "reference"
    assert len({each.name for each in found}) == len(found) > 8
    for each in found:
        diffusion = SamplingParams(**each.request).diffusion
        assert diffusion.decoder is not None and diffusion.cache is not None
        assert diffusion.decoder.kind in str(accepts["decoder"])
        assert diffusion.cache.kind in str(accepts["cache"])


@pytest.mark.slow
def test_the_command_writes_what_serve_takes(tmp_path: Path) -> None:
    """Of LLaDA's sampler, a threshold and one that is far too low, on the demo model."""
    policies, out = tmp_path / "p.yaml", tmp_path / "out"
    policies.write_text(
        "llada: {decoder: {kind: fixed, steps: 32}, canvas: fixed, cache: none}\n"
        "bad: {decoder: {kind: threshold, threshold: 0.0}, cache: dual}\n"
        "good: {decoder: {kind: threshold, threshold: 0.9}, cache: dual}\n"
    )
    asked = ["tune", "demo", "--task", "demo-harder", "--limit", "60", "--max-loss", "8pp"]
    asked += ["--policies", str(policies), "--out", str(out), "--dtype", "float32"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 0, result.output
    text = (out / "policy.yaml").read_text()
    assert "demo, 60 questions of demo-harder, seed 0: good" in text
    chosen = yaml.safe_load(text)
    assert chosen == {"decoder": {"kind": "threshold", "threshold": 0.9}, "cache": "dual"}
    result = CliRunner().invoke(app, [*asked, "--max-loss", "much"])
    assert "give points of accuracy above 0" in result.stderr
