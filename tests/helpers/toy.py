"""Small models in plain torch, for tests of everything that is not a model.

Letters: T packed tokens, R rows of the head, V vocabulary, H hidden size, D head size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor

from diffray.components.batch import Batch
from diffray.components.kv_pool import KVPool, Sharing
from diffray.components.mesh import Mesh
from diffray.components.model_spec import ModelSpec
from diffray.components.params import SamplingParams
from diffray.kernels.attention import QKRotary
from diffray.kernels.confidence import Confidence, Draw, confidence_of_logits
from diffray.kernels.formats import Format
from diffray.workers.engine import Engine
from diffray.workers.messages import Request, Update
from diffray.workers.slots import Slots

VOCAB = 64
MASK, EOS = 62, 63
CPU = torch.device("cpu")


def toy_spec(
    block_causal: bool = False,
    num_layers: int = 2,
    head_dim: int = 8,
    hidden_size: int = 16,
    logit_shift: int = 0,
) -> ModelSpec:
    return ModelSpec(
        num_layers=num_layers, num_kv_heads=2, head_dim=head_dim, hidden_size=hidden_size,
        vocab_size=VOCAB, vocab_start=0, max_positions=512, block_causal=block_causal,
        logit_shift=logit_shift,
    )  # fmt: skip


class WritesLogits(ABC):
    """A model that finds its tokens from logits that it has written."""

    @abstractmethod
    def head(self, hidden_RH: Tensor) -> Tensor: ...

    def confidence(
        self,
        hidden_RH: Tensor,
        mask_token_id: int,
        draw: Draw | None,
        known_RK: Tensor | None = None,
    ) -> Confidence:
        gather_RK = torch.full((len(hidden_RH), 1), mask_token_id)
        if known_RK is not None:
            gather_RK = torch.cat([gather_RK, known_RK], dim=1)
        return confidence_of_logits(self.head(hidden_RH), 0, mask_token_id, gather_RK, draw)

    def look(self, pixels_PC: Tensor, columns: int) -> Tensor:
        raise AssertionError("a toy is given no images")

    def soften(self, x_TH: Tensor, soft_TH: Tensor, batch: Batch) -> Tensor:
        assert batch.masked_T1 is not None
        return x_TH + soft_TH * batch.masked_T1


class ToyModel(WritesLogits):
    """A two-layer transformer with random float64 weights; confident enough to be interesting."""

    def __init__(self, block_causal: bool = False, seed: int = 0, logit_shift: int = 0) -> None:
        self.spec = toy_spec(block_causal, logit_shift=logit_shift)
        draw = torch.Generator().manual_seed(seed)

        def random(*shape: int, scale: float) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64) * scale

        hidden = self.spec.hidden_size
        self.table_VH = random(VOCAB, hidden, scale=1.0)
        self.places = random(self.spec.max_positions, hidden, scale=0.7)
        self.layers = [
            [random(hidden, hidden, scale=0.35) for _ in range(4)]
            for _ in range(self.spec.num_layers)
        ]
        self.head_VH = random(VOCAB, hidden, scale=1.1)

    def embed(self, ids_T: Tensor) -> Tensor:
        return self.table_VH[ids_T]

    def forward(self, x_TH: Tensor, batch: Batch, kv: KVPool) -> Tensor:
        x_TH = x_TH + self.places[batch.positions_T]
        ones_T1D = torch.ones(len(x_TH), 1, 8, dtype=torch.float64)
        still = QKRotary(None, 0.0, ones_T1D, torch.zeros_like(ones_T1D))
        for number, (query, key, value, out) in enumerate(self.layers):
            heads_TND = torch.cat([query, key, value], dim=1)
            heads_TND = (x_TH @ heads_TND).unflatten(-1, (6, 8))
            x_TH = x_TH + torch.tanh(kv.attend(number, heads_TND, still, batch).flatten(1) @ out)
        return x_TH

    def head(self, hidden_RH: Tensor) -> Tensor:
        return hidden_RH @ self.head_VH.T

    def expected_embedding(self, weights_RV: Tensor) -> Tensor:
        return weights_RV @ self.table_VH


class CountingModel(ToyModel):
    """Counts the positions that it runs; may fail once."""

    def __init__(self, block_causal: bool = True, logit_shift: int = 0) -> None:
        super().__init__(block_causal, logit_shift=logit_shift)
        self.positions = 0
        self.fails = False

    def forward(self, x_TH: Tensor, batch: Batch, kv: KVPool) -> Tensor:
        self.positions += len(x_TH)
        if self.fails:
            self.fails = False
            raise KeyboardInterrupt
        return super().forward(x_TH, batch, kv)


class ScriptedModel(WritesLogits):
    """A model whose logits are a function of the position alone."""

    def __init__(
        self, script: Callable[[int], dict[int, float]], block_causal: bool = False
    ) -> None:
        self.spec = toy_spec(block_causal, num_layers=1, hidden_size=1)
        self.script = script
        self.forwards = 0

    def embed(self, ids_T: Tensor) -> Tensor:
        return torch.zeros(len(ids_T), 1, dtype=torch.float64)

    def forward(self, x_TH: Tensor, batch: Batch, kv: KVPool) -> Tensor:
        self.forwards += 1
        return batch.positions_T.double().unsqueeze(1)

    def head(self, hidden_RH: Tensor) -> Tensor:
        rows = [self.script(position) for position in hidden_RH.squeeze(1).long().tolist()]
        logits = [row.get(token, 0.0) for row in rows for token in range(VOCAB)]
        return torch.tensor(logits, dtype=torch.float64).view(-1, VOCAB)

    def expected_embedding(self, weights_RV: Tensor) -> Tensor:
        return weights_RV.new_zeros(len(weights_RV), 1)


def toy_engine(
    model: ToyModel | ScriptedModel,
    *,
    num_slots: int = 8,
    num_pages: int = 400,
    page_size: int = 8,
    chunk: int = 512,
    host_pages: int = 0,
    prefix_ttl: float | None = None,
    form: Format | None = None,
    first_steps: str = "off",
) -> Engine:
    spec = model.spec
    kv = KVPool(
        shapes=spec.kv_shapes, num_pages=num_pages, page_size=page_size, dtype=torch.float64,
        device=CPU, form=form,
        sharing=Sharing(host_pages=host_pages, ttl=prefix_ttl, first_steps=first_steps),
    )  # fmt: skip
    slots = Slots(num_slots, spec.max_positions, MASK, CPU)
    return Engine(model, kv, slots, eos_token_ids=(EOS,), mesh=Mesh(), chunk=chunk)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(1000 + seed)
    return tuple(torch.randint(0, 60, (length,), generator=draw).tolist())


def run(
    engine: Engine, requests: Items[Request], steps: int = 1, limit: int = 5000
) -> dict[int, list[int]]:
    for request in requests:
        engine.add(request)
    return drain(engine, steps, limit)


def drain(engine: Engine, steps: int = 1, limit: int = 5000) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    for _ in range(limit):
        if engine.idle:
            return tokens
        for update in engine.step(steps):
            tokens.setdefault(update.uid, []).extend(update.ids)
    raise AssertionError("the engine did not finish")


def generate(
    model: ToyModel | ScriptedModel,
    prompt: tuple[int, ...],
    suffix: tuple[int, ...] = (),
    steps: int = 1,
    **params: Any,
) -> list[int]:
    """Return the tokens of one request on an engine of its own."""
    return run(toy_engine(model), [Request(0, prompt, SamplingParams(**params), suffix)], steps)[0]


def last_update(engine: Engine, request: Request) -> tuple[list[int], Update]:
    engine.add(request)
    ids: list[int] = []
    while True:
        for update in engine.step():
            ids += update.ids
            if update.finish_reason:
                return ids, update


def certain(tokens: dict[int, int], default: int = 1) -> Callable[[int], dict[int, float]]:
    return lambda position: {tokens.get(position, default): 20.0}
