"""From the deltas of a request's choices to its answer: whole, or chunk by chunk."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from diffray.cluster.api.bodies import ChatBody, StreamOptions
from diffray.cluster.api.errors import as_api_error, invalid
from diffray.cluster.api.parsed_request import Ask
from diffray.cluster.api.responses import Answer, Json, canvas_view
from diffray.cluster.api.run import Choice, Runner
from diffray.cluster.control.engine_client import DeadlineExceeded, EngineFailed, Overloaded
from diffray.workers.text import Tokenizer

_FAILURES: Final = (Overloaded, EngineFailed, DeadlineExceeded)


async def whole(runner: Runner, ask: Ask, answer: Answer) -> Json:
    """Return the answer once all choices are complete."""
    if ask.body.stream:
        raise invalid("a stream cannot be answered here; leave stream out", "stream")
    try:
        async with aclosing(runner.deltas(ask.choices, ask.body.priority)) as deltas:
            async for _ in deltas:
                pass
    except _FAILURES as error:
        raise as_api_error(error) from error
    made = ask.envelope(answer.kind, [answer.whole(choice) for choice in ask.choices])
    if ask.body.return_token_ids and isinstance(ask.body, ChatBody):
        made["prompt_token_ids"] = list(ask.prompts[0].ids)
    return made | {"usage": ask.usage(), "diffusion": ask.diffusion()}


async def stream(
    runner: Runner, ask: Ask, answer: Answer, tokenizer: Tokenizer | None
) -> AsyncGenerator[Json, None]:
    """Yield the answer's chunks; closing the generator cancels unfinished choices."""
    options = ask.body.stream_options or StreamOptions()
    told = dict.fromkeys(range(len(ask.choices)), 0)  # tokens, by choice
    opened: set[int] = set()

    def chunk(*choices: Json) -> Json:
        made = ask.envelope(answer.chunk_kind, list(choices))
        if options.continuous_usage_stats:
            made["usage"] = ask.usage()
        elif options.include_usage:
            made["usage"] = None
        return made

    def opening(choice: Choice) -> Json | None:
        opened.add(choice.index)
        if (first := answer.opening(choice)) is None:
            return None
        made = chunk(first)
        if ask.body.return_token_ids and isinstance(ask.body, ChatBody):
            made["prompt_token_ids"] = list(choice.request.prompt)
        return made

    try:
        async with aclosing(runner.deltas(ask.choices, ask.body.priority)) as deltas:
            async for choice, delta in deltas:
                if choice.index not in opened and (made := opening(choice)) is not None:
                    yield made
                if delta.canvas is not None:
                    view = canvas_view(choice.index, delta.canvas, tokenizer)
                    yield chunk() | {"diffusion": view}
                if delta.text or (delta.token_ids and answer.tells_tokens):
                    yield chunk(answer.piece(choice, delta, told[choice.index]))
                    told[choice.index] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    yield chunk(answer.ending(choice))
    except _FAILURES as error:
        raise as_api_error(error) from error
    if options.include_usage:
        yield chunk() | {"usage": ask.usage(), "diffusion": ask.diffusion()}
