"""Libraries for agents, unmodified, against a live server: typed answers and calls of functions.

They are the extra `clients`, which `make test-clients` installs; elsewhere the tests are skipped.
"""

import importlib
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.helpers.api_server import Served, serve_model
from tests.helpers.needed import lacking

pytestmark = pytest.mark.long

QUESTION = "Give job and age as JSON: Tom, 53, is a driver from Tokyo."


class Person(BaseModel):
    """What the question asks for."""

    job: Literal["nurse", "driver", "pilot"]
    age: int = Field(ge=18, le=99)


def library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        lacking("clients", f"but {error}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patched.setenv("OPENAI_API_KEY", "none")
        with serve_model("demo") as served:
            yield served


def weather(city: Literal["Rome", "Tokyo"]) -> str:
    """Tell the weather of a city."""
    return f"sunny in {city}"


def langchain(served: Served) -> Any:
    return library("langchain_openai").ChatOpenAI(
        model=served.name, base_url=f"{served.url}/v1", api_key="none", max_tokens=96, temperature=0
    )


# Its mode JSON has the schema in the prompt alone, which the demo model cannot read.
@pytest.mark.parametrize("mode", ["JSON_SCHEMA", "TOOLS"])
def test_instructor(served: Served, mode: str) -> None:
    instructor = library("instructor")
    from openai import OpenAI

    client = instructor.from_openai(
        OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0),
        mode=getattr(instructor.Mode, mode),
    )
    messages = [{"role": "user", "content": QUESTION}]
    asked = {"model": served.name, "messages": messages, "max_retries": 1, "max_tokens": 96}
    assert isinstance(client.chat.completions.create(**asked, response_model=Person), Person)


@pytest.mark.parametrize("native", [False, True])
def test_pydantic_ai(served: Served, native: bool) -> None:
    pydantic_ai = library("pydantic_ai")
    models = library("pydantic_ai.models.openai")
    providers = library("pydantic_ai.providers.openai")
    provider = providers.OpenAIProvider(base_url=f"{served.url}/v1", api_key="none")
    agent = pydantic_ai.Agent(
        models.OpenAIChatModel(served.name, provider=provider),
        output_type=pydantic_ai.NativeOutput(Person) if native else Person,
        model_settings={"max_tokens": 96, "temperature": 0.0},
    )
    assert isinstance(agent.run_sync(QUESTION).output, Person)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gives_typed_answers(served: Served, method: str) -> None:
    chat = langchain(served).with_structured_output(Person, method=method)
    assert isinstance(chat.invoke(QUESTION), Person)


def test_langchain_binds_tools(served: Served) -> None:
    bound = langchain(served).bind_tools([weather], tool_choice="weather")
    (call,) = bound.invoke("Is it sunny in Rome?").tool_calls
    assert call["name"] == "weather"
    assert weather(**call["args"]) in ("sunny in Rome", "sunny in Tokyo")
