"""A model for coroutines: in this process, on its own ranks, or as a running application."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Iterable
from collections.abc import Sequence as Items
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Literal, Self, Unpack

from diffray.cluster.api.request_handle import RequestHandle
from diffray.cluster.api.service import Service
from diffray.cluster.control.engine_client import EngineClient
from diffray.cluster.control.engine_config import EngineConfig, RanksKeywords, RanksOptions
from diffray.cluster.control.local import load_local
from diffray.cluster.control.ranks import connect_ray, start_ranks
from diffray.cluster.control.weight_changes import InFlight, Sleep, UpdateWeights, check_level
from diffray.cluster.frontend.output import Accepted, Followed
from diffray.cluster.frontend.prompts import (
    Prompt,
    as_diffusion,
    as_messages,
    as_one,
    as_params,
    is_conversation,
)
from diffray.cluster.frontend.text import Messages, Tokenizer
from diffray.components.checkpoints.folder import resolve
from diffray.components.checkpoints.update import Source
from diffray.components.params import SamplingKeywords, SamplingParams
from diffray.components.policy import DiffusionParams
from diffray.workers.adapters import LoadedAdapters
from diffray.workers.messages import AWAKE
from diffray.workers.trainer_orders import (
    GROUP,
    TIMEOUT_S,
    JoinTrainer,
    ReceiveWeights,
    TrainerOrder,
)

if TYPE_CHECKING:
    import torch
    from ray.serve.handle import DeploymentHandle


class AsyncDiffusionLLM:
    """A diffusion language model whose requests are handles.

    `model` and the options are those of DiffusionLLM; or `model` is the handle of a running
    application, such as `serve.get_app_handle("demo")`. The first request loads the model.
    """

    def __init__(
        self,
        model: "str | DeploymentHandle[Any]",
        *,
        diffusion: DiffusionParams | dict[str, Any] | None = None,
        **options: Unpack[RanksKeywords],
    ) -> None:
        self.model = model
        self._diffusion = as_diffusion(diffusion)
        given: dict[str, Any] = {"graph_block_length": self._diffusion.block_length, **options}
        self._options = RanksOptions(**given)
        if not isinstance(model, str) and (options or diffusion):
            names = ", ".join([*options, *["diffusion"] * (diffusion is not None)])
            raise ValueError(f"a running application has its own options; leave out {names}")
        self.adapters = LoadedAdapters(
            model if isinstance(model, str) else None, self._options.max_lora_rank
        )
        self._starting = asyncio.Lock()
        self._service: Service | None = None
        self._running = AsyncExitStack()  # what `close` ends
        self._closed = False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def submit(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **options: Unpack[SamplingKeywords],
    ) -> RequestHandle:
        """Submit a prompt or a conversation; return once the request has been checked.

        Raises ApiError if it is invalid.
        """
        (params,) = as_params("submit", sampling_params, options, 1)
        asked: Any
        if is_conversation(prompt):
            asked = [dict(message) for message in as_messages(prompt)]
        else:
            asked = found if isinstance(found := as_one(prompt), str) else list(found)
        source = await self._source(asked, params, priority)
        try:
            accepted = await anext(source)
        except BaseException:
            await source.aclose()
            raise
        assert isinstance(accepted, Accepted)
        return RequestHandle(accepted, source)

    async def update_weights(
        self, source: Source, *, in_flight: InFlight = "finish", version: str | None = None
    ) -> str:
        """Replace the weights, as `DiffusionLLM.update_weights` does, while requests run."""
        change = UpdateWeights(source, in_flight, version)
        return await (await self._own_engine()).apply(change)

    async def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = GROUP,
        backend: Literal["nccl", "gloo"] = "nccl",
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Join a trainer's group, as `DiffusionLLM.init_weights_update_group` does."""
        address = master_address, master_port
        join = JoinTrainer(*address, rank_offset, world_size, backend, timeout_s)
        await (await self._own_engine()).ask_trainer(TrainerOrder(group_name, join))

    async def update_weights_from_distributed(
        self,
        names: Items[str],
        dtypes: "Items[str | torch.dtype]",
        shapes: Iterable[Items[int]],
        group_name: str = GROUP,
        *,
        in_flight: InFlight = "finish",
        version: str | None = None,
    ) -> str | None:
        """Receive weights, as `DiffusionLLM`'s method does, while requests run."""
        engine = await self._own_engine()
        receive = ReceiveWeights.listed(names, dtypes, shapes)
        folder = (await engine.ask_trainer(TrainerOrder(group_name, receive=receive))).folder
        return await engine.apply(UpdateWeights(folder, in_flight, version)) if folder else None

    async def destroy_weights_update_group(self, group_name: str = GROUP) -> None:
        """Leave a trainer's group."""
        await (await self._own_engine()).ask_trainer(TrainerOrder(group_name))

    async def sleep(self, level: int = 1) -> None:
        """Give memory back, as `DiffusionLLM.sleep` does; requests wait until it wakes."""
        check_level(level)
        await (await self._own_engine()).apply(Sleep(level))

    async def wake_up(self) -> None:
        """Take the memory back."""
        await (await self._own_engine()).apply(Sleep(AWAKE))

    async def is_sleeping(self) -> bool:
        return (await (await self._own_engine()).load()).sleep_level > AWAKE

    async def _own_engine(self) -> EngineClient:
        await self.start()
        if self._service is None:
            raise ValueError("a running application is operated through its endpoint")
        return self._service.engine

    async def start(self) -> None:
        """Load the model, unless it is loaded."""
        async with self._starting:
            if self._closed:
                raise ValueError("this AsyncDiffusionLLM has been closed; make a new one")
            if self._service is None and isinstance(self.model, str):
                self._service = await self._load(self.model)

    async def close(self) -> None:
        """Free the model, and fail its open requests; a running application keeps running."""
        self._closed, self._service = True, None
        await self._running.aclose()

    async def _load(self, model: str) -> Service:
        for name, path in self._options.lora_modules.items():
            if name not in self.adapters.names:  # they are there after a failed start
                self.adapters.load(name, path)
        engine, tokenizer = await self._engine(model)
        try:
            service = Service(
                engine,
                tokenizer,
                (model,),
                diffusion=self._diffusion,
                scheduling_policy="priority",
                adapters=self.adapters,
            )
        except ValueError:
            await self._running.aclose()
            raise
        self._running.callback(service.close)
        return service

    async def _engine(self, model: str) -> tuple[EngineClient, Tokenizer | None]:
        if self._options.tensor_parallel_size == 1:
            config = EngineConfig(**dict(self._options), max_queued_requests=sys.maxsize)
            local, tokenizer = await asyncio.to_thread(load_local, model, config)
            local.start()
            self._running.push_async_callback(asyncio.to_thread, local.close)
            return local, tokenizer
        path = resolve(model)
        connect_ray(self._options)
        ranks = await start_ranks(model, self._options)
        self._running.push_async_callback(ranks.close)
        return ranks, Tokenizer.load(path, ranks.limits.mask_token_id)

    async def _source(
        self, asked: Any, params: SamplingParams, priority: int
    ) -> AsyncGenerator[Followed, None]:
        await self.start()
        if self._service is not None:
            return self._service.follow(asked, params, priority)
        return _of_application(self.model, asked, params, priority)


async def _of_application(handle: Any, *asked: Any) -> AsyncGenerator[Followed, None]:
    response = handle.options(stream=True).follow.remote(*asked)
    try:
        async for each in response:
            yield each
    finally:
        response.cancel()
