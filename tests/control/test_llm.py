"""The public Python API, on a tiny checkpoint with and without a tokenizer."""

import logging
import math
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch

from diffray import DiffusionLLM, SamplingParams
from diffray.components.denoiser import Denoiser
from diffray.components.sequence import Sequence
from tests.helpers.byte_tokenizer import byte_tokenizer
from tests.helpers.living import living, only_new
from tests.helpers.paths import GOLDEN

LLADA = GOLDEN / "llada"
IDS = {"mask_token_id": 510, "eos_token_id": 511}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiffusionLLM]:
    folder = tmp_path_factory.mktemp("llm") / "checkpoint"
    shutil.copytree(LLADA, folder)
    byte_tokenizer().fast.save_pretrained(folder)
    with DiffusionLLM(str(folder), dtype="float64", max_num_seqs=4, **IDS) as llm:  # type: ignore[arg-type]
        yield llm


def test_the_example_works_as_written(llm: DiffusionLLM) -> None:
    params = SamplingParams(
        max_tokens=64,
        temperature=0,
        ignore_eos=True,
        seed=1,
        diffusion={
            "block_length": 16,
            "iteration": {"kind": "blockwise"},
            "decoder": {"kind": "threshold", "threshold": 0.9},
            "cache": {"kind": "vicinity", "before": 16, "after": 16, "warmup": 4},
        },
    )
    prompts: list[str | list[int]] = [[1, 2, 3], "a string"]
    out = llm.generate(prompts, [params, params])
    assert [len(o.outputs[0].token_ids) for o in out] == [64, 64]
    assert out[0].outputs[0].finish_reason == "length"
    assert out[0].prompt is None and out[1].prompt == "a string"
    assert (out[0].prompt_tokens, out[0].completion_tokens) == (3, 64)
    assert 0 < out[0].forwards <= 64
    assert out[0].tokens_per_forward == 64 / out[0].forwards
    assert out[0].finished
    assert out[0].outputs[0].logprobs is None


def test_one_prompt_or_many_in_their_order(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    prompts = [[5] * (1 + 7 * i % 11) for i in range(9)]
    many = llm.generate(prompts, params)
    assert [o.prompt_token_ids for o in many] == prompts
    for prompt, out in zip(prompts, many, strict=True):
        (one,) = llm.generate(prompt, params)
        assert one.outputs[0].token_ids == out.outputs[0].token_ids
    (text,) = llm.generate("some text", params)
    assert text.prompt == "some text"
    assert llm.generate([], params) == []


def test_choices_differ_by_seed_and_repeat(llm: DiffusionLLM) -> None:
    params = SamplingParams(n=3, max_tokens=12, temperature=1.5, seed=7, ignore_eos=True)
    (first,), (again,) = llm.generate([9, 8, 7], params), llm.generate([9, 8, 7], params)
    ids = [choice.token_ids for choice in first.outputs]
    assert [choice.index for choice in first.outputs] == [0, 1, 2]
    assert ids == [choice.token_ids for choice in again.outputs]
    assert len({tuple(i) for i in ids}) == 3
    (alone,) = llm.generate([9, 8, 7], params.model_copy(update={"n": 1}))
    assert alone.outputs[0].token_ids == ids[0]


def test_without_a_seed_each_call_draws_its_own(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=16, temperature=2.0, ignore_eos=True)
    (first,), (again,) = llm.generate([9, 8, 7], params), llm.generate([9, 8, 7], params)
    assert first.outputs[0].token_ids != again.outputs[0].token_ids


def test_trajectory_on_request(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=24, logprobs=True, ignore_eos=True)
    choice = llm.generate([1, 2], params)[0].outputs[0]
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(choice.steps) == 24
    assert all(logprob <= 0 for logprob in choice.logprobs)
    assert sorted(set(choice.steps)) == list(range(choice.forwards))
    assert choice.cumulative_logprob == sum(choice.logprobs)


def test_stream_equals_generate(llm: DiffusionLLM) -> None:
    for params in (
        SamplingParams(max_tokens=40, seed=3, temperature=0.9, ignore_eos=True),
        SamplingParams(max_tokens=40, n=2, seed=3, temperature=0.9),
    ):
        whole = llm.generate("stream me", params)[0].outputs
        ids: dict[int, list[int]] = {}
        text: dict[int, str] = {}
        reasons: dict[int, str | None] = {}
        for delta in llm.stream("stream me", params):
            ids.setdefault(delta.index, []).extend(delta.token_ids)
            text[delta.index] = text.get(delta.index, "") + delta.text
            reasons[delta.index] = delta.finish_reason
        for choice in whole:
            assert ids[choice.index] == choice.token_ids
            assert text[choice.index] == choice.text
            assert reasons[choice.index] == choice.finish_reason


def test_a_stream_tells_logprobs_of_exactly_its_tokens(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=24, logprobs=True, top_logprobs=2, ignore_eos=True)
    whole = llm.generate([1, 2], params)[0].outputs[0]
    deltas = list(llm.stream([1, 2], params))
    assert len(deltas) > 1
    logprobs, steps, top_logprobs = [], [], []
    for delta in deltas:
        assert delta.logprobs is not None and delta.top_logprobs is not None
        assert len(delta.logprobs) == len(delta.top_logprobs) == len(delta.token_ids)
        logprobs += delta.logprobs
        steps += delta.steps
        top_logprobs += delta.top_logprobs
    assert (logprobs, steps, top_logprobs) == (whole.logprobs, whole.steps, whole.top_logprobs)
    bare = next(llm.stream([1, 2], SamplingParams(max_tokens=24)))
    assert (bare.logprobs, bare.top_logprobs) == (None, None)
    assert len(bare.steps) == len(bare.token_ids)


def test_stop_string_ends_the_text_before_it(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    whole = llm.generate("stop", params)[0].outputs[0]
    stop = whole.text[5:7]
    params = params.model_copy(update={"stop": (stop,)})
    choice = llm.generate("stop", params)[0].outputs[0]
    assert choice.text == whole.text[: whole.text.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.token_ids == whole.token_ids[: len(choice.token_ids)]
    streamed = "".join(delta.text for delta in llm.stream("stop", params))
    assert streamed == choice.text
    assert llm.engine.idle


def test_min_tokens_hold_for_stop_strings(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    whole = llm.generate("stop", params)[0].outputs[0]
    stop = whole.text[5:7]
    held = params.model_copy(update={"stop": (stop,), "min_tokens": 40})
    choice = llm.generate("stop", held)[0].outputs[0]
    assert (choice.token_ids, choice.text) == (whole.token_ids, whole.text)
    assert choice.finish_reason == "length"
    assert "".join(delta.text for delta in llm.stream("stop", held)) == whole.text


def test_a_temperature_that_is_next_to_none_is_none() -> None:
    """Below 1e-5 tokens are the most probable ones; at all temperatures they are tokens."""
    tiny = (5e-324, 2.3e-308, 1e-300, 7e-46, 1.5e-45, 1e-38, 9.9e-6)
    with DiffusionLLM(str(LLADA), dtype="float32", max_num_seqs=8, **IDS) as llm:  # type: ignore[arg-type]
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


def test_leaving_a_stream_frees_its_pages(llm: DiffusionLLM) -> None:
    free = llm.engine.kv.num_free
    stream = llm.stream([1, 2, 3], SamplingParams(max_tokens=64, ignore_eos=True))
    next(stream)
    assert llm.engine.kv.num_free < free
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.kv.num_free == free
    assert llm.engine.idle


def test_watch_ends_with_what_generate_returns(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    canvases = list(llm.watch([4, 5, 6], params))
    hidden = [canvas.count(None) for canvas in canvases]
    assert hidden == sorted(hidden, reverse=True)
    assert canvases[-1] == llm.generate([4, 5, 6], params)[0].outputs[0].token_ids


def test_a_long_prompt_is_refused_without_a_warning(
    llm: DiffusionLLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer.fast, "model_max_length", 8)
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with pytest.raises(ValueError, match="shorten"):
        llm.generate("too long" * 200)
    assert caplog.text == ""


def test_infill_writes_between(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    (text,) = llm.infill("before ", " after", params)
    assert llm.tokenizer is not None
    before, after = (llm.tokenizer.encode(part, False) for part in ("before ", " after"))
    (ids,) = llm.infill(before, after, params)
    assert text.prompt == "before "
    assert len(text.outputs[0].token_ids) == 20
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids
    assert text.outputs[0].token_ids != llm.generate(before, params)[0].outputs[0].token_ids
    two = llm.infill(["before ", ""], [" after", "the end"], params.model_copy(update={"n": 2}))
    assert [len(out.outputs) for out in two] == [2, 2]
    assert two[0].outputs[0].token_ids == text.outputs[0].token_ids
    with pytest.raises(ValueError, match="2 prefixes for 1 suffixes"):
        llm.infill(["a", "b"], "c", params)
    with pytest.raises(ValueError, match="prompt is empty"):
        llm.infill("", "", params)
    assert llm.engine.idle


def test_rankings_on_request(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=24, logprobs=True, top_logprobs=4, ignore_eos=True)
    choice = llm.generate([1, 2], params)[0].outputs[0]
    assert choice.top_logprobs is not None and choice.logprobs is not None
    assert [len(top) for top in choice.top_logprobs] == [4] * 24
    assert [top[0][0] for top in choice.top_logprobs] == choice.token_ids
    assert [top[0][1] for top in choice.top_logprobs] == pytest.approx(choice.logprobs, abs=1e-6)
    bare = llm.generate([1, 2], params.model_copy(update={"top_logprobs": 0}))[0].outputs[0]
    assert bare.top_logprobs is None
    assert bare.token_ids == choice.token_ids


def test_chat_uses_the_template(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    message = [{"role": "user", "content": "hi"}]
    (out,) = llm.chat(message, params)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(out.prompt_token_ids, False) == "[hi]<|end|>"
    two = llm.chat([message, message], params)
    assert [o.prompt_token_ids for o in two] == [out.prompt_token_ids] * 2


def test_server_defaults_apply_where_a_request_is_silent() -> None:
    fixed = {"decoder": {"kind": "fixed", "steps": 3}, "block_length": 8}
    with DiffusionLLM(str(LLADA), diffusion=fixed, **IDS) as llm:  # type: ignore[arg-type]
        quiet = llm.generate([1, 2], SamplingParams(max_tokens=8, ignore_eos=True))[0]
        own = SamplingParams(
            max_tokens=8, ignore_eos=True, diffusion={"decoder": {"kind": "fixed", "steps": 8}}
        )
        loud = llm.generate([1, 2], own)[0]
    assert (quiet.forwards, loud.forwards) == (3, 8)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([[]], None, "prompt is empty"),
        ([""], None, "prompt is empty"),
        ([[1] * 2000], None, "shorten"),
        ([[600]], None, "not in the vocabulary"),
        ([[1], [2]], [SamplingParams()], "1 SamplingParams for 2 prompts"),
        ([[1]], SamplingParams(diffusion={"cache": {"kind": "exact"}}), "bidirectional"),
    ],
)
def test_a_refused_request_leaves_nothing_behind(
    llm: DiffusionLLM, prompts: list[list[int]], params: SamplingParams | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate([[1, 2], *prompts] if params is None else prompts, params)
    assert llm.engine.idle


def test_bad_words_are_not_written(llm: DiffusionLLM) -> None:
    assert llm.tokenizer is not None
    letters = llm.tokenizer.encode("abcdefghijkl")  # so that a text is spelled in one way
    params = SamplingParams(max_tokens=30, ignore_eos=True, allowed_token_ids=letters)
    text = llm.generate("abc", params)[0].outputs[0].text
    words = tuple(text[at : at + 3] for at in range(0, 27, 4))
    (found,) = llm.generate("abc", params.model_copy(update={"bad_words": words}))[0].outputs
    assert len(text) == len(found.text) == 30
    assert not any(word in found.text for word in words)


def test_without_a_tokenizer_only_ids_are_understood() -> None:
    with DiffusionLLM(str(LLADA), **IDS) as llm:  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"no tokenizer\.json; give prompts as token ids"):
            llm.generate("text")
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            llm.generate([1], SamplingParams(stop="x"))
        with pytest.raises(ValueError, match="bad_words need a tokenizer"):
            llm.generate([1], SamplingParams(bad_words=["x"]))
        assert llm.generate([1], SamplingParams(max_tokens=3))[0].outputs[0].text == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_model_len": 4096}, "exceeds what the model was made for"),
        ({"max_num_seqs": 0}, "max_num_seqs: Input should be greater than or equal to 1"),
        ({"steps_per_round": 0}, "steps_per_round: Input should be greater than or equal to 1"),
        ({"kernels": "tritn"}, "kernels: Input should be 'auto', 'torch' or 'triton'"),
        ({"max_num_seq": 1}, "unknown option 'max_num_seq', did you mean 'max_num_seqs'"),
        ({"kv_cache_memory": 10}, "raise kv_cache_memory"),
        ({"mask_token_id": 5000}, "mask token id 5000 is not in the vocabulary"),
        ({"diffusion": {"decoder": {"kind": "x"}}}, "no kind 'x'; allowed"),
        ({"dtype": "float128"}, "float64"),
    ],
)
def test_a_wrong_option_is_one_sentence(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        DiffusionLLM(str(LLADA), **{**IDS, **options})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        ("bf16", torch.bfloat16),
        ("half", torch.float16),
        ("float", torch.float32),
    ],
)
def test_devices_and_dtypes_are_torchs_or_names(
    given: str | torch.dtype, dtype: torch.dtype
) -> None:
    with DiffusionLLM(str(LLADA), device=torch.device("cpu"), dtype=given, **IDS) as llm:  # type: ignore[arg-type]
        assert llm.engine.kv.keys_LSGD.dtype == dtype


def test_streams_and_batches_share_the_engine(llm: DiffusionLLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in ([1], [2], [3])]
    first, second = llm.stream([1], params), llm.stream([2], params)
    found: list[list[int]] = [[], []]
    for ids, stream in zip(found, (first, second), strict=True):
        ids += next(stream).token_ids
    assert llm.generate([3], params)[0].outputs[0].token_ids == alone[2]
    for ids, stream in zip(found, (first, second), strict=True):
        for delta in stream:
            ids += delta.token_ids
    assert found == alone[:2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(5), "a text or a list of token ids"),
        (lambda llm: llm.generate(["a", 5]), "a text or a list of token ids"),
        (lambda llm: llm.generate([[1.5]]), "a text or a list of token ids"),
        (lambda llm: llm.generate("\ud800"), "not valid Unicode"),
        (lambda llm: llm.generate("x", {"max_tokens": 3}), "one SamplingParams"),
        (lambda llm: list(llm.watch("x", SamplingParams(n=5))), r"one answer; leave n out .*5"),
        (lambda llm: llm.chat("x"), "a conversation is a list"),
        (lambda llm: llm.generate([{"role": "user", "content": "x"}]), "give messages to chat"),
        (lambda llm: llm.generate([True]), "a text or a list of token ids"),
        (lambda llm: llm.generate(torch.tensor([1.5])), "a text or a list of token ids"),
        (lambda llm: llm.generate({"multi_modal_data": 1}), r"or a mapping with input_ids"),
        (lambda llm: list(llm.stream(["a", "b"])), r"takes one prompt \(given: 2\)"),
        (lambda llm: llm.chat([{"role": "user"}]), "needs a 'role' and a 'content'"),
    ],
)
def test_a_wrong_call_is_one_sentence(
    llm: DiffusionLLM, call: Callable[[DiffusionLLM], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call(llm)
    assert "\n" not in str(caught.value)


def test_repr_tells_the_model_and_where_it_is(llm: DiffusionLLM) -> None:
    assert repr(llm) == f"DiffusionLLM({llm.model!r}, dtype='float64', device='cpu')"


def test_memory_can_be_given_with_a_unit(llm: DiffusionLLM) -> None:
    with DiffusionLLM(llm.model, kv_cache_memory="64KiB", **IDS) as small:  # type: ignore[arg-type]
        by_bytes = DiffusionLLM(llm.model, kv_cache_memory=64 * 1024, **IDS)  # type: ignore[arg-type]
        assert small.engine.kv.num_pages == by_bytes.engine.kv.num_pages
    with pytest.raises(ValueError, match="'4 gigs' is not an amount of memory; write bytes"):
        DiffusionLLM(llm.model, kv_cache_memory="4 gigs")


def test_after_shutdown_a_call_says_so() -> None:
    llm = DiffusionLLM(str(LLADA), **IDS)  # type: ignore[arg-type]
    llm.shutdown()
    with pytest.raises(ValueError, match="has been shut down"):
        llm.generate([1])


def test_an_interrupt_frees_everything_and_the_next_call_works(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = DiffusionLLM(str(LLADA), dtype="float64", mask_token_id=510, eos_token_id=511)
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    expected = llm.generate([1, 2, 3], params)[0].outputs[0].token_ids
    free, forward, calls = llm.engine.kv.num_free, Denoiser.forward, count()

    def interrupted(*args: Any) -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return forward(*args)

    monkeypatch.setattr(Denoiser, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2, 3]] * 3, params)
    assert llm.engine.idle and llm.engine.kv.num_free == free
    assert llm.generate([1, 2, 3], params)[0].outputs[0].token_ids == expected


def test_a_call_keeps_no_sequences_of_what_has_finished(
    llm: DiffusionLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, most = llm.engine.run, 0

    def counted(*args: Any) -> Any:
        nonlocal most
        most = max(most, living(Sequence))
        return run(*args)

    monkeypatch.setattr(llm.engine, "run", counted)
    with only_new():
        llm.generate([[1, 2, 3]] * 24, SamplingParams(max_tokens=8, ignore_eos=True))
    assert 4 <= most <= 2 * 4, "more than run at a time, and ran in the plan before"
