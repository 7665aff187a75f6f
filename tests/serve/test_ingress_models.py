"""Which model an ingress asks, while replicas may not have described themselves yet."""

import asyncio
from typing import Any

import pytest

from diffray.cluster.api.bodies import CompletionBody
from diffray.cluster.api.errors import ApiError
from diffray.cluster.control.engine_client import Load
from diffray.cluster.serve.ingress import Ingress
from diffray.cluster.serve.replicas import About


class Model:
    """A model with an adapter, whose replicas may be away."""

    def __init__(self, name: str, *, away: bool = False) -> None:
        self.name, self.away, self.seen = name, away, False
        self.asked = list[Any]()

    async def about(self) -> list[About]:
        return [] if self.away else [About([], Load(running=1, slots=4), "")]

    async def described(self) -> list[dict[str, str]]:
        self.seen = self.seen or not self.away
        return [{"id": self.name}, *([{"id": f"{self.name}-lora"}] if self.seen else [])]

    async def ask(self, method: str, kind: object, given: object) -> dict[str, str]:
        self.asked.append((method, given))
        return {"id": self.name}


def ingress(*models: Any) -> Ingress:
    siblings: Any = None
    return Ingress(models, siblings, "own")


async def whole(to: Ingress, **body: Any) -> str:
    return str((await to.whole(CompletionBody, body, background=True))["id"])


def test_one_model_need_not_be_named() -> None:
    model = Model("a")
    assert asyncio.run(whole(ingress(model), prompt="x")) == "a"
    assert model.asked == [("in_background", {"prompt": "x"})]
    with pytest.raises(ApiError) as refused:
        asyncio.run(whole(ingress(model, Model("b")), prompt="x"))
    assert refused.value.status == 400


def test_an_adapter_of_a_model_that_loads_is_not_unknown() -> None:
    a, b = Model("a"), Model("b", away=True)
    both = ingress(a, b)
    assert asyncio.run(whole(both, model="a-lora")) == "a"
    with pytest.raises(ApiError) as refused:
        asyncio.run(whole(both, model="b-lora"))
    assert refused.value.status == 503
    b.away, both._looked = False, 0.0
    assert asyncio.run(whole(both, model="b-lora")) == "b"
    with pytest.raises(ApiError) as refused:
        asyncio.run(whole(both, model="c"))
    assert refused.value.status == 404


def test_a_model_s_own_load_is_told() -> None:
    both = ingress(Model("a"), Model("b", away=True))

    async def slots() -> list[int]:
        return [(await both.load(name)).slots for name in (None, "a", "b")]

    assert asyncio.run(slots()) == [4, 4, 0]
