"""Turns a round's outcome into updates: only final tokens are reported."""

from diffray.components.pins import LITERAL, Pins
from diffray.components.sequence import Sequence
from diffray.workers.messages import Progress, Update
from diffray.workers.outcome import Outcome


def merge(found: dict[int, Update], update: Update) -> None:
    """Add an update to those of its request that were found earlier in the round."""
    if update.uid in found:
        found[update.uid].extend(update)
    else:
        found[update.uid] = update


def report(sequence: Sequence, outcome: Outcome) -> Update:
    """Return the new final tokens up to the first end token, and record them as reported."""
    if sequence.pins is not None:
        return _report_pinned(sequence, sequence.pins, outcome)
    # An editing decoder may replace its tokens until the block is done.
    edits = sequence.policy.decoder.edits and not outcome.done
    begin = sequence.prompt_len + sequence.emitted
    stop = sequence.start if edits else min(sequence.start + outcome.decided, sequence.limit)
    if sequence.end_id is not None:
        stop = begin
    skip = sequence.start  # positions before this are in sequence.final
    first = max(begin, skip)
    assert begin >= skip or begin >= stop, "final tokens of an earlier block were not reported"
    ids = outcome.ids[first - skip : max(stop - skip, 0)]
    end = next((i for i, token in enumerate(ids) if token in sequence.end_ids), None)
    if end is not None:
        ids = ids[: end + 1]
        sequence.end_id = ids[end]
    sequence.emitted += len(ids)
    if outcome.done and sequence.end_id is None:
        sequence.reported = sequence.index + 1, sequence.steps_before + sequence.step
    last = first - skip + len(ids)
    return Update(
        uid=sequence.uid,
        ids=ids,
        steps=outcome.steps[first - skip : last],
        logprobs=outcome.logprobs[first - skip : last],
        finish_reason=_finish_reason(sequence, outcome),
        stop_id=sequence.end_id,
        forwards=sequence.forwards,
        progress=Progress(*sequence.reported),
        top_logprobs=outcome.top[first - skip : last],
        cached_tokens=sequence.cached,
        approximate=sequence.approximate,
        canvas=_canvas(sequence, outcome) if sequence.watch else None,
    )


def _report_pinned(sequence: Sequence, pins: Pins, outcome: Outcome) -> Update:
    """Return the answer only once it is complete: it takes few forwards, and the canvas shrinks."""
    update = Update(sequence.uid, forwards=sequence.forwards, cached_tokens=sequence.cached)
    if sequence.watch:
        update.canvas = _pinned_canvas(sequence, pins, outcome)
    if not outcome.done:
        return update
    pins.note(sequence.start - sequence.prompt_len, outcome)
    if sequence.index + 1 < sequence.num_blocks:
        return update
    ids = [*sequence.final, *outcome.ids[sequence.prompt_in_block :]]
    ids += pins.cells[len(ids) :]
    stop = next(
        at for at, token in enumerate(ids) if token in (*sequence.end_ids, pins.canvas.end_id)
    )
    update.ids, update.stop_id, update.finish_reason = ids[: stop + 1], ids[stop], "stop"
    notes = [pins.notes.get(at, LITERAL) for at in range(stop + 1)]
    update.steps = [note.step for note in notes]
    update.logprobs = [note.logprob for note in notes]
    update.top_logprobs = [note.ranking for note in notes] if sequence.params.top_logprobs else []
    update.fields = pins.fields(ids) if sequence.params.logprobs else {}
    sequence.emitted, sequence.end_id = len(update.ids), update.stop_id
    return update


def _pinned_canvas(sequence: Sequence, pins: Pins, outcome: Outcome) -> list[int | None]:
    """Return the answer's part of the canvas as it is now."""
    canvas = sequence.given(sequence.prompt_len, sequence.blocks_stop)
    canvas += pins.cells[len(canvas) :]
    first = sequence.start - sequence.prompt_len
    for at, (token, hidden) in enumerate(zip(outcome.ids, outcome.masked.tolist(), strict=True)):
        if not hidden and 0 <= first + at < len(canvas):
            canvas[first + at] = token
    return canvas


def _finish_reason(sequence: Sequence, outcome: Outcome) -> str | None:
    all_done = outcome.done and sequence.in_last_block
    if sequence.end_id is None:
        full = sequence.emitted == sequence.params.max_tokens
        return "length" if full or all_done else None
    early = sequence.policy.iteration.early_stop
    return "stop" if early or all_done else None


def _canvas(sequence: Sequence, outcome: Outcome) -> list[int | None]:
    """Return the generated part: finished blocks, the current one, and masks after it."""
    masked = outcome.masked.tolist()
    block = [None if hidden else token for token, hidden in zip(outcome.ids, masked, strict=True)]
    canvas = [*sequence.final, *block[sequence.prompt_in_block :]]
    length = min(sequence.blocks_stop, sequence.limit) - sequence.prompt_len
    return canvas[:length] + [None] * (length - len(canvas))
