"""Randomness as a pure function of (request seed, position, step, token id), without state.

A request draws the same numbers alone or batched, on one rank or four, before and after a
restart. The hash is a 32-bit finalizer with full avalanche (two multiplications), written in int64
so that plain torch computes it everywhere; two rounds of keys fold in the 64-bit seed.

Letters: R rows, V token ids.
"""

import torch
from torch import Tensor

_LOW = 0xFFFFFFFF
_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive integers
_PART = 1 << 24  # numbers that are made at a time, in int64
_TILE = 1 << 15  # numbers that are made at a time on a CPU: they stay in its cache


def mix(x: Tensor) -> Tensor:
    """Return a well-mixed 32-bit hash of each 32-bit value, as int64."""
    x = x & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)


def key(seed_R: Tensor, position_R: Tensor, step_R: Tensor) -> Tensor:
    """Fold seed, position and step into one 32-bit key per row."""
    low, high = seed_R & _LOW, (seed_R >> 32) & _LOW
    hashed = mix(low + _GOLDEN)
    for part in (high, position_R, step_R):
        hashed = mix(hashed ^ mix(part * _GOLDEN + 1))
    return hashed


def _open_unit(hashed: Tensor) -> Tensor:
    """Map 32 bits to the open interval (0, 1), in float64 so that neither end is reached."""
    return (hashed.double() + 0.5) * 2.0**-32


def uniform(seed_R: Tensor, position_R: Tensor, step_R: Tensor) -> Tensor:
    """Return one uniform number per row."""
    return _open_unit(mix(key(seed_R, position_R, step_R) ^ _GOLDEN))


def token_ids(seed_R: Tensor, position_R: Tensor, step_R: Tensor, vocab_size: int) -> Tensor:
    """Return one uniform token id per row."""
    return (mix(key(seed_R, position_R, step_R) ^ _GOLDEN) * vocab_size) >> 32


def gumbel(seed_R: Tensor, position_R: Tensor, step_R: Tensor, ids_RV: Tensor) -> Tensor:
    """Return standard Gumbel noise for each (row, token id); `ids_RV` may have one row for all."""
    key_R1, id_RV = key(seed_R, position_R, step_R).unsqueeze(-1), mix(ids_RV * _GOLDEN + 1)
    noise_RV = torch.empty(len(key_R1), id_RV.shape[-1], dtype=torch.float64, device=id_RV.device)
    on_cpu = noise_RV.device.type == "cpu"
    rows = max(1, _TILE // id_RV.shape[-1]) if on_cpu else max(1, len(noise_RV))
    parts = (part.split(rows) for part in (noise_RV, key_R1, id_RV.expand_as(noise_RV)))
    for made, keys, ids in zip(*parts, strict=True):
        unit = _open_unit(mix(keys + ids))
        torch.neg(unit.log_().neg_().log_(), out=made)
    return noise_RV


def spread(target: Tensor, seed: int, deviation: float) -> None:
    """Fill a tensor with uniform noise around 0, in place; equal for equal seeds and shapes."""
    flat = target.view(-1)
    for start in range(0, len(flat), _PART):
        part = flat[start : start + _PART]
        places = torch.arange(start, start + len(part), device=target.device)
        unit = _open_unit(mix(mix(places + _GOLDEN * (seed + 1)) + _GOLDEN))
        part.copy_((unit - 0.5) * (deviation * 12**0.5))


def derived_seed(seed: int, index: int) -> int:
    """Return the seed of the index-th choice of one request; choice 0 keeps the seed itself."""
    if index == 0:
        return seed
    parts = torch.tensor([seed]), torch.tensor([index]), torch.tensor([0])
    high = int(key(*parts))
    low = int(mix(torch.tensor([high ^ _GOLDEN])))
    return ((high & 0x7FFFFFFF) << 32) | low
