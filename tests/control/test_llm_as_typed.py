"""Calls as people type them who know vLLM and transformers, and how results show themselves."""

import io
import pickle
import shutil
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from diffray import CompletionOutput, DiffusionLLM, RequestOutput, SamplingParams
from diffray.workers.views import frame
from tests.helpers.byte_tokenizer import TOKENIZER, byte_tokenizer
from tests.helpers.paths import GOLDEN

SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
IDS = {"mask_token_id": 510, "eos_token_id": 511}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiffusionLLM]:
    folder = tmp_path_factory.mktemp("llm") / "checkpoint"
    shutil.copytree(GOLDEN / "llada", folder)
    byte_tokenizer().fast.save_pretrained(folder)
    with DiffusionLLM(str(folder), dtype="float64", max_num_seqs=4, **IDS) as llm:  # type: ignore[arg-type]
        yield llm


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_parameters_may_be_keywords(llm: DiffusionLLM) -> None:
    (expected,) = ids(llm.generate("some text", SHORT))
    assert ids(llm.generate("some text", sampling_params=SHORT)) == [expected]
    assert ids(llm.generate("some text", max_tokens=8, ignore_eos=True)) == [expected]
    two = llm.generate(["some text", "other"], temperature=0, max_tokens=8, ignore_eos=True)
    assert ids(two) == [expected, *ids(llm.generate("other", SHORT))]
    streamed = llm.stream("some text", max_tokens=8, ignore_eos=True)
    assert [token for delta in streamed for token in delta.token_ids] == expected
    assert list(llm.watch("some text", max_tokens=8, ignore_eos=True))[-1] == expected
    (filled,) = llm.infill("a", "b", max_tokens=5, ignore_eos=True)
    assert filled.completion_tokens == 5
    (fixed,) = llm.generate(
        "some text",
        max_tokens=8,
        ignore_eos=True,
        diffusion={"decoder": {"kind": "fixed", "steps": 4}},
    )
    assert fixed.forwards == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampling_params": SHORT, "max_tokens": 4}, ValueError, r"both .* and max_tokens; write"),
        ({"max_token": 4}, TypeError, r"takes no 'max_token', did you mean 'max_tokens'\?"),
        ({"max_new_tokens": 4}, TypeError, r"takes no 'max_new_tokens'; write max_tokens"),
        ({"do_sample": True}, TypeError, "takes no 'do_sample'; write temperature"),
        ({"steps": 4}, TypeError, r"takes no 'steps'; write diffusion: "),
        (
            {"params": SHORT},
            TypeError,
            "takes no 'params'; it takes sampling_params, or its fields",
        ),
        ({"temperature": -1}, ValueError, "temperature: .*greater than or equal to 0"),
    ],
)
def test_a_wrong_keyword_is_one_sentence(
    llm: DiffusionLLM, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    messages = [{"role": "user", "content": "some text"}]
    calls: list[Callable[..., object]] = [
        lambda **more: llm.generate("some text", **more),
        lambda **more: llm.chat(messages, **more),
        lambda **more: llm.infill("a", "b", **more),
        lambda **more: list(llm.stream("some text", **more)),
        lambda **more: list(llm.watch("some text", **more)),
    ]
    for call in calls:
        with pytest.raises(error, match=message) as caught:
            call(**options)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gpu_memory_utilization": 0.9},
            "unknown option 'gpu_memory_utilization'; write kv_cache",
        ),
        ({"trust_remote_code": True}, "unknown option 'trust_remote_code'; leave it out"),
        ({"torch_dtype": torch.bfloat16}, "unknown option 'torch_dtype'; write dtype"),
        ({"max_queued_requests": 3}, "unknown option 'max_queued_requests'"),
        ({"expert_parallel": True}, "expert_parallel needs tensor_parallel_size of at least 2"),
    ],
)
def test_options_of_other_libraries_are_answered_with_ours(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        DiffusionLLM("demo", **options)


def forms(llm: DiffusionLLM) -> dict[str, Any]:
    """Return the same two prompts in every form."""
    tokenizer, texts = llm.get_tokenizer(), ["one", "prompt"]
    first, second = (tokenizer(text)["input_ids"] for text in texts)
    padded = torch.tensor([[0] * 3 + first, second])
    mask = torch.tensor([[0] * 3 + [1] * 3, [1] * 6])
    return {
        "texts": texts,
        "lists": [first, second],
        "tuples": (tuple(first), tuple(second)),
        "tensors": [torch.tensor(first), torch.tensor(second)],
        "arrays": [np.array(first, dtype=np.int32), np.array(second)],
        "scalars": [list(torch.tensor(first)), list(np.array(second))],
        "rows": [torch.tensor([first]), torch.tensor([second])],
        "encoding of both": tokenizer(texts),
        "encodings": [tokenizer(text, return_tensors="pt") for text in texts],
        "padded": {"input_ids": padded, "attention_mask": mask},
        "vllm's": [{"prompt": texts[0]}, {"prompt_token_ids": second}],
    }


def test_prompts_may_be_tensors_and_what_a_tokenizer_returns(llm: DiffusionLLM) -> None:
    expected = llm.generate(["one", "prompt"], SHORT)
    assert [len(each.prompt_token_ids) for each in expected] == [3, 6]
    for name, prompts in forms(llm).items():
        found = llm.generate(prompts, SHORT)
        assert [each.prompt_token_ids for each in found] == [
            each.prompt_token_ids for each in expected
        ], name
        assert ids(found) == ids(expected), name
    one = forms(llm)["tensors"][0]
    assert ids(llm.generate(one, SHORT)) == ids(expected[:1])
    for single in (one, one[None], llm.get_tokenizer()("one"), {"prompt": "one"}):
        streamed = [token for delta in llm.stream(single, SHORT) for token in delta.token_ids]
        assert streamed == ids(expected)[0]
    matrix = torch.tensor([[1, 2], [3, 4]])
    assert [each.prompt_token_ids for each in llm.generate(matrix, SHORT)] == matrix.tolist()


def test_chat_templates_are_applied_as_transformers_does(llm: DiffusionLLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (expected,) = llm.chat(messages, SHORT)
    text = llm.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "[hi]<|end|>"
    assert llm.tokenizer is not None
    for prompt in (
        text,
        llm.apply_chat_template(messages, add_generation_prompt=True),
        llm.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt"
        ),
        llm.get_tokenizer().apply_chat_template(messages, return_dict=False),
    ):
        (found,) = llm.generate(prompt, SHORT)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert ids([found]) == ids([expected])


# Results.


def test_tokens_are_the_text_in_pieces() -> None:
    text = "na\u00efve \u65e5\u672c <|end|>!"
    tokens = TOKENIZER.tokens(TOKENIZER.encode(text))
    assert "".join(tokens) == text
    assert len(tokens) == len(TOKENIZER.encode(text))
    assert tokens[2:4] == ["", "\u00ef"] and "\ufffd" not in "".join(tokens)
    assert "".join(TOKENIZER.tokens([0xE6, 65])) != "", "half a character"


def test_every_output_knows_its_tokens_and_when_they_became_final(llm: DiffusionLLM) -> None:
    params = SHORT.model_copy(update={"n": 2, "temperature": 1.0, "seed": 3})
    (output,) = llm.generate("x", params)
    for choice in output.outputs:
        assert len(choice.tokens) == len(choice.steps) == len(choice.token_ids) == 8
        assert max(choice.steps) + 1 == choice.forwards
        assert choice.visible == list(zip(choice.tokens, choice.steps, strict=True))
    assert pickle.loads(pickle.dumps(output)) == output
    assert asdict(output)["outputs"][0]["steps"] == output.outputs[0].steps


ANSWER = CompletionOutput(
    0,
    text="The <b>answer</b>\nis 22.",
    token_ids=[5, 6, 7, 8, 9],
    tokens=["The", " <b>answer</b>\n", "is", " 22.", "<|end|>"],
    steps=[0, 2, 1, 2, 2],
    finish_reason="stop",
    stop_reason=9,
    forwards=3,
)
OUTPUT = RequestOutput("Why & <how>?", [1, 2], [ANSWER])


def test_reprs_are_short_and_readable() -> None:
    assert repr(ANSWER) == (
        "CompletionOutput(index=0, text='The <b>answer</b>\\nis 22.', 5 tokens, 3 forwards, "
        "finish_reason='stop')"
    )
    assert repr(OUTPUT) == f"RequestOutput(prompt='Why & <how>?', outputs=[{ANSWER!r}])"
    assert repr(RequestOutput(None, [1] * 99, [])) == "RequestOutput(prompt=99 tokens, outputs=[])"
    long = CompletionOutput(0, text="word " * 9999, token_ids=[1] * 9999)
    assert len(repr(RequestOutput("ask " * 9999, [1], [long]))) < 400


def images(html: str) -> list[str]:
    """Return the pictures in a page, which must be well-formed and load nothing."""
    root = ElementTree.fromstring(html.replace('700px">', '700px"/>'))
    assert {each.tag for each in root.iter()} <= {"div", "img", "pre", "p", "small"}
    drawn = []
    for image in root.iter("img"):
        kind, _, data = image.attrib["src"].partition(",")
        assert kind == "data:image/svg+xml;base64"
        drawn.append(b64decode(data).decode())
    return drawn


def test_a_notebook_shows_the_denoising_without_scripts_or_links() -> None:
    html = OUTPUT._repr_html_()
    (svg,) = images(html)
    assert "The &lt;b&gt;answer&lt;/b&gt;\nis 22." in html
    assert "5 tokens in 3 forwards, 1.7 tokens per forward, stop" in html
    for word in ("script", "href", "url(", "@import", "foreignObject", " on"):
        assert word not in svg, word
    assert "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    root = ElementTree.fromstring(svg)
    said = "".join(str(each.text) for each in root.iter() if each.tag.endswith("}desc"))
    assert said == "Question: Why & <how>? Answer: The <b>answer</b>\nis 22."
    notes = [each.text for each in root.iter() if "note n" in each.get("class", "")]
    assert notes == [f"step {n} of 3: {left} masks left" for n, left in enumerate((4, 3, 2, 0))]
    masks = [each.get("class") for each in root.iter() if each.tag.endswith("}rect")]
    assert masks == ["card", "mask m1", "mask m3", "mask m2", "mask m3"]


def test_a_picture_wraps_words_and_breaks_long_ones_and_survives_any_text() -> None:
    texts = ["x" * 150, " wide \u65e5\u672c", "\x00\x1b[0m\ud800\ufffe]]>", "\n", "\n end"]
    choice = CompletionOutput(0, "t", [1] * 5, tokens=texts, steps=[4, 3, 2, 1, 0], forwards=5)
    (svg,) = images(RequestOutput(None, [1], [choice])._repr_html_())
    root = ElementTree.fromstring(svg)
    width = float(root.attrib["viewBox"].split()[2])
    boxes = [each.attrib for each in root.iter() if "mask" in each.get("class", "")]
    assert len(boxes) >= 6
    assert all(float(box["x"]) + float(box["width"]) < width for box in boxes)
    assert len({box["y"] for box in boxes}) >= 4
    assert "Question" not in svg


def test_large_outputs_stay_small_in_a_notebook() -> None:
    size = 600
    many = CompletionOutput(0, "t", [1] * size, tokens=["t"] * size, steps=[*range(size)])
    assert images(RequestOutput("p", [1], [many])._repr_html_()) == []
    some = CompletionOutput(0, "t", [1] * 512, tokens=["t"] * 512, steps=[*range(512)])
    outputs = RequestOutput("p", [1], [some] * 9)
    assert len(images(outputs._repr_html_())) == 4
    assert len(outputs._repr_html_()) < 2_500_000


def test_show_prints_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    OUTPUT.show()
    assert capsys.readouterr().out == (
        "The <b>answer</b>\nis 22.\n5 tokens in 3 forwards, 1.7 tokens per forward, stop\n"
    )
    with pytest.raises(ValueError, match=r"pace is the steps per second, above 0 \(given: 0\)"):
        OUTPUT.show(pace=0)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_show_plays_every_step_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    OUTPUT.show(pace=1000)
    shown = screen.getvalue()
    for step, masked in ((1, 3), (2, 2), (3, 0)):
        assert f"step {step}, {masked} masked of 4" in shown
    assert shown.endswith("is 22.\n5 tokens in 3 forwards, 1.7 tokens per forward, stop\n")
    middle = frame(ANSWER.visible, 1)
    assert (
        middle.plain.splitlines()[1]
        == "The" + "\N{LIGHT SHADE}" * 15 + "is" + "\N{LIGHT SHADE}" * 4
    )
    styles = {str(span.style): middle.plain[span.start : span.end] for span in middle.spans}
    assert styles["bold green"] == "is"


def test_show_displays_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    shell, display = ModuleType("IPython"), ModuleType("IPython.display")
    vars(shell)["get_ipython"] = lambda: SimpleNamespace(kernel=object())
    vars(display)["display"] = shown.append
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    OUTPUT.show()
    assert shown == [OUTPUT]
