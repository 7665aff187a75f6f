"""The recipe of the demo models: its questions, their answers, and a run that can be resumed."""

import json
import math
import random
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from examples.train_demo import gradients
from examples.train_demo.judge import is_right
from examples.train_demo.muon import Muon
from examples.train_demo.passes import load as load_passes
from examples.train_demo.rewording import reworded
from examples.train_demo.tasks import GENERATORS, draw, is_held_out, words_of
from examples.train_demo.tokenizer import build_tokenizer
from examples.train_demo.train import (
    Run,
    learning_rate,
    loss_of,
    parse,
    train,
    trained,
)
from examples.train_demo.words import (
    Item,
    Source,
)

pytestmark = pytest.mark.long

DRAWS = 300


@cache
def items(task: str, split: str = "train", noise: bool = False) -> tuple[Item, ...]:
    rng = random.Random(5)
    return tuple(draw(rng, task, split, noise) for _ in range(DRAWS))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(sample=700)


@pytest.mark.parametrize("task", GENERATORS)
def test_training_has_no_held_out_skeleton_and_the_tests_have_nothing_else(task: str) -> None:
    assert not any(is_held_out(item) for item in items(task))
    assert all(is_held_out(item) for item in items(task, "entities"))


@pytest.mark.parametrize("task", GENERATORS)
def test_new_phrasings_are_new(task: str) -> None:
    trained = {item.key for item in items(task)}
    assert not trained & {item.key for item in items(task, "phrasings")}


def test_rewording_leaves_what_the_answer_needs() -> None:
    rng = random.Random(3)
    changed = 0
    for task in GENERATORS:
        for _ in range(60):
            source = Source(rng, False, False)
            item = GENERATORS[task](source)
            other = reworded(source, item)
            assert other.answer == item.answer
            assert re.findall(r"\d+", other.question) == re.findall(r"\d+", item.question)
            if task != "outside":
                needed = {w for text in (item.answer, *source.drawn) for w in words_of(text)}
                gone = set(words_of(item.question)) - set(words_of(other.question))
                assert not gone & needed, (item, other)
            changed += other.question != item.question
    assert changed > 300


def test_arithmetic_is_right() -> None:
    checked = 0
    for item in items("arithmetic"):
        asked = re.search(r"\d+(?: ?[-+*/] ?\d+)+", item.question)
        said = int(re.findall(r"\d+", item.answer)[-1])
        for left, right in re.findall(r"(\d+[-+*/]\d+)=(\d+)", item.answer):
            assert eval(left) == int(right)
        if asked:
            checked += 1
            assert eval(asked[0]) == said, item
    assert checked > DRAWS / 5


def test_word_problems_calculate_with_what_they_were_given() -> None:
    """Every operand is in the question or was worked out before; the last result is the answer."""
    for item in items("math"):
        known = {int(n) for n in re.findall(r"\d+", item.question)}
        known |= {2} if re.search("twice|double|two times", item.question) else set()
        result = None
        for a, sign, b, c in re.findall(r"(\d+)([-+*/])(\d+)=(\d+)", item.answer):
            assert {int(a), int(b)} <= known, item
            result = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}.get(
                sign, int(a) / int(b)
            )
            assert result == int(c) >= 0, item
            known.add(int(c))
        assert item.answer.endswith(f"The answer is {int(result or 0)}."), item


def test_json_holds_values_and_keys_of_the_question() -> None:
    for item in items("json", noise=True):
        for key, value in json.loads(item.answer).items():
            assert str(value) in item.question, item
            assert key in item.question, item


def test_functions_run() -> None:
    for item in items("code"):
        scope: dict[str, Any] = {}
        exec(item.answer, scope)
        scope.pop("__builtins__")
        ((name, function),) = scope.items()
        assert name in item.answer
        words = "text" in item.answer
        if re.search(
            r"\((numbers|values|items|data|nums|scores)\):\n    return .*for x", item.answer
        ):
            function([*range(-99, 100)])
        elif words:
            function("the quick brown fox")


def test_the_judge_accepts_the_right_answer_and_no_other() -> None:
    right = "def total(xs):\n    return sum(x for x in xs if x % 2 == 0)"
    checks = [["f([1, 2, 4])", 6]]
    assert is_right("code", right, checks)
    assert not is_right("code", right.replace("== 0", "== 1"), checks)
    assert not is_right("code", "import os\n" + right, checks)
    assert not is_right("code", "def f(xs):\n    return ().__class__", checks)
    assert is_right("json", '{"a":1,"b":"x"}', {"a": 1, "b": "x"})
    assert not is_right("json", '{"b":"x","a":1}', {"a": 1, "b": "x"})
    assert is_right("math", "2*3=6 pens. The answer is 6.", "6")
    assert not is_right("math", "2*3=6 pens. The answer is 7.", "6")


@pytest.mark.parametrize("name", ["llada_moe", "llada2_moe"])
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    straight = Run(name, tokenizer, seed=0, tokens=128)
    first = Run(name, tokenizer, seed=0, tokens=128)
    losses = [straight.train_step(steps=4) for _ in range(4)]
    again = [first.train_step(steps=4) for _ in range(2)]
    first.save(tmp_path / "state.pt")
    torch.manual_seed(99)
    second = Run(name, tokenizer, seed=7, tokens=128)
    second.load(tmp_path / "state.pt")
    again += [second.train_step(steps=4) for _ in range(2)]
    assert again == losses
    for ours, theirs in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["llada_moe", "llada2_moe"])
def test_kept_weights_go_on_elsewhere(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """From the averages in bfloat16; the count of steps goes on and the rate warms up again."""
    first = Run(name, tokenizer, seed=0, tokens=128)
    for _ in range(3):
        first.train_step(steps=400)
    first.keep(tmp_path / "begun.safetensors")
    second = Run(name, tokenizer, seed=0, tokens=128)
    second.begin(tmp_path / "begun.safetensors")
    assert (second.step, second.tokens) == (first.step, first.tokens)
    for (key, kept), (_, went_on) in zip(
        trained(first.average).items(), trained(second.model).items(), strict=True
    ):
        assert torch.equal(kept.bfloat16().float(), went_on), key
    assert first.batches.next().kinds != second.batches.next().kinds
    second.train_step(steps=400)
    assert second.step == 4
    assert learning_rate(3, 400, begun=3) == learning_rate(0, 400) < learning_rate(3, 400)
    assert learning_rate(399, 400, begun=3) < 0.01
    if name == "llada_moe":
        other = Run("llada2_moe", tokenizer, seed=0, tokens=128)
        with pytest.raises(ValueError, match="has the weights of llada_moe, not of llada2_moe"):
            other.begin(tmp_path / "begun.safetensors")


def test_kept_weights_bring_their_tokenizer(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The command resumes from them alone, here to a last step that they have reached."""
    run = Run("llada_moe", tokenizer, seed=0, tokens=128)
    run.train_step(steps=1)
    run.keep(tmp_path / "begun.safetensors")
    words = ["--begin", str(tmp_path / "begun.safetensors"), "--out", str(tmp_path / "out")]
    elsewhere = train(parse(["llada_moe", *words, "--steps", "1"]))
    assert elsewhere.step == 1
    assert elsewhere.tokenizer.get_vocab() == tokenizer.get_vocab()


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llada_moe", "llada2_moe"])
def test_fused_passes_equal_those_of_torch(
    name: str,
    dtype: torch.dtype,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loss, the share of right tokens and every gradient, with products in either dtype."""
    monkeypatch.setattr(gradients, "products_dtype", lambda: dtype)
    share = 1e-4 if dtype == torch.float32 else 0.6  # in bfloat16, routers choose other experts
    run = Run(name, tokenizer, seed=0, tokens=512)
    for _ in range(4):
        batch, results = run.batches.next(), []
        for passes in (None, load_passes()):
            run.model.passes = passes
            run.model.zero_grad()
            loss, right = loss_of(run.model, batch)
            loss.backward()
            found = [p.grad for p in run.model.parameters() if p.grad is not None]
            results.append((loss.detach(), torch.tensor(right), *found))
        for plain, fused in zip(*results, strict=True):
            assert (fused - plain).norm() <= share * plain.norm()


def test_loading_the_passes_leaves_arithmetic_as_it_was() -> None:
    """-ffast-math would let the library round subnormal numbers to 0 in the whole process."""
    load_passes()
    assert torch.tensor(2.0**-130).mul(0.5) > 0
    assert math.nextafter(0, 1) * 2 > 0


def test_muon_makes_matrices_orthogonal() -> None:
    """Each of those that stand in one tensor for itself."""
    parameter = torch.nn.Parameter(torch.zeros(3, 24, 16))
    before = parameter.grad = torch.randn(3, 24, 16, generator=torch.Generator().manual_seed(0))
    muon = Muon([{"params": [parameter], "stacked": 2}], torch.float32, lr=1.0)
    muon.step()
    matrices = -parameter.detach().view(6, 12, 16)
    values = torch.linalg.svdvals(matrices)
    assert ((values - 1).abs() < 0.05).all()
    assert (matrices * before.view(6, 12, 16)).sum((1, 2)).min() > 0
