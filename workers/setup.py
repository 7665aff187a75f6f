"""From a checkpoint to an engine that is ready: weights, tokenizer, K/V memory."""

from collections.abc import Sequence as Items
from dataclasses import dataclass

import torch

from diffray.components.backend import free_memory
from diffray.components.checkpoint import load_model, read_config, resolve
from diffray.components.kv_pool import KVPool
from diffray.components.mesh import Mesh
from diffray.components.model import ModelSpec
from diffray.components.special_tokens import special_ids
from diffray.workers.engine import Engine
from diffray.workers.slots import Slots
from diffray.workers.text import Tokenizer

_SHARE_FOR_KV = 0.5  # of the memory that is free once the weights are loaded


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is laid out; the checkpoint says the rest."""

    dtype: str = "auto"
    device: str = "auto"
    mask_token_id: int | None = None
    eos_token_id: int | Items[int] | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 16
    kv_cache_memory: int | None = None
    page_size: int = 16
    chunk: int = 512

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_seqs", "kv_cache_memory", "page_size", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 (given: {value})")


def build_engine(
    model: str, setup: Setup, mesh: Mesh | None = None
) -> tuple[Engine, Tokenizer | None]:
    """Load a checkpoint and return its engine, with its tokenizer if it has one."""
    path = resolve(model)
    config = read_config(path)
    mask_token_id, eos_token_ids = special_ids(
        path, config, mask_token_id=setup.mask_token_id, eos_token_id=setup.eos_token_id
    )
    loaded = load_model(path, dtype=setup.dtype, device=setup.device, mesh=mesh or Mesh())
    spec = loaded.spec
    for name, token_id in (("mask", mask_token_id), *(("eos", e) for e in eos_token_ids)):
        if not 0 <= token_id < spec.vocab_size:
            raise ValueError(
                f"{name} token id {token_id} is not in the vocabulary (0 to {spec.vocab_size - 1})"
            )
    length = setup.max_model_len or spec.max_positions
    if length > spec.max_positions:
        raise ValueError(
            f"max_model_len ({length}) exceeds what the model was made for ({spec.max_positions})"
        )
    some = loaded.embed(torch.zeros(1, dtype=torch.long, device=loaded.device))
    kv = KVPool(
        num_layers=spec.num_layers,
        num_pages=_num_pages(spec, setup, length, some),
        page_size=setup.page_size,
        num_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=some.dtype,
        device=some.device,
    )
    slots = Slots(setup.max_num_seqs, length, mask_token_id, some.device)
    engine = Engine(loaded, kv, slots, eos_token_ids=eos_token_ids, mesh=mesh, chunk=setup.chunk)
    return engine, Tokenizer.load(path, mask_token_id)


def _num_pages(spec: ModelSpec, setup: Setup, length: int, like: torch.Tensor) -> int:
    """Return how many pages to make: enough for every slot, if the memory allows."""
    per_position = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * like.element_size()
    memory = setup.kv_cache_memory
    if memory is None:
        memory = int(free_memory(like.device) * _SHARE_FOR_KV)
    # A guided request holds two canvases.
    most = 2 * setup.max_num_seqs * -(-length // setup.page_size)
    pages = min(most, memory // (per_position * setup.page_size))
    if pages < 1:
        raise ValueError(
            f"{memory} bytes hold no K/V page of {per_position * setup.page_size} bytes; "
            "raise kv_cache_memory"
        )
    return pages + 1  # page 0 is never handed out
