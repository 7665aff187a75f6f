"""A checksum of an engine's state, with which ranks detect that they have drifted apart."""

from hashlib import blake2b

from diffray.workers.engine import Engine


def digest(engine: Engine) -> int:
    """Return a checksum of what must be equal on all ranks: canvases, slots and pages.

    It waits for the device, so it does not run in every round.
    """
    state = [
        (
            s.uid,
            s.slot,
            s.block.index,
            s.block.step,
            s.kv.clean_end,
            s.reported.tokens,
            s.kv.pages,
            s.uncond and s.uncond.pages,
        )
        for s in engine.running
    ]
    waiting = [s.uid for s in engine.waiting]
    cells = engine.slots.checksum(engine.running)
    text = repr((state, waiting, engine.kv.num_free, cells))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) >> 1
