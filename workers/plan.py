"""What an engine takes of a device and how many requests it runs there, without loading anything.

The sums are the engine's own. What only a GPU can tell is estimated, and no GPU has confirmed it:
the memory of its libraries, of CUDA graphs and of activations.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple

import torch

from diffray.components.backend import (
    check_capability,
    choose_dtype,
    free_memory,
    gpu_facts,
    records,
)
from diffray.components.cards import CARDS, Card
from diffray.components.checkpoints.checkpoint import prepare
from diffray.components.checkpoints.folder import drafter_of, read_config, resolve
from diffray.components.checkpoints.lora import Adapter
from diffray.components.denoiser import Denoiser
from diffray.components.kv_pool import kv_format
from diffray.components.mesh import Mesh
from diffray.components.models.registry import build_model, runs_on_torch_alone
from diffray.components.policy import DiffusionParams, Policy
from diffray.components.quantization import Scheme, parse_quantization
from diffray.components.weight import Weight
from diffray.workers.adapters import ANY_RANK
from diffray.workers.engine_options import EngineOptions
from diffray.workers.graphs import buckets_of
from diffray.workers.kv_room import kv_room, page_bytes
from diffray.workers.slots import Slots
from diffray.workers.step_time import tokens_per_s

# Counted among torch's allocations, with attention and experts as Triton's kernels allocate them.
_HIDDEN_AT_ONCE: Final = 8  # hidden states of a token that exist at a time
_OUTPUTS_AT_ONCE: Final = 1.5  # outputs of the widest product, with the activation of half of them
_BYTES_PER_LOGIT: Final = 59  # of a draw from a filtered distribution
_LOGIT_ROWS: Final = 512  # of which a recording stores the logits at a time

Limit = Literal["max_num_seqs", "kv_cache", "activations"]


@dataclass(frozen=True, slots=True)
class Step:
    """The predicted speed of some requests of the whole context."""

    requests: int
    ms: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What the engine takes of each device, in bytes, and what it can run."""

    family: str
    device: str
    ranks: int
    dtype: str
    quantization: str | None
    memory: int
    taken: int  # before the engine starts
    weights: int
    canvases: int
    graphs: int
    kv_cache: int
    adapters: int
    left: int  # for activations
    activations: int  # if `max_num_seqs` requests run their whole context in one step
    num_pages: int
    page_size: int
    kv_bytes_per_token: int
    kv_bytes_per_request: int
    context: int
    max_num_seqs: int
    requests: int  # of the whole context that run at once
    limit: Limit  # what allows no more
    most_requests: int  # if max_num_seqs is chosen for it
    tokens_per_forward: float
    steps: tuple[Step, ...]


class Room(NamedTuple):
    """What is left for K/V and activations beside so many slots."""

    canvases: int
    graphs: int
    num_pages: int
    left: int


@dataclass(frozen=True)
class Share:
    """A rank's share of a model, without storage, and the device that is to hold it."""

    model: Denoiser
    scheme: Scheme | None
    adapters: int
    setup: EngineOptions
    ranks: int
    card: Card
    recorded: bool  # whether there are CUDA graphs

    @staticmethod
    def of(path_or_hub_id: str, setup: EngineOptions, mesh: Mesh, card: Card) -> "Share":
        """Read a checkpoint's headers; refuse what the engine would refuse."""
        path = resolve(path_or_hub_id)
        config = read_config(path)
        dtype = _dtype_of(setup, card)
        model, plain = (build_model(config, mesh, dtype) for _ in range(2))
        given = setup.quantization
        asked = None if given is None else parse_quantization(given)
        _, scheme = prepare(model, path, config, asked)
        if scheme is not None and card.capability is not None:
            check_capability(scheme, card.capability)
        on_torch = setup.kernels == "torch" or runs_on_torch_alone(config)
        triton = card.device == "cuda" and dtype != torch.float64 and not on_torch
        ranks_of = {resolve(each): setup.max_lora_rank for each in setup.lora_modules.values()}
        if (drafter := drafter_of(path)) is not None:
            ranks_of[drafter] = ANY_RANK
        sizes = (
            Adapter(each, plain.parts(()), most).size(dtype) for each, most in ranks_of.items()
        )
        kernels = "triton" if triton else "torch"
        recorded = records(setup.cuda_graphs, torch.device(card.device), kernels)
        return Share(model, scheme, sum(sizes), setup, mesh.size, card, recorded)

    @cached_property
    def context(self) -> int:
        return self.model.spec.context(self.setup.max_model_len)

    @cached_property
    def policy(self) -> Policy:
        return Policy.resolve(DiffusionParams(), self.model.spec)

    @cached_property
    def page(self) -> int:
        return page_bytes(self.model.spec, self.model.dtype, self.setup)

    @property
    def pages_per_request(self) -> int:
        return -(-self.context // self.setup.page_size)

    def plan(self, tokens_per_forward: float) -> Plan:
        """Return the whole plan; `tokens_per_forward` says how many tokens a step decides."""
        count, most = self.setup.max_num_seqs, self.most_requests
        room, requests = self.room(count), self.requests(count)
        limit: Limit = "max_num_seqs"
        if requests < count:
            fewer = requests < (room.num_pages - 1) // self.pages_per_request
            limit = "activations" if fewer else "kv_cache"
        return Plan(
            family=self.model.spec.family,
            device=self.card.name,
            ranks=self.ranks,
            dtype=str(self.model.dtype).removeprefix("torch."),
            quantization=None if self.scheme is None else self.scheme.given.strip("'"),
            memory=self.card.memory,
            taken=self.card.taken,
            weights=self.model.nbytes,
            canvases=room.canvases,
            graphs=room.graphs,
            kv_cache=room.num_pages * self.page,
            adapters=self.adapters,
            left=room.left,
            activations=self.activations(count),
            num_pages=room.num_pages,
            page_size=self.setup.page_size,
            kv_bytes_per_token=self.page // self.setup.page_size,
            kv_bytes_per_request=self.page * self.pages_per_request,
            context=self.context,
            max_num_seqs=count,
            requests=requests,
            limit=limit,
            most_requests=most,
            tokens_per_forward=tokens_per_forward,
            steps=tuple(self._steps({1, requests, most} - {0}, tokens_per_forward)),
        )

    def _steps(self, numbers: Iterable[int], tokens_per_forward: float) -> Iterator[Step]:
        """Predict the speed of these numbers of requests, if the device's is known."""
        if (speed := self.card.speed) is None or not self.most_requests:
            return
        form = kv_format(self.setup.kv_cache_dtype, self.model.spec.kv_shapes)
        for number in sorted(numbers):
            where = number, self.context, tokens_per_forward, speed
            seconds, rate = tokens_per_s(self.model, form, self.policy, *where)
            yield Step(number, seconds * 1e3, rate)

    def room(self, slots: int) -> Room:
        """Return the room beside the canvases and recordings of so many slots."""
        setup = self.setup.model_copy(update={"max_num_seqs": slots})
        canvases = Slots(slots, self.context, 0, torch.device("meta")).nbytes
        graphs = self._graphs(setup) if self.recorded else 0
        sharers = self.ranks if self.card.device == "cpu" else 1
        before = self.card.taken + graphs + sharers * (self.model.nbytes + canvases)
        free = self.card.memory - before
        kv = kv_room(free, self.page, setup, self.context, sharers)
        left = free - sharers * (kv.num_pages * self.page + self.adapters)
        return Room(canvases, graphs, kv.num_pages, left)

    def requests(self, slots: int) -> int:
        """Return how many requests of the whole context run at once in so many slots."""
        room, each = self.room(slots), self.activations(1)
        fit = min(slots, (room.num_pages - 1) // self.pages_per_request)
        return max(min(fit, room.left // each), 0) if each else fit * (room.left >= 0)

    @cached_property
    def most_requests(self) -> int:
        """The largest number of slots in which as many requests of the whole context run."""
        fits, step = 0, 1
        while self.requests(fits + step) == fits + step:
            fits, step = fits + step, 2 * step
        while step := step // 2:
            if self.requests(fits + step) == fits + step:
                fits += step
        return fits

    def activations(self, requests: int) -> int:
        """Estimate what a step takes that runs everything and draws from filtered distributions."""
        if self.card.device == "cpu":
            return 0
        longest = self.context
        if self.policy.causal_length:
            longest = min(max(self.setup.chunk, 2 * self.policy.block_length), longest)
        logits = self.policy.block_length * self._vocab * _BYTES_PER_LOGIT
        return requests * (longest * self._bytes_per_token + logits)

    def _graphs(self, setup: EngineOptions) -> int:
        """Estimate what the recordings take: the largest one, whose memory the others reuse."""
        tokens = buckets_of(self.model.spec, setup)[0].tokens
        rows = tokens if self.model.output.weight.format else min(tokens, _LOGIT_ROWS)
        return tokens * self._bytes_per_token + rows * self._vocab * self.model.dtype.itemsize

    @property
    def _vocab(self) -> int:
        return len(self.model.output.weight.stored)

    @cached_property
    def _bytes_per_token(self) -> int:
        """The estimated activations of a token of a forward."""
        chosen, widest = self.model.experts[1], 0
        for weight in self.model.layers.modules():
            if isinstance(weight, Weight):
                *experts, outputs, _ = weight.stored.shape
                widest = max(widest, outputs * (chosen if experts else 1))
        at_once = _HIDDEN_AT_ONCE * self.model.dims.hidden + _OUTPUTS_AT_ONCE * widest
        return int(at_once * self.model.dtype.itemsize)


def _dtype_of(setup: EngineOptions, card: Card) -> torch.dtype:
    if setup.dtype == "auto" and card.device == "cuda":
        return torch.float32 if (card.capability or (8, 0)) < (8, 0) else torch.bfloat16
    return choose_dtype(setup.dtype, torch.device("cpu"))


def card_here(device: torch.device) -> Card:
    """Return this machine's device, with the memory that is free."""
    free = free_memory(device)
    if device.type == "cpu":
        return Card("this machine's CPU", free, device="cpu")
    name = gpu_facts(device)["gpu"]
    speed = next((card.speed for card in CARDS.values() if card.driver == name), None)
    return Card(name, free, 0, speed, torch.cuda.get_device_capability(device))
