"""Stock OpenAI clients against a live server: every answer is the one that DiffusionLLM gives."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

from diffray import SamplingParams
from tests.helpers.api_server import Served, serve_model

pytestmark = pytest.mark.slow

MESSAGES: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
PROMPT = "<role>HUMAN</role>What is 7 times 6?<|role_end|><role>ASSISTANT</role>"


@pytest.fixture(scope="module", params=["demo", "demo-llada2"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serve_model(request.param, draft_overhead=10_000) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0, "max_tokens": 48},
        {"temperature": 1.5, "max_tokens": 24, "n": 3, "seed": 11},
    ],
)
def test_chats_and_their_streams(served: Served, client: OpenAI, asked: dict[str, Any]) -> None:
    (expected,) = served.llm.chat(MESSAGES, SamplingParams(**asked))
    asked = asked | {"model": served.name, "messages": MESSAGES}
    whole = client.chat.completions.create(**asked)
    ours = [(c.index, c.message.role, c.message.content, c.finish_reason) for c in whole.choices]
    theirs = [(c.text, c.finish_reason) for c in expected.outputs]
    assert ours == [(n, "assistant", *each) for n, each in enumerate(theirs)]
    assert whole.id.startswith("chatcmpl-") and whole.usage is not None
    assert whole.usage.prompt_tokens == expected.prompt_tokens
    assert whole.usage.completion_tokens == expected.completion_tokens
    assert whole.usage.total_tokens == expected.prompt_tokens + expected.completion_tokens
    told: Any = {"include_usage": True}
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options=told))
    *parts, usage = chunks
    assert len({chunk.id for chunk in chunks}) == 1
    assert usage.choices == [] and usage.usage == whole.usage
    assert all(part.usage is None for part in parts)
    for choice in whole.choices:
        own = [c for part in parts for c in part.choices if c.index == choice.index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert "".join(c.delta.content or "" for c in own) == choice.message.content
        assert all(c.finish_reason is None for c in own[:-1])
        assert own[-1].finish_reason == choice.finish_reason


@pytest.mark.parametrize("stop", [[], ["4"], ["+"]])
def test_logprobs(served: Served, client: OpenAI, stop: list[str]) -> None:
    """Those of the text, and no others: guidance reads the text from them."""
    asked: Any = {"model": served.name, "messages": MESSAGES, "temperature": 0, "max_tokens": 32}
    asked |= {"logprobs": True, "top_logprobs": 3, "stop": stop}
    answer = client.chat.completions.create(**asked).choices[0]
    params = SamplingParams(max_tokens=32, logprobs=True, stop=stop)
    choice = served.llm.chat(MESSAGES, params)[0].outputs[0]
    logprobs = answer.logprobs
    assert logprobs is not None and logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.message.content
    assert 0 < len(logprobs.content) < len(choice.token_ids)
    own = (choice.logprobs or [])[: len(logprobs.content)]
    assert [entry.logprob for entry in logprobs.content] == pytest.approx(own)
    chunks = client.chat.completions.create(**asked, stream=True)
    told = [each.choices[0].logprobs for each in chunks]
    assert [e for each in told if each for e in each.content or []] == logprobs.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        best = entry.top_logprobs[0]
        assert best.token == entry.token
        assert best.logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert bytes(entry.bytes or []).decode() == entry.token


def test_completion_logprobs_and_echo(served: Served, client: OpenAI) -> None:
    asked: dict[str, Any] = dict(model=served.name, prompt=PROMPT, temperature=0, max_tokens=12)
    (expected,) = served.llm.generate(PROMPT, SamplingParams(max_tokens=12, logprobs=True))
    choice = client.completions.create(**asked, logprobs=2).choices[0]
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == choice.text
    own = (expected.outputs[0].logprobs or [])[: len(choice.logprobs.tokens or [])]
    assert choice.logprobs.token_logprobs == pytest.approx(own)
    assert [len(top) for top in choice.logprobs.top_logprobs or []] == [2] * len(own)
    assert choice.logprobs.text_offset is not None and choice.logprobs.text_offset[0] == 0
    echoed = client.completions.create(**asked, echo=True).choices[0]
    assert echoed.text == PROMPT + expected.outputs[0].text
    chunks = client.completions.create(**asked, echo=True, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == echoed.text


def test_echo_with_logprobs_tells_those_of_the_prompt(served: Served, client: OpenAI) -> None:
    """As lm-evaluation-harness asks: several prompts as ids, and one token more."""
    prompts = [[65, 66, 67, 68], [70, 71], [72]]
    asked: dict[str, Any] = dict(model=served.name, prompt=prompts, temperature=0, max_tokens=1)
    choices = client.completions.create(**asked, logprobs=1, echo=True).choices
    after = client.completions.create(**asked, logprobs=1).choices
    exact = "autoregressive" in served.engine.limits.spec.iterations
    method: Any = "autoregressive" if exact else "left_to_right"
    for ids, choice, own in zip(prompts, choices, after, strict=True):
        assert choice.logprobs is not None and own.logprobs is not None
        logprobs, top = choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or []
        assert len(choice.logprobs.tokens or []) == len(logprobs) == len(top)
        assert (logprobs[0], top[0]) == (None, None)
        # The answer's one token is told even if it is an end token, without a text.
        assert len(logprobs) == len(ids) + 1
        told = own.logprobs.token_logprobs or []
        assert logprobs[len(ids) :][: len(told)] == pytest.approx(told)
        lengths = [len(text) for text in choice.logprobs.tokens or []]
        assert choice.logprobs.text_offset == [0, *accumulate(lengths[:-1])]
        if len(ids) == 1:
            continue
        (found,) = served.llm.loglikelihood([ids[:1]], [ids[1:]], method=method)
        assert logprobs[1 : len(ids)] == pytest.approx(found.logprobs, abs=1e-4)
        best = [max(each.values()) for each in top[1 : len(ids)]]
        assert best == pytest.approx([pairs[0][1] for pairs in found.top_logprobs or []], abs=1e-4)


def test_infilling(served: Served, client: OpenAI) -> None:
    asked: Any = dict(model=served.name, prompt="def f(x):", suffix="return x", temperature=0)
    if served.engine.limits.spec.block_causal:
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(**asked)
        assert refused.value.param == "suffix"
        return
    inside = client.completions.create(**asked).choices[0].text
    echoed = client.completions.create(**asked, echo=True).choices[0].text
    assert echoed == f"def f(x):{inside}return x"


class Person(BaseModel):
    """Someone, as a client's model."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)


def test_answers_become_models(served: Served, client: OpenAI) -> None:
    question: list[Any] = [{"role": "user", "content": "Extract name and age: Mia is 30."}]
    parsed = client.chat.completions.parse(
        model=served.name, messages=question, response_format=Person, max_tokens=80
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    with client.chat.completions.stream(
        model=served.name,
        messages=question,
        tools=[pydantic_function_tool(Person)],
        tool_choice="required",
        max_tokens=120,
    ) as stream:
        calls = stream.get_final_completion().choices[0].message.tool_calls
    assert calls and isinstance(calls[0].function.parsed_arguments, Person)
