"""The recipe of the demo models: its questions, their answers, and a run that can be resumed."""

import ast
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from diffray.components.grammar.tool_calls import CallParser
from examples.train_demo.judge import is_right
from examples.train_demo.muon import Muon
from examples.train_demo.python_functions import KNOWN
from examples.train_demo.tasks import GENERATORS, chat, draw, is_held_out
from examples.train_demo.tokenizer import build_tokenizer
from examples.train_demo.train import Run, learning_rate, parse, train

pytestmark = pytest.mark.long

DRAWS = 150


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(sample=700)


@pytest.mark.parametrize("task", [*GENERATORS, "tool"])
def test_training_has_no_held_out_skeleton_and_the_tests_have_nothing_else(task: str) -> None:
    """Nor is any phrasing that is called new among those of the training."""
    rng = random.Random(5)
    trained, entities, phrasings = (
        [draw(rng, task, split, noise=False) for _ in range(DRAWS)]
        for split in ("train", "entities", "phrasings")
    )
    assert not any(is_held_out(item) for item in trained)
    assert all(is_held_out(item) for item in entities)
    assert not {item.key for item in trained} & {item.key for item in phrasings}


@pytest.mark.parametrize("task", ["arithmetic", "math"])
def test_equations_are_right_and_the_last_one_is_the_answer(task: str) -> None:
    rng = random.Random(5)
    for item in (draw(rng, task, "train", noise=False) for _ in range(DRAWS)):
        found = re.findall(r"(\d+[-+*/]\d+)=(\d+)", item.answer)
        assert all(eval(left) == int(right) for left, right in found), item
        numbers = re.findall(r"\d+", item.answer)
        assert not found or numbers[-1] == found[-1][1], item


def test_functions_compile_and_do_what_they_are_for() -> None:
    """Also under another name, which a recursive one calls itself by."""
    rng = random.Random(5)
    for item in (draw(rng, "code", "train") for _ in range(4 * DRAWS)):
        ast.parse(item.answer)
    for name, arguments, value in (
        ("product", ([2, 3, 4],), 24), ("unique", ([5, 5],), [5]), ("contains", ([1], 2), False),
        ("count_letter", ("banana", "a"), 3), ("descending", ([1, 3, 2],), [3, 2, 1]),
    ):  # fmt: skip
        taken, body, *_ = KNOWN[name]
        scope: dict[str, Any] = {}
        exec(f"def {name}({taken}):\n    {body}", scope)
        assert scope[name](*arguments) == value, name


def test_calls_have_the_servers_format_and_their_values_stand_in_the_question(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """And training shows functions, calls and results as the chat template does."""
    rng, calls = random.Random(5), 0
    for item in (draw(rng, "tool", "train", noise=False) for _ in range(DRAWS)):
        tools = [re.fullmatch(r"(\w+)\((.*?)\)(?:: (.*))?", t) for t in item.system.split("\n")]
        takes = {t[1]: dict(p.split(": ") for p in t[2].split(", ")) for t in tools if t}
        given = [
            {"name": t[1], "description": t[3], "parameters": {"properties": {
                name: {"type": kind} for name, kind in takes[t[1]].items()
            }}} for t in tools if t
        ]  # fmt: skip
        messages = [dict[str, Any](turn) for turn in chat(item)[1:]]
        parser, after = CallParser(), item.role == "tool"
        parts = [*parser.feed(messages[-2]["content"] if after else item.answer), *parser.end()]
        if parts[0].kind == "name":
            calls += 1
            arguments = json.loads(parts[1].text)
            assert list(arguments) == list(takes[parts[0].text])
            if after:
                function = {"name": parts[0].text, "arguments": arguments}
                messages[-2] = {"role": "assistant", "tool_calls": [{"function": function}]}
            asked = messages[-3 if after else -1]["content"]
            assert all(str(v) in asked for v in arguments.values() if isinstance(v, str))
        as_text: Any = tokenizer.apply_chat_template
        shown = as_text(messages, tools=given, tokenize=False)
        assert shown == as_text(chat(item), tokenize=False)
    assert calls > DRAWS / 2


def test_the_judge_accepts_the_right_answer_and_no_other() -> None:
    right = "def total(xs):\n    return sum(x for x in xs if x % 2 == 0)"
    checks = [["f([1, 2, 4])", 6]]
    assert is_right("code", right, checks)
    assert not is_right("code", right.replace("== 0", "== 1"), checks)
    assert not is_right("code", "import os\n" + right, checks)
    assert not is_right("code", "def f(xs):\n    return ().__class__", checks)
    assert is_right("json", '{"a":1,"b":"x"}', {"a": 1, "b": "x"})
    assert not is_right("json", '{"b":"x","a":1}', {"a": 1, "b": "x"})
    call = '<tool_call>\n{"name": "add", "arguments": {"a":1,"b":2}}\n</tool_call>'
    assert is_right("tool", call, {"name": "add", "arguments": {"a": 1, "b": 2}})
    assert not is_right("tool", call, {"name": "add", "arguments": {"a": 2, "b": 1}})
    assert is_right("math", "2*3=6 pens. The answer is 6.", "6")
    assert not is_right("math", "2*3=6 pens. The answer is 7.", "6")


NAMES = pytest.mark.parametrize("name", ["llada_moe", "llada2_moe"])


@NAMES
@pytest.mark.rotate(1)
def test_a_resumed_run_equals_an_uninterrupted_one(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    straight = Run(name, tokenizer, seed=0, tokens=128)
    first = Run(name, tokenizer, seed=0, tokens=128)
    losses = [straight.train_step(steps=2) for _ in range(2)]
    again = [first.train_step(steps=2)]
    first.save(tmp_path / "state.pt")
    torch.manual_seed(99)
    second = Run(name, tokenizer, seed=7, tokens=128)
    second.load(tmp_path / "state.pt")
    again += [second.train_step(steps=2)]
    assert again == losses
    for ours, theirs in zip(straight.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@NAMES
@pytest.mark.rotate(1)
def test_a_run_begins_from_the_average_of_another(
    name: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The count of steps goes on and the rate warms up again."""
    first = Run(name, tokenizer, seed=0, tokens=128)
    for _ in range(3):
        first.train_step(steps=400)
    first.save(tmp_path / "state.pt")
    second = Run(name, tokenizer, seed=0, tokens=128)
    second.begin(tmp_path / "state.pt")
    assert (second.step, second.tokens) == (first.step, first.tokens)
    began = second.model.state_dict()
    assert all(torch.equal(t, began[key]) for key, t in first.average.state_dict().items())
    assert first.batches.next().kinds != second.batches.next().kinds
    second.train_step(steps=400)
    assert second.step == 4
    assert learning_rate(3, 400, begun=3) == learning_rate(0, 400) < learning_rate(3, 400)
    assert learning_rate(399, 400, begun=3) < 0.01
    # The command needs no more than the other run's folder, here with a last step that is reached.
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    words = ["--begin", str(tmp_path), "--out", str(tmp_path / "out")]
    elsewhere = train(parse([name, *words, "--steps", "3"]))
    assert elsewhere.step == 3
    assert elsewhere.tokenizer.get_vocab() == tokenizer.get_vocab()
    other = Run({"llada_moe": "llada2_moe"}.get(name, "llada_moe"), tokenizer, seed=0, tokens=128)
    if name == "llada_moe":
        with pytest.raises(ValueError, match="has the weights of llada_moe, not of llada2_moe"):
            other.begin(tmp_path / "state.pt")
    else:
        other.begin(tmp_path / "state.pt")
        other.train_step(steps=400)
        assert other.step == 4


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
