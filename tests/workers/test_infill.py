"""Writing between a prefix and a suffix: the suffix is seen, and never altered."""

from typing import Any

import pytest
import torch

from diffray.components.params import SamplingParams
from diffray.workers.messages import Request
from tests.helpers.mixed_requests import BIDIRECTIONAL, MIXED
from tests.helpers.tiny_checkpoints import full_forward
from tests.helpers.toy import EOS, MASK, generate, prompt_of, toy_engine

SUFFIX = (7, EOS, MASK, 9, 11, 3, 2, 60, 1)


@pytest.mark.parametrize("policy", MIXED, ids=lambda policy: policy["decoder"]["kind"])
def test_suffix_is_seen_and_never_altered(policy: dict[str, object]) -> None:
    engine = toy_engine(BIDIRECTIONAL)
    params = SamplingParams(max_tokens=30, ignore_eos=True, diffusion=policy)
    engine.add(Request(0, prompt_of(9), params, SUFFIX))
    place = slice(9 + 30, 9 + 30 + len(SUFFIX))
    slot = None
    while not engine.idle:
        engine.step()
        slot = engine.running[0].slot if engine.running else slot
        assert engine.slots.ids_SN[slot, place].tolist() == list(SUFFIX)
        assert not engine.slots.masked_SN[slot, place].any()
    given: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True, "diffusion": policy}
    found = generate(BIDIRECTIONAL, prompt_of(9), SUFFIX, **given)
    assert len(found) == 30 and MASK not in found
    for other in ((), SUFFIX[::-1]):
        assert found != generate(BIDIRECTIONAL, prompt_of(9), other, **given)


@pytest.mark.parametrize("suffix", [SUFFIX, ()])
def test_guidance_is_llada_s_formula(suffix: tuple[int, ...]) -> None:
    """In one step: unguided + (scale + 1) * (guided - unguided), all given tokens masked."""
    prompt, length, scale = prompt_of(5), 6, 0.9
    blind = full_forward(BIDIRECTIONAL, [MASK] * (len(prompt) + length + len(suffix)))
    seen = full_forward(BIDIRECTIONAL, [*prompt, *[MASK] * length, *suffix])
    combined = (blind + (scale + 1) * (seen - blind))[len(prompt) : len(prompt) + length]
    combined[:, MASK] = -torch.inf
    policy = {"cfg_scale": scale, "decoder": {"kind": "fixed", "steps": 1}}
    given: dict[str, Any] = {"max_tokens": length, "ignore_eos": True, "diffusion": policy}
    assert generate(BIDIRECTIONAL, prompt, suffix, **given) == combined.argmax(-1).tolist()
