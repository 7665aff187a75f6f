"""What the tests of the API share: two models, each loaded once in a run, and their servers."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import closing
from typing import Any

import pytest

from diffray import DiffusionLLM
from diffray.cluster.api.service import Service
from diffray.cluster.control.local import LocalEngine
from diffray.components.checkpoints.demos import examples
from diffray.workers.messages import Update
from tests.helpers.api_server import Served, serve, serve_model
from tests.helpers.byte_tokenizer import TOKENIZER
from tests.helpers.recorder import Recorder
from tests.helpers.tiny import CHAT_TEMPLATE, tiny_checkpoint


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The demo model as a service; the process that compiles for it keeps nothing of the user's."""
    llm = DiffusionLLM("demo", dtype="float32")
    with (
        LocalEngine(llm.engine) as engine,
        closing(Service(engine, llm.tokenizer, ["demo"], examples=examples("demo"))) as service,
    ):
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
            asyncio.run(service.complete({"prompt": "a", "guided_choice": ["a"]}))
        yield service


@pytest.fixture(scope="session")
def demo_url(demo: Service) -> Iterator[str]:
    with serve(demo) as url:
        yield url


@pytest.fixture(scope="session")
def breaking_url() -> Iterator[str]:
    """A server whose answers break off after their first token."""

    class Breaking(Recorder):
        async def submit(self, *given: Any, **more: Any) -> AsyncGenerator[Update, None]:
            async for update in super().submit(*given, **more):
                yield update
                raise AssertionError("an answer fails half way")

    with serve(Service(Breaking(), TOKENIZER, ["some"])) as url:
        yield url


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model with random weights: two requests run at a time, and one may wait."""
    model = tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "model", chat_template=CHAT_TEMPLATE)
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_queued_requests": 1, "max_model_len": 200}
    with serve_model(model, "tiny", **limits) as served:
        yield served
