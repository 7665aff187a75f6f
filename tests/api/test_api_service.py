"""The service without HTTP, as a batch uses it: defaults and their order, words, ids, deadlines."""

import asyncio
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diffray import SamplingParams
from diffray.cluster.api import choices
from diffray.cluster.api.anthropic import Messages
from diffray.cluster.api.bodies import ChatBody, CompletionBody
from diffray.cluster.api.dialects import answer_whole
from diffray.cluster.api.errors import ApiError
from diffray.cluster.api.fields import parse
from diffray.cluster.api.params_builder import ParamsBuilder
from diffray.cluster.api.responses import Responses
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import GenerationDefaults, read_generation_defaults
from diffray.cluster.api.tokens import Tokens
from diffray.cluster.control.engine_client import EngineClient
from diffray.cluster.frontend.given import bad_tokens
from diffray.components.config import InvalidField
from diffray.components.policy import DiffusionParams
from diffray.kernels.noise import derived_seed
from diffray.workers.admission import CheckedRequest
from diffray.workers.limits import Limits
from diffray.workers.messages import Update
from tests.helpers.byte_tokenizer import TOKENIZER
from tests.helpers.recorder import LIMITS, Recorder
from tests.helpers.toy import EOS

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
IDS: dict[str, Any] = {"prompt": [1, 2, 3]}
Updates = AsyncGenerator[Update, None]


def service(engine: EngineClient, **options: Any) -> Service:
    return Service(engine, TOKENIZER, ["some"], **options)


def refused(call: Coroutine[Any, Any, Any]) -> ApiError:
    with pytest.raises(ApiError) as error:
        asyncio.run(call)
    return error.value


def test_answers_are_plain_objects() -> None:
    made = asyncio.run(service(Recorder()).chat(HELLO | {"return_token_ids": True}))
    assert json.loads(json.dumps(made)) == made
    (choice,) = made["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert choice["token_ids"] == TOKENIZER.encode("abc")
    assert made["prompt_token_ids"] == TOKENIZER.encode_chat(HELLO["messages"])
    assert made["usage"]["completion_tokens"] == 3
    assert made["diffusion"] == {"forwards": 3, "tokens_per_forward": 1.0}
    assert refused(service(Recorder()).chat(HELLO | {"stream": True})).param == "stream"
    assert refused(service(Recorder()).complete([])).status == 400


async def test_a_request_overrides_the_server_and_the_server_the_checkpoint() -> None:
    server = GenerationDefaults(temperature=0.3, max_tokens=40)
    checkpoint = GenerationDefaults(temperature=0.9, top_p=0.8, repetition_penalty=1.2)
    engine = Recorder()
    serving = service(engine, defaults=server.over(checkpoint))
    await serving.complete(IDS)
    await serving.complete(IDS | {"temperature": 0, "top_p": 1.0, "max_tokens": 7})
    await serving.complete(IDS | {"repetition_penalty": 1.0})
    await service(engine).complete(IDS)
    await service(engine).chat(HELLO)
    params = [request.params for request, _, _ in engine.requests]
    found = [(p.temperature, p.top_p, p.repetition_penalty, p.max_tokens) for p in params]
    room = LIMITS.context - len(TOKENIZER.encode_chat(HELLO["messages"]))
    assert found == [
        (0.3, 0.8, 1.2, 40),
        (0.0, 1.0, 1.2, 7),
        (0.3, 0.8, 1.0, 40),
        (0.0, 1.0, 1.0, 16),
        (0.0, 1.0, 1.0, min(512, room)),
    ]


def test_every_way_of_sampling_reaches_the_engine() -> None:
    """What a request leaves out of its policy is the server's."""
    asked: dict[str, Any] = {"n": 1, "max_tokens": 9, "min_tokens": 2, "temperature": 0.5}
    asked |= {"top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 4, "stop": ["xyz"]}
    asked |= {"presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5}
    asked |= {"no_repeat_ngram_size": 3, "stop_token_ids": [5], "logit_bias": {"5": -3}}
    asked |= {"allowed_token_ids": [5, 6], "include_stop_str_in_output": True, "ignore_eos": True}
    asked |= {"skip_special_tokens": False, "diffusion": {"cache": {"kind": "none"}}}
    server = {"block_length": 1, "cfg_scale": 0.5}
    engine = Recorder()
    default = DiffusionParams.model_validate(server)
    asyncio.run(service(engine, diffusion=default).complete(IDS | asked | {"cache_salt": "mine"}))
    request = engine.requests[0][0]
    expected = SamplingParams.model_validate(asked | {"diffusion": server | asked["diffusion"]})
    assert (request.params, request.cache_salt) == (expected, "mine")


def test_a_priority_needs_a_server_that_allows_it() -> None:
    engine = Recorder()
    error = refused(service(engine).complete(IDS | {"priority": -3}))
    assert (error.status, error.param, engine.requests) == (400, "priority", [])
    assert "--scheduling-policy priority" in error.message
    asyncio.run(service(engine).complete(IDS | {"priority": 0}))


def test_choices_have_seeds_of_their_own() -> None:
    engine = Recorder()
    asked = {"prompt": [[1], [2]], "n": 2, "seed": 9, "priority": -3}
    made = asyncio.run(service(engine, scheduling_policy="priority").complete(asked))
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    seeds = [request.params.seed for request, _, _ in engine.requests]
    assert seeds == [9, derived_seed(9, 1)] * 2
    assert {priority for _, priority, _ in engine.requests} == {-3}
    assert len({request.uid for request, _, _ in engine.requests}) == 4
    assert made["usage"] == {
        "prompt_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 2},  # of each prompt's first choice
        "completion_tokens": 12,
        "total_tokens": 14,
    }


def test_a_missed_deadline_is_504() -> None:
    error = refused(service(Recorder(), deadline=0.5).complete(IDS))
    assert (error.status, error.code) == (504, "deadline_exceeded")


async def test_usage_and_metrics_say_what_is_approximate() -> None:
    class Approximating(Recorder):
        async def submit(self, *given: Any, **more: Any) -> Updates:
            async for update in super().submit(*given, **more):
                update.cached_tokens, update.approximate = 2, True
                yield update

    serving = service(Approximating())
    asked = Messages(HELLO | {"max_tokens": 9}), Responses({"input": "hello"})
    own = (await serving.complete(IDS))["usage"]
    messages, responses = [(await answer_whole(serving, each))["usage"] for each in asked]
    assert own["prompt_tokens_details"] == {"cached_tokens": 2, "approximate": True}
    assert messages["approximate"] is responses["input_tokens_details"]["approximate"] is True
    text = (await serving.prometheus()).decode()
    counted = dict(re.findall(r"^diffray:prefix_cache_(\w+)_total{.*} (\S+)", text, re.M))
    chat = len(TOKENIZER.encode_chat(HELLO["messages"]))
    queries = f"{len(IDS['prompt']) + 2 * chat}.0"
    assert counted == {"queries": queries, "hits": "6.0", "approximate_hits": "6.0"}


def test_metrics_divide_the_time_of_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first update tells how long ago it was admitted; until then it was in the queue."""
    now = 100.0

    class Clocked(Recorder):
        async def submit(self, request: CheckedRequest, **options: Any) -> Updates:
            nonlocal now
            now += 2.0
            first = True
            async for update in super().submit(request, **options):
                now += 3.0 if first else 0.5
                update.ran, first = (3.0 if first else None), False
                yield update

    monkeypatch.setattr(choices, "time", SimpleNamespace(perf_counter=lambda: now))
    serving = service(Clocked())
    asyncio.run(serving.complete(IDS))
    text = asyncio.run(serving.prometheus()).decode()
    sums = dict(re.findall(r"^diffray:(\w+)_seconds_sum{.*} (\S+)", text, re.M))
    assert {name: float(value) for name, value in sums.items()} == {
        "request_queue_time": 2.0, "request_prefill_time": 3.0, "request_decode_time": 1.0,
        "request_inference_time": 4.0, "e2e_request_latency": 6.0, "time_to_first_token": 5.0,
        "inter_token_latency": 1.0, "request_time_per_output_token": 0.5,
    }  # fmt: skip


async def test_leaving_a_stream_cancels_its_requests() -> None:
    closed: list[int] = []

    class Endless(Recorder):
        async def submit(self, request: CheckedRequest, **options: Any) -> Updates:
            try:
                while True:
                    await asyncio.sleep(0)
                    yield Update(request.uid, TOKENIZER.encode("x"), [0], [0.0])
            finally:
                closed.append(request.uid)

    chunks = service(Endless()).stream(CompletionBody, IDS | {"stream": True, "n": 3})
    async with aclosing(chunks):
        await anext(chunks)
    assert len(closed) == 3
    # A stop string ends a choice before its engine does.
    made = await service(Endless()).complete(IDS | {"stop": "xxx", "max_tokens": 50})
    assert made["choices"][0]["text"] == "" and made["usage"]["completion_tokens"] == 3
    assert len(closed) == 4


def test_bad_words_are_tokens_with_and_without_a_space() -> None:
    # A byte is a token; after a space it is the same, so that needs no other.
    (x, y), (space,) = TOKENIZER.encode("xy"), TOKENIZER.encode(" ")
    engine = Recorder()
    asyncio.run(service(engine).complete(IDS | {"bad_words": ["x", " ", "xy", "x"]}))
    params = engine.requests[0][0].params
    assert (params.bad_token_ids, params.bad_token_sequences) == ((x, space), ((x, y),))
    assert not params.bad_words


def test_a_word_after_a_space_may_be_other_tokens() -> None:
    class Spaced:
        """One whose words begin with their space, and that knows few of them."""

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert not add_special_tokens
            return {"cat": [1, 2], " cat": [3], "": []}.get(text.replace("!", ""), [9, 9])

    tokenizer: Any = Spaced()
    assert bad_tokens(["cat"], tokenizer) == ((3,), ((1, 2),))
    with pytest.raises(InvalidField, match="'!' has no tokens"):
        bad_tokens(["!"], tokenizer)


def builder(limits: Limits = LIMITS, **defaults: Any) -> ParamsBuilder:
    return ParamsBuilder(limits, TOKENIZER, DiffusionParams(), GenerationDefaults(**defaults))


@pytest.mark.parametrize(("block_causal", "room"), [(False, 100), (True, 96)])
def test_a_chat_gets_what_is_left_of_the_context(block_causal: bool, room: int) -> None:
    spec = replace(LIMITS.spec, block_causal=block_causal)
    made = builder(replace(LIMITS, spec=spec, context=100))
    body = parse(ChatBody, HELLO)
    assert made.params(body, 30).max_tokens == room - 30
    told = f"{room} tokens. However, you requested {room + 1} tokens"
    with pytest.raises(ApiError, match=told) as error:
        made.params(body, room)
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")


def test_the_room_of_an_answer() -> None:
    """A default length fits, blocks after a prompt are whole, and guidance halves the pages."""
    made = builder(replace(LIMITS, context=100), max_tokens=90)
    for body in (parse(ChatBody, HELLO), parse(CompletionBody, IDS)):
        assert [made.params(body, taken).max_tokens for taken in (5, 30)] == [90, 70]
    made = builder(replace(LIMITS, num_pages=10, page_size=8))
    for scale, room in ((0, 80), (1, 40)):
        assert made.room(DiffusionParams(cfg_scale=scale), 0) == room
    spec = replace(LIMITS.spec, block_causal=True, encodes=True, block_length=32)
    made = builder(replace(LIMITS, spec=spec, context=200))
    assert made.params(parse(ChatBody, HELLO | {"max_tokens": 500}), 30).max_tokens == 160


def test_generation_config_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults()
    file = tmp_path / "generation_config.json"
    greedy = '{"do_sample": false, "temperature": 0.7, "no_repeat_ngram_size": 3}'
    for text, expected in (
        ('{"temperature": 0.7, "max_new_tokens": 99, "eos_token_id": 5}', (0.7, None, 99)),
        ('{"top_k": 50, "top_p": null}', (None, 50, None)),
        (greedy, (0.0, None, None)),
    ):
        file.write_text(text)
        with caplog.at_level(logging.WARNING):
            found = read_generation_defaults(tmp_path)
        assert (found.temperature, found.top_k, found.max_tokens) == expected
    assert "no_repeat_ngram_size is not supported" in caplog.text


def test_messages_may_be_parts_and_earlier_answers() -> None:
    tokenize = partial(service(Recorder()).ask, "/tokenize")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer: dict[str, Any] = {"role": "assistant", "content": "c", "tool_calls": []}
    answer |= {"refusal": None, "audio": None}
    messages = [{"role": "developer", "content": parts}, answer]
    found = asyncio.run(tokenize({"messages": messages}))["tokens"]
    assert TOKENIZER.decode(found, skip_special_tokens=False) == "[a\nb]<|end|>[c]<|end|>"


def test_without_a_tokenizer_ids_still_work() -> None:
    serving = Service(Recorder(), None, ["some"])
    body = IDS | {"logprobs": 0, "return_token_ids": True, "echo": False}
    (choice,) = asyncio.run(serving.complete(body))["choices"]
    first = TOKENIZER.encode("a")[0]
    assert (choice["text"], choice["token_ids"][0]) == ("", first)
    assert choice["logprobs"]["tokens"][0] == f"token_id:{first}"
    for more in ({"prompt": "a"}, {"stop": "x"}, {"bad_words": ["x"]}, {"guided_choice": ["a"]}):
        assert "tokenizer" in refused(serving.complete(IDS | more)).message
    assert "tokenizer" in refused(serving.chat(HELLO)).message


def test_tokens_of_partial_characters_have_bytes() -> None:
    texts = Tokens(TOKENIZER, LIMITS)
    ids = TOKENIZER.encode("a\u20ac")
    spelled = [texts[token] for token in ids]
    assert spelled[0] == ("a", [97])
    assert all(text == "\ufffd" for text, _ in spelled[1:])
    assert bytes(byte for _, each in spelled for byte in each).decode() == "a\u20ac"


def test_the_end_token_is_a_stop_reason_only_on_request() -> None:
    class Ending(Recorder):
        async def submit(self, request: CheckedRequest, **options: Any) -> Updates:
            yield Update(request.uid, [EOS], [0], [0.0], "stop", EOS, 1)

    for asked, reason in (({}, None), ({"stop_token_ids": [EOS]}, EOS)):
        (choice,) = asyncio.run(service(Ending()).complete(IDS | asked))["choices"]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", reason)


MANY_IDS = list(range(256)) * 256
GREEDY: dict[str, dict[str, Any]] = {
    "prompts with words and ids": {
        "prompt": ["a"] * 1024,
        "bad_words": list(map(chr, range(33, 127))),
        "allowed_token_ids": MANY_IDS,
    },
    "choices": {"prompt": [[1]] * 8, "n": 128, "allowed_token_ids": MANY_IDS},
    "log-probabilities": {"prompt": [[1]] * 100, "logprobs": 20, "max_tokens": 120},
    "ids": {"prompt": [1] * 4_000_000},
}


async def longest_hold(work: Coroutine[Any, Any, Any]) -> float:
    """Return the most processor time that the loop's thread took between two looks at it."""
    task, longest = asyncio.create_task(work), 0.0
    while not task.done():
        begin = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - begin)
    with suppress(ApiError):
        task.result()
    return longest


@pytest.mark.slow
@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.rotate(1)
def test_no_request_holds_the_loop_for_long(name: str) -> None:
    """The same loop streams to others and receives from the coordinator."""

    class Ranked(Recorder):
        async def submit(self, *given: Any, **more: Any) -> Updates:
            async for update in super().submit(*given, **more):
                update.top_logprobs = [[(1, -0.5)] * 20]
                yield update

    assert asyncio.run(longest_hold(service(Ranked()).complete(GREEDY[name]))) < 2


def test_more_log_probabilities_than_one_answer_can_hold_are_refused() -> None:
    asked = IDS | {"n": 128, "logprobs": 20, "max_tokens": 200}
    assert refused(service(Recorder()).complete(asked)).param == "logprobs"


async def test_a_slow_reader_holds_back_several_choices() -> None:
    sent = 0

    class Eager(Recorder):
        async def submit(self, request: CheckedRequest, **options: Any) -> Updates:
            nonlocal sent
            for number in range(100_000):
                sent += 1
                yield Update(request.uid, [number % 256], [number], [-0.5], None, forwards=number)
                await asyncio.sleep(0)

    body = IDS | {"n": 2, "stream": True, "max_tokens": 200}
    async with aclosing(service(Eager()).stream(CompletionBody, body)) as chunks:
        await anext(chunks)
        for _ in range(1000):
            await asyncio.sleep(0)
    assert sent < 100


def test_an_invalid_prompt_has_the_endpoint_s_name() -> None:
    few = replace(LIMITS, spec=replace(LIMITS.spec, vocab_size=5))  # no letter is among the ids
    serving = service(Recorder(few))
    assert refused(serving.complete({"prompt": "abc"})).param == "prompt"
    assert refused(serving.chat(HELLO)).param == "messages"
