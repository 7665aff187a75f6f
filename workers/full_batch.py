"""Runs a full batch once when an engine starts, so that it has the memory for one or refuses.

Every sequence draws from filtered distributions, which takes the most memory per position.
"""

import torch

from diffray.components.config import InvalidField
from diffray.components.params import SamplingParams
from diffray.workers.engine import Engine
from diffray.workers.messages import Request


def try_full_batch(engine: Engine) -> None:
    """Run one step of as many short requests as may run at a time; leave no trace."""
    count, spec = engine.slots.num_slots, engine.model.spec
    most = max(min(spec.canvas_length or spec.block_length, engine.limits.context // 2), 1)
    top_p = 1.0 if "renoise" in spec.iterations else 0.9
    params = SamplingParams(max_tokens=most, temperature=1.0, ignore_eos=True, top_p=top_p)
    try:
        for number in range(count):  # other prompts, as equal first steps are shared
            engine.add(Request(number, (number % spec.vocab_size,), params))
        engine.step()
    except InvalidField:  # the context or the pool is too small for such a request
        return
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            f"the device has no memory for a full batch of {count} requests beside weights and "
            "K/V; lower max_num_seqs, or kv_cache_memory"
        ) from error
    finally:
        engine.cancel_all()
        engine.kv.forget_prefixes()
        engine.forwards = engine.tokens = engine.preemptions = 0
        engine.kv.prefixes.host_queries = engine.kv.prefixes.host_hits = 0
