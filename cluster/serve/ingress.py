"""The ingress: one endpoint for several models, each in its own application.

An ingress loads no model; it passes each request on to the model that the request names.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Final

from ray import serve
from ray.serve.handle import DeploymentHandle

from diffray.cluster.api.bodies import GenerationBody
from diffray.cluster.api.errors import ApiError, Json, invalid, no_such_model, unavailable
from diffray.cluster.api.metrics import Refusals, Snapshot, render
from diffray.cluster.api.operations import LOAD_ADAPTER, OPERATIONS
from diffray.cluster.control.engine_client import EngineFailed, Load
from diffray.cluster.serve.app_config import IngressConfig
from diffray.cluster.serve.replicas import RemoteModel, Replicas
from diffray.workers.stats import Stats

_LOOK_S: Final = 1.0  # between refreshes of the adapters

_ingress: "Ingress | None" = None  # the ingress of this process, for its endpoint


def current_ingress() -> "Ingress":
    if _ingress is None:
        raise EngineFailed("the endpoint is starting; try again in a moment")
    return _ingress


class Ingress:
    """Serves several models at one endpoint.

    `siblings` are all replicas of this deployment, and `own` is the name of this one.
    """

    def __init__(self, models: Sequence[RemoteModel], siblings: Replicas, own: str) -> None:
        self._models = {each.name: each for each in models}
        self._siblings, self._own = siblings, own
        self._refusals = Refusals(own)
        self._adapters: dict[str, RemoteModel] = {}  # by the names of their LoRA adapters
        self._looking, self._looked = asyncio.Lock(), -math.inf

    async def whole(
        self, kind: type[GenerationBody], given: object, *, background: bool = False
    ) -> Json:
        method = "in_background" if background else "whole"
        return await (await self._model_for(given)).ask(method, kind, given)

    async def stream(self, kind: type[GenerationBody], given: object) -> AsyncGenerator[Json, None]:
        model = await self._model_for(given)
        async with aclosing(model.stream("stream", kind, given)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def ask(self, path: str, given: object) -> Json:
        model = await self._model_for(given)
        if path == LOAD_ADAPTER and isinstance(given, dict):
            name = str(given.get("lora_name"))
            await self._look_for_adapters()
            if name in self._models or self._adapters.get(name, model) is not model:
                raise invalid(f"{name} is another model's name; choose another", "lora_name")
        try:
            return await model.ask("ask", path, given)
        finally:
            if path in OPERATIONS:
                self._looked = -math.inf

    async def models(self) -> Json:
        found = await asyncio.gather(*(each.described() for each in self._models.values()))
        return {"object": "list", "data": [model for described in found for model in described]}

    async def model(self, name: str) -> Json:
        described = await (await self._model_named(name)).described()
        return next((model for model in described if model["id"] == name), described[0])

    async def health(self) -> Json:
        """Return each model's health; raise if none can answer.

        One unhealthy model must not make a load balancer drop the others.
        """
        asked = await asyncio.gather(*(each.about() for each in self._models.values()))
        states = {}
        for name, found in zip(self._models, asked, strict=True):
            failures = [about.failure for about in found] or ["no replica answers"]
            states[name] = "healthy" if "" in failures else failures[0]
        if "healthy" not in states.values():
            reasons = "; ".join(f"{name}: {state}" for name, state in states.items())
            raise unavailable(f"No model can answer ({reasons}).")
        return {"models": states}

    async def load(self, name: str | None = None) -> Load:
        """Return the load summed over all replicas, of all models or of the one named."""
        models = [*self._models.values()] if name is None else [await self._model_named(name)]
        asked = await asyncio.gather(*(each.about() for each in models))
        loads = [about.load for found in asked for about in found]
        return Load(
            running=sum(each.running for each in loads),
            waiting=sum(each.waiting for each in loads),
            slots=sum(each.slots for each in loads),
            engine=Stats(free_pages=sum(each.free_pages for each in loads)),
            num_pages=sum(each.num_pages for each in loads),
        )

    async def prometheus(self, *, vllm_names: bool = False) -> bytes:
        all_replicas = [self._siblings, *(each.replicas for each in self._models.values())]
        asked = await asyncio.gather(*(each.ask("snapshot") for each in all_replicas))
        others = [each for found in asked for each in found or [] if each.replica != self._own]
        return render([self._refusals.snapshot(), *others], vllm_names=vllm_names)

    async def snapshot(self) -> Snapshot:
        return self._refusals.snapshot()

    def count_refusal(self, error: ApiError) -> None:
        if not error.counted:
            self._refusals.count(error.status)

    async def _model_for(self, given: object) -> RemoteModel:
        """Return the model that a body names."""
        if not isinstance(given, dict):
            raise invalid("the body must be a JSON object")
        return await self._model_named(given.get("model"))

    async def _model_named(self, name: object) -> RemoteModel:
        """Return the model with this name, or with a LoRA adapter of this name."""
        names = ", ".join(f"`{each}`" for each in self._models)
        if name is None and len(self._models) == 1:
            (only,) = self._models.values()
            return only
        if name is None:
            raise invalid(
                f"several models are served here, so name one of them: {names}",
                "model",
                "missing_required_parameter",
            )
        if not isinstance(name, str):
            raise invalid(f"model must be one of these texts: {names}", "model", "invalid_value")
        if name in self._models:
            return self._models[name]
        await self._look_for_adapters()
        if name not in self._adapters and not all(each.seen for each in self._models.values()):
            raise unavailable(f"A model is being loaded, which may have an adapter {name[:100]}.")
        if name not in self._adapters:
            raise no_such_model(name, [*self._models, *self._adapters])
        return self._adapters[name]

    async def _look_for_adapters(self) -> None:
        """Refresh the models' adapters, unless that was done within the last second."""
        async with self._looking:
            if time.monotonic() < self._looked + _LOOK_S:
                return
            models = self._models.values()
            found = await asyncio.gather(*(model.described() for model in models))
            self._adapters = {
                each["id"]: model
                for model, described in zip(models, found, strict=True)
                for each in described[1:]
            }
            self._looked = time.monotonic()


class IngressReplica:
    """The class that Serve starts and stops for an ingress."""

    async def __init__(self, config: IngressConfig, batches: object = None) -> None:  # type: ignore[misc]  # Serve awaits it
        """Connect to the models; Serve starts the worker for `batches` with the ingress."""
        global _ingress
        _ingress = await ingress_to(config.models)

    async def snapshot(self) -> Snapshot:
        """Return this replica's metrics, for the replica that was scraped."""
        return await current_ingress().snapshot()


async def ingress_to(models: Mapping[str, str]) -> Ingress:
    """Return an ingress, within a Serve replica, to models in these applications.

    An application without a name is the replica's own.
    """
    context = serve.get_replica_context()
    connected = (
        asyncio.to_thread(RemoteModel, name, application or context.app_name)
        for name, application in models.items()
    )
    siblings = Replicas(DeploymentHandle(context.deployment, context.app_name))
    return Ingress(await asyncio.gather(*connected), siblings, context.replica_id.unique_id)
