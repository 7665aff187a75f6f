"""The public Python API, on a tiny checkpoint with and without a tokenizer."""

import gc
import logging
import math
import shutil
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from diffray import DiffusionLLM, RequestOutput, SamplingParams
from diffray.cluster.frontend.given import say_that_there_is_a_template
from diffray.components.sequence import Sequence
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.living import living, only_new
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import full_forward

LLADA = GOLDEN / "llada"
SHORT = SamplingParams(max_tokens=8, ignore_eos=True)
IDS: dict[str, Any] = {"mask_token_id": 510, "eos_token_id": 511}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiffusionLLM]:
    folder = tmp_path_factory.mktemp("llm") / "checkpoint"
    shutil.copytree(LLADA, folder)
    byte_tokenizer().fast.save_pretrained(folder)
    with DiffusionLLM(str(folder), dtype="float64", max_num_seqs=4, **IDS) as llm:
        yield llm


def ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def streamed(llm: DiffusionLLM, *given: Any, **options: Any) -> list[int]:
    return [token for delta in llm.stream(*given, **options) for token in delta.token_ids]


def test_an_answer_says_what_was_asked_and_counts(llm: DiffusionLLM) -> None:
    diffusion = {"block_length": 16, "cache": {"kind": "vicinity", "before": 16, "after": 16}}
    params = SamplingParams(max_tokens=64, ignore_eos=True, diffusion=diffusion)
    prompts: list[str | list[int]] = [[1, 2, 3], "a string"]
    out = llm.generate(prompts, [params, params])
    assert [len(each) for each in ids(out)] == [64, 64]
    assert out[0].outputs[0].finish_reason == "length" and out[0].finished
    assert out[0].prompt is None and out[1].prompt == "a string"
    assert (out[0].prompt_tokens, out[0].completion_tokens) == (3, 64)
    assert 0 < out[0].forwards <= 64
    assert out[0].tokens_per_forward == 64 / out[0].forwards
    assert out[0].outputs[0].logprobs is None


def test_parameters_may_be_keywords(llm: DiffusionLLM) -> None:
    (expected,) = ids(llm.generate("some text", SHORT))
    assert ids(llm.generate("some text", sampling_params=SHORT)) == [expected]
    two = llm.generate(["some text", "other"], temperature=0, max_tokens=8, ignore_eos=True)
    assert ids(two) == [expected, *ids(llm.generate("other", SHORT))]
    assert streamed(llm, "some text", max_tokens=8, ignore_eos=True) == expected
    canvases = list(llm.watch("some text", max_tokens=8, ignore_eos=True))
    hidden = [canvas.count(None) for canvas in canvases]
    assert hidden == sorted(hidden, reverse=True) and canvases[-1] == expected
    (filled,) = llm.infill("a", "b", max_tokens=5, ignore_eos=True)
    assert filled.completion_tokens == 5


def test_one_prompt_or_many_in_their_order(llm: DiffusionLLM) -> None:
    prompts = [[5] * (1 + 7 * i % 11) for i in range(9)]
    many = llm.generate(prompts, SHORT)
    assert [o.prompt_token_ids for o in many] == prompts
    assert ids(many) == [ids(llm.generate(prompt, SHORT))[0] for prompt in prompts]
    assert llm.generate([], SHORT) == []


FAST, TEXTS = byte_tokenizer().fast, ["one", "prompt"]
ONE, TWO = (FAST(text)["input_ids"] for text in TEXTS)
PADDED = torch.tensor([[0] * 3 + ONE, TWO])
MASK = torch.tensor([[0] * 3 + [1] * 3, [1] * 6])


@pytest.mark.parametrize(
    "prompts",
    [
        TEXTS,
        [ONE, TWO],
        (tuple(ONE), tuple(TWO)),
        [torch.tensor(ONE), torch.tensor([TWO])],
        [np.array(ONE, dtype=np.int32), list(np.array(TWO))],
        [list(torch.tensor(ONE)), np.array([TWO])],
        FAST(TEXTS),
        [FAST(text, return_tensors="pt") for text in TEXTS],
        {"input_ids": PADDED, "attention_mask": MASK},
        [{"prompt": TEXTS[0]}, {"prompt_token_ids": TWO}],
    ],
)
def test_prompts_may_be_tensors_and_what_a_tokenizer_returns(
    llm: DiffusionLLM, prompts: Any
) -> None:
    found = llm.generate(prompts, SHORT)
    assert [each.prompt_token_ids for each in found] == [ONE, TWO]


def test_a_single_prompt_may_have_these_forms_too(llm: DiffusionLLM) -> None:
    (expected,) = ids(llm.generate(torch.tensor(ONE), SHORT))
    for single in (torch.tensor(ONE), torch.tensor([ONE]), FAST("one"), {"prompt": "one"}):
        assert streamed(llm, single, SHORT) == expected
    matrix = torch.tensor([[1, 2], [3, 4]])
    assert [each.prompt_token_ids for each in llm.generate(matrix, SHORT)] == matrix.tolist()


def test_choices_differ_by_seed_and_repeat(llm: DiffusionLLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.5, seed=7, ignore_eos=True)
    (first,), (again,) = llm.generate([9, 8, 7], params), llm.generate([9, 8, 7], params)
    drawn = [choice.token_ids for choice in first.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert drawn == [choice.token_ids for choice in again.outputs]
    assert len({tuple(each) for each in drawn}) == 3
    assert ids(llm.generate([9, 8, 7], params.model_copy(update={"n": 1}))) == drawn[:1]
    seedless = params.model_copy(update={"n": 1, "seed": None})
    assert ids(llm.generate([9, 8, 7], seedless)) != ids(llm.generate([9, 8, 7], seedless))


@pytest.mark.parametrize(
    "wishes",
    [
        {"seed": 3, "temperature": 0.9, "ignore_eos": True},
        {"seed": 3, "temperature": 0.9, "n": 2},
        {"ignore_eos": True, "logprobs": True, "top_logprobs": 4},
    ],
)
def test_a_stream_is_what_generate_returns_in_pieces(
    llm: DiffusionLLM, wishes: dict[str, Any]
) -> None:
    params = SamplingParams(max_tokens=40, **wishes)
    whole = llm.generate("stream me", params)[0].outputs
    deltas = list(llm.stream("stream me", params))
    assert len(deltas) > len(whole)
    for choice in whole:
        own = [delta for delta in deltas if delta.index == choice.index]
        for field in ("token_ids", "steps", "logprobs", "top_logprobs"):
            expected, parts = getattr(choice, field), [getattr(delta, field) for delta in own]
            if expected is None:
                assert not params.logprobs and {*parts} == {None}
            else:
                assert [each for part in parts for each in part] == expected
                assert [len(part) for part in parts] == [len(delta.token_ids) for delta in own]
        assert "".join(delta.text for delta in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logprobs_and_rankings_are_those_of_a_forward_over_the_canvas_of_each_step(
    llm: DiffusionLLM, temperature: float
) -> None:
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": True, "seed": 4}
    asked |= {"temperature": temperature, "diffusion": {"cache": "none", "canvas": "fixed"}}
    choice = llm.generate([1, 2], **asked, top_logprobs=4)[0].outputs[0]
    assert choice.top_logprobs is not None and choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.tokens) == len(choice.steps) == 24
    assert sorted(set(choice.steps)) == list(range(choice.forwards))
    assert choice.cumulative_logprob == sum(choice.logprobs)
    written = [*zip(choice.token_ids, choice.steps, strict=True)]
    for at, (token, now) in enumerate(written):
        canvas = [1, 2, *(each if step < now else 510 for each, step in written)]
        logprobs_V = full_forward(llm.engine.model, canvas)[2 + at].log_softmax(-1)
        assert choice.logprobs[at] == pytest.approx(float(logprobs_V[token]), abs=1e-6)
        best = logprobs_V.topk(4)
        assert [each for each, _ in choice.top_logprobs[at]] == best.indices.tolist()
        told = [logprob for _, logprob in choice.top_logprobs[at]]
        assert told == pytest.approx(best.values.tolist(), abs=1e-6)
    bare = llm.generate([1, 2], **asked)[0].outputs[0]
    assert bare.top_logprobs is None
    assert bare.token_ids == choice.token_ids


def test_stop_string_ends_the_text_before_it_unless_min_tokens_hold(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    whole = llm.generate("stop", params)[0].outputs[0]
    stop = whole.text[5:7]
    for least, text, ended in (
        (0, whole.text[: whole.text.index(stop)], ("stop", stop)),
        (40, whole.text, ("length", None)),
    ):
        asked = params.model_copy(update={"stop": (stop,), "min_tokens": least})
        choice = llm.generate("stop", asked)[0].outputs[0]
        assert choice.text == text and (choice.finish_reason, choice.stop_reason) == ended
        assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
        assert "".join(delta.text for delta in llm.stream("stop", asked)) == text
        assert llm.engine.idle


def test_a_temperature_that_is_next_to_none_is_none() -> None:
    """Below 1e-5 tokens are the most probable ones; at all temperatures they are tokens."""
    tiny = (5e-324, 2.3e-308, 1e-300, 7e-46, 1.5e-45, 1e-38, 9.9e-6)
    with DiffusionLLM(str(LLADA), dtype="float32", max_num_seqs=8, **IDS) as llm:
        asked = SamplingParams(max_tokens=24, ignore_eos=True, seed=1, logprobs=True)

        def tokens(**given: float) -> list[list[int]]:
            each = [asked.model_copy(update=given | {"temperature": t}) for t in temperatures]
            found = [out.outputs[0] for out in llm.generate([[1, 2, 3]] * len(each), each)]
            for choice in found:
                assert 510 not in choice.token_ids and all(0 <= i < 512 for i in choice.token_ids)
                assert all(math.isfinite(logprob) for logprob in choice.logprobs or ())
            return [choice.token_ids for choice in found]

        temperatures: tuple[float, ...] = (0.0, *tiny)
        for filters in ({}, {"top_k": 5}, {"top_p": 0.5}, {"top_p": 5e-324}):
            greedy, *others = tokens(**filters)
            assert all(other == greedy for other in others)
        temperatures = (1e-5, 1.0, 100.0)
        assert tokens(top_p=5e-324) == [greedy] * 3
        assert len({*map(tuple, tokens())}) == 3


def test_infill_writes_between(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    before, after = (FAST(part)["input_ids"] for part in ("before ", " after"))
    two = llm.infill(["before ", ""], [" after", "the end"], params.model_copy(update={"n": 2}))
    assert [len(out.outputs) for out in two] == [2, 2] and two[0].prompt == "before "
    expected = ids(two)[0]
    assert len(expected) == 20
    assert ids(llm.infill(before, after, params)) == [expected] != ids(llm.generate(before, params))


def test_generate_says_once_that_a_chat_model_has_a_template(
    llm: DiffusionLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not of ids, nor of a text with the template's tokens, nor without a template."""
    say_that_there_is_a_template.cache_clear()
    llm.generate("[hi]<|end|>", SHORT)
    llm.generate([5, 6], SHORT)
    with monkeypatch.context() as patch:
        patch.setattr(llm.get_tokenizer(), "chat_template", None)
        llm.generate("hi", SHORT)
    assert say_that_there_is_a_template.cache_info().currsize == 0
    for _ in range(2):
        llm.generate("hi", SHORT)
    assert caplog.text.count("for questions use chat") == 1
    for ask in (llm.stream, llm.watch):
        say_that_there_is_a_template.cache_clear()
        list(ask("hi", SHORT))
        assert say_that_there_is_a_template.cache_info().currsize == 1


def test_chat_uses_the_template_as_transformers_does(llm: DiffusionLLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (expected,) = llm.chat(messages, SHORT)
    text = llm.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "[hi]<|end|>"
    for prompt in (
        text,
        llm.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt"),
        llm.get_tokenizer().apply_chat_template(messages, return_dict=False),
    ):
        (found,) = llm.generate(prompt, SHORT)
        assert found.prompt_token_ids == expected.prompt_token_ids
        assert ids([found]) == ids([expected])
    several = [out for asked in ([messages] * 2, ["hi"], "hi") for out in llm.chat(asked, SHORT)]
    assert [each.prompt_token_ids for each in several] == [expected.prompt_token_ids] * 4


def test_options_apply_where_a_request_is_silent() -> None:
    fixed = {"decoder": {"kind": "fixed", "steps": 3}, "block_length": 8, "canvas": "fixed"}
    options = IDS | {"dtype": "half", "device": torch.device("cpu"), "kv_cache_memory": "1MiB"}
    with DiffusionLLM(str(LLADA), diffusion=fixed, **options) as llm:
        (quiet,) = llm.generate([1, 2], SHORT)
        own = {"decoder": {"kind": "fixed", "steps": 8}}
        (loud,) = llm.generate([1, 2], max_tokens=8, ignore_eos=True, diffusion=own)
        assert llm.engine.kv.keys_LSGD.dtype == torch.float16
        assert llm.limits.num_pages * llm.engine.kv.page_bytes == 1 << 20
    assert (quiet.forwards, loud.forwards) == (3, 8)


def test_what_takes_long_to_compile_is_refused_before_it_has(llm: DiffusionLLM) -> None:
    """In memory too: by the limits of a server."""
    (out,) = llm.generate("abc", max_tokens=8, structured_outputs={"regex": "^x{3}$"})
    assert out.outputs[0].text == "xxx"
    endless = {"regex": "(.*a.{40})"}
    refused(lambda: llm.generate("abc", structured_outputs=endless), "compiling took more than 2 s")


def refused(call: Callable[[], object], message: str, error: type[Exception] = ValueError) -> None:
    """Check that a call is refused in one sentence with these words."""
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate([[1, 2], []]), "prompt is empty"),
        (lambda llm: llm.infill("", ""), "prompt is empty"),
        (lambda llm: llm.infill(["a", "b"], "c"), "2 prefixes for 1 suffixes"),
        (lambda llm: llm.generate([[1, 2], [1] * 2000]), "shorten"),
        (lambda llm: llm.generate([[1], [2]], [SHORT]), "1 SamplingParams for 2 prompts"),
        (lambda llm: llm.generate("x", diffusion={"cache": {"kind": "exact"}}), "bidirectional"),
        (lambda llm: llm.generate(5), "a text or a list of token ids"),
        (lambda llm: llm.generate(["a", 5]), "a text or a list of token ids"),
        (lambda llm: llm.generate([True]), "a text or a list of token ids"),
        (lambda llm: llm.generate(torch.tensor([1.5])), "a text or a list of token ids"),
        (lambda llm: llm.generate({"multi_modal_data": 1}), r"or a mapping with input_ids"),
        (lambda llm: llm.generate("\ud800"), "not valid Unicode"),
        (lambda llm: llm.generate("x", {"max_tokens": 3}), "one SamplingParams"),
        (lambda llm: list(llm.watch("x", SamplingParams(n=5))), "leave n out"),
        (lambda llm: list(llm.stream(["a", "b"])), "takes one prompt"),
        (lambda llm: llm.chat(5), "a conversation is a list"),
        (lambda llm: llm.chat([{"role": "user"}]), "needs a 'role' and a 'content'"),
        (lambda llm: llm.generate([{"role": "user", "content": "x"}]), "give messages to chat"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_leaves_nothing_behind(
    llm: DiffusionLLM, call: Callable[[DiffusionLLM], object], message: str
) -> None:
    refused(lambda: call(llm), message)
    assert llm.engine.idle


def test_a_long_prompt_is_refused_without_a_warning_of_transformers(
    llm: DiffusionLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(llm.get_tokenizer(), "model_max_length", 8)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    refused(lambda: llm.generate("too long" * 200), "shorten")
    assert not [each for each in caplog.records if each.name.startswith("transformers")]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sampling_params": SHORT, "max_tokens": 4}, ValueError, "both .* and max_tokens; write"),
        ({"max_token": 4}, TypeError, "'max_token', did you mean 'max_tokens'"),
        ({"max_new_tokens": 4}, TypeError, "'max_new_tokens'; write max_tokens"),
        ({"do_sample": True}, TypeError, "'do_sample'; write temperature"),
        ({"steps": 4}, TypeError, "'steps'; write diffusion: "),
        ({"params": SHORT}, TypeError, "'params'; it takes sampling_params, or its fields"),
        ({"temperature": -1}, ValueError, "temperature: "),
    ],
)
def test_a_wrong_keyword_is_one_sentence(
    llm: DiffusionLLM, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    for call in (
        lambda: llm.generate("some text", **options),
        lambda: llm.chat([{"role": "user", "content": "some text"}], **options),
        lambda: llm.infill("a", "b", **options),
        lambda: list(llm.stream("some text", **options)),
        lambda: list(llm.watch("some text", **options)),
    ):
        refused(call, message, error)


def test_without_a_tokenizer_only_ids_are_understood_and_after_shutdown_nothing() -> None:
    with DiffusionLLM(str(LLADA), **IDS) as llm:
        refused(lambda: llm.generate("text"), r"no tokenizer\.json; give prompts as token ids")
        refused(lambda: llm.generate([1], stop="x"), "stop strings need a tokenizer")
        refused(lambda: llm.generate([1], bad_words=["x"]), "bad_words need a tokenizer")
        assert llm.generate([1], SHORT)[0].outputs[0].text == ""
    refused(lambda: llm.generate([1]), "has been shut down")


def test_a_model_that_nobody_uses_is_freed_at_once() -> None:
    llm = DiffusionLLM(str(LLADA), **IDS)
    llm.generate([1], SHORT)
    found = weakref.ref(llm)
    gc.disable()  # which would wait with the weights, if they were part of a cycle
    try:
        del llm
        assert found() is None
    finally:
        gc.enable()


def test_bad_words_are_not_written(llm: DiffusionLLM) -> None:
    assert llm.tokenizer is not None
    letters = llm.tokenizer.encode("abcdefghijkl")  # so that a text is spelled in one way
    params = SamplingParams(max_tokens=30, ignore_eos=True, allowed_token_ids=letters)
    text = llm.generate("abc", params)[0].outputs[0].text
    words = tuple(text[at : at + 3] for at in range(0, 27, 4))
    (found,) = llm.generate("abc", params.model_copy(update={"bad_words": words}))[0].outputs
    assert len(text) == len(found.text) == 30
    assert not any(word in found.text for word in words)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4096}, "exceeds what the model was made for"),
        ({"max_num_seq": 1}, "'max_num_seq', did you mean 'max_num_seqs'"),
        ({"kv_cache_memory": 10}, "raise kv_cache_memory"),
        ({"mask_token_id": 5000}, "mask token id 5000 is not in the vocabulary"),
        ({"diffusion": {"decoder": {"kind": "x"}}}, "no kind 'x'; allowed"),
        ({"dtype": "float128"}, "float64"),
        ({"gpu_memory_utilization": 0.9}, "'gpu_memory_utilization'; write kv_cache"),
        ({"trust_remote_code": True}, "'trust_remote_code'; leave it out"),
        ({"torch_dtype": torch.bfloat16}, "'torch_dtype'; write dtype"),
        ({"max_queued_requests": 3}, "unknown option 'max_queued_requests'"),
    ],
)
def test_a_wrong_option_is_one_sentence(options: dict[str, Any], message: str) -> None:
    refused(lambda: DiffusionLLM(str(LLADA), **(IDS | options)), message)


def test_streams_and_batches_share_the_engine_and_who_leaves_frees_it(llm: DiffusionLLM) -> None:
    params, free = SamplingParams(max_tokens=40, ignore_eos=True), llm.engine.kv.num_free
    alone = ids([llm.generate(prompt, params)[0] for prompt in ([1], [2], [3])])
    streams = llm.stream([1], params), llm.stream([2], params)
    found = [[*next(stream).token_ids] for stream in streams]
    left = llm.stream([4], params)
    next(left)
    assert llm.engine.kv.num_free < free
    left.close()  # type: ignore[attr-defined]
    assert ids(llm.generate([3], params)) == alone[2:]
    for written, stream in zip(found, streams, strict=True):
        written += [token for delta in stream for token in delta.token_ids]
    assert found == alone[:2]
    assert llm.engine.kv.num_free == free and llm.engine.idle


def test_a_call_keeps_no_sequences_of_what_has_finished(
    llm: DiffusionLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, counts = llm.engine.run, list[int]()

    def counted(*args: Any) -> Any:
        counts.append(living(Sequence))
        return run(*args)

    monkeypatch.setattr(llm.engine, "run", counted)
    with only_new():
        llm.generate([[1, 2, 3]] * 24, SHORT)
    assert 4 <= max(counts) <= 2 * 4, "more than run at a time, and ran in the plan before"
