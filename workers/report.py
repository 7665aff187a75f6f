"""Turns a round's outcome into updates: only final tokens are reported."""

from diffray.components.pinned_canvas import LITERAL, PinnedCanvas
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
    if isinstance(sequence.canvas, PinnedCanvas):
        return _report_pinned(sequence, sequence.canvas, outcome)
    canvas, block, reported = sequence.canvas, sequence.block, sequence.reported
    # An editing decoder may replace its tokens until the block is done.
    edits = sequence.policy.decoder.edits and not outcome.done
    begin = canvas.prompt_len + reported.tokens
    stop = block.start if edits else min(block.start + outcome.decided, canvas.limit)
    if reported.end_id is not None:
        stop = begin
    skip = block.start  # positions before this are in canvas.final
    first = max(begin, skip)
    assert begin >= skip or begin >= stop, "final tokens of an earlier block were not reported"
    ids = outcome.ids[first - skip : max(stop - skip, 0)]
    end = next((i for i, token in enumerate(ids) if token in sequence.end_ids), None)
    if end is not None:
        ids = ids[: end + 1]
        reported.end_id = ids[end]
    reported.tokens += len(ids)
    if outcome.done and reported.end_id is None:
        steps = sequence.steps_before + block.step
        reported.progress = block.index + 1, steps
    last = first - skip + len(ids)
    shown = _canvas(sequence, outcome) if sequence.watch else None
    drafts = 0
    if shown is not None and sequence.policy.iteration.drafts:
        known = skip - canvas.prompt_len + outcome.decided
        drafts = max(len(shown) - shown.count(None) - known, 0)
    return Update(
        uid=sequence.uid,
        ids=ids,
        steps=outcome.steps[first - skip : last],
        logprobs=outcome.logprobs[first - skip : last],
        finish_reason=_finish_reason(sequence, outcome),
        stop_id=reported.end_id,
        forwards=sequence.forwards,
        progress=Progress(*reported.progress),
        top_logprobs=outcome.top[first - skip : last],
        cached_tokens=sequence.kv.cached,
        approximate=sequence.kv.approximate,
        canvas=shown,
        drafts=drafts,
    )


def _report_pinned(sequence: Sequence, canvas: PinnedCanvas, outcome: Outcome) -> Update:
    """Return the answer only once it is complete: it takes few forwards, and the canvas shrinks."""
    update = Update(sequence.uid, forwards=sequence.forwards, cached_tokens=sequence.kv.cached)
    if sequence.watch:
        update.canvas = _pinned_canvas(sequence, canvas, outcome)
    if not outcome.done:
        return update
    canvas.note(canvas.first_cell(sequence.block), outcome)
    if sequence.block.index + 1 < canvas.num_blocks:
        return update
    ids = [*canvas.final, *outcome.ids[sequence.block.num_prompt :]]
    ids += canvas.cells[len(ids) :]
    stop = next(
        at for at, token in enumerate(ids) if token in (*sequence.end_ids, canvas.template.end_id)
    )
    update.ids, update.stop_id, update.finish_reason = ids[: stop + 1], ids[stop], "stop"
    notes = [canvas.notes.get(at, LITERAL) for at in range(stop + 1)]
    update.steps = [note.step for note in notes]
    update.logprobs = [note.logprob for note in notes]
    update.top_logprobs = [note.ranking for note in notes] if sequence.params.top_logprobs else []
    update.fields = canvas.fields(ids) if sequence.params.logprobs else {}
    sequence.reported.tokens, sequence.reported.end_id = len(update.ids), update.stop_id
    return update


def _pinned_canvas(sequence: Sequence, canvas: PinnedCanvas, outcome: Outcome) -> list[int | None]:
    """Return the answer's part of the canvas as it is now."""
    shown = canvas.given(canvas.prompt_len, canvas.blocks_stop)
    shown += canvas.cells[len(shown) :]
    first = canvas.first_cell(sequence.block)
    for at, (token, hidden) in enumerate(zip(outcome.ids, outcome.masked.tolist(), strict=True)):
        if not hidden and 0 <= first + at < len(shown):
            shown[first + at] = token
    return shown


def _finish_reason(sequence: Sequence, outcome: Outcome) -> str | None:
    all_done = outcome.done and sequence.in_last_block
    if sequence.reported.end_id is None:
        full = sequence.reported.tokens == sequence.params.max_tokens
        return "length" if full or all_done else None
    early = sequence.policy.iteration.early_stop
    return "stop" if early or all_done else None


def _canvas(sequence: Sequence, outcome: Outcome) -> list[int | None]:
    """Return the generated part: finished blocks, the current one, drafts, and masks after it."""
    masked = outcome.masked.tolist()
    block = [None if hidden else token for token, hidden in zip(outcome.ids, masked, strict=True)]
    canvas = [*sequence.canvas.final, *block[sequence.block.num_prompt :], *outcome.drafts]
    length = min(sequence.canvas.blocks_stop, sequence.canvas.limit) - sequence.canvas.prompt_len
    return canvas[:length] + [None] * (length - len(canvas))
