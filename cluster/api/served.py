"""What the HTTP endpoint needs of what it serves, one model or an ingress to several.

And what clients may ask about tokens: the paths, their bodies or queries, and what answers them.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from pydantic import Field

from diffray.cluster.api.anthropic_body import CountTokensBody
from diffray.cluster.api.bodies import GenerationBody, Messages, ModelBody, TemplateFields
from diffray.cluster.api.errors import ApiError, Json, invalid
from diffray.cluster.api.fields import parse
from diffray.cluster.control.engine_client import Load


class Served(Protocol):
    """JSON objects in, JSON objects or an ApiError out."""

    async def whole(self, kind: type[GenerationBody], given: object) -> Json:
        """Answer a request of one of the APIs."""
        ...

    def stream(self, kind: type[GenerationBody], given: object) -> AsyncGenerator[Json, None]:
        """Yield the chunks of an answer; closing the generator cancels it."""
        ...

    async def ask(self, path: str, given: object) -> Json:
        """Answer at the path of an `Endpoint`, with the model that the body or query names."""
        ...

    async def models(self) -> Json: ...

    async def model(self, name: str) -> Json: ...

    async def health(self) -> Json:
        """Return details, if there are any; raise if no request can be answered."""
        ...

    async def load(self) -> Load: ...

    async def prometheus(self, *, vllm_names: bool) -> bytes: ...

    def count_refusal(self, error: ApiError) -> None:
        """Count a request that was refused or failed, unless it is counted already."""
        ...


if TYPE_CHECKING:
    from diffray.cluster.api.prompts import PromptReader  # imports a tokenizer's library

_MOST_TOKENS: Final = 2**20  # to decode
EXAMPLE_PROMPT: Final = "Write a Python function that returns the sum of a list."
EXAMPLE_CHAT: Final[Json] = {"messages": [{"role": "user", "content": EXAMPLE_PROMPT}]}


class Endpoint(NamedTuple):
    """What is served at a path: the model of its body or query, and the function that answers.

    Of the function's two arguments the second is that model, parsed.
    """

    given: type[ModelBody]
    carry_out: Callable[[Any, Any], Awaitable[Json]]
    method: str = "POST"
    queried: bool = False  # whether it takes a query, not a body
    example: Json | None = None


class TokenizeBody(ModelBody, TemplateFields):
    """Turn a text or a conversation into tokens."""

    prompt: str | None = Field(None, description="A text; or send messages.")
    messages: Messages | None = Field(None, description="A conversation; or send a prompt.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens; default: to a prompt only."
    )
    return_token_strs: bool = Field(False, description="Return how each token is spelt.")


async def _tokenize(prompts: "PromptReader", body: TokenizeBody) -> Json:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send either prompt or messages", "prompt")
    special, tokens = body.add_special_tokens, prompts.tokens
    if body.messages is not None:
        (ids, *_) = await prompts.conversation(body.messages, body, bool(special))
    else:
        (found,) = await tokens.encode([body.prompt or ""], special is not False)
        ids = tuple(found)
    fast = tokens.tokenizer.fast
    return {
        "count": len(ids),
        "max_model_len": tokens.context,
        "tokens": list(ids),
        "token_strs": fast.convert_ids_to_tokens(list(ids)) if body.return_token_strs else None,
    }


async def _count_tokens(prompts: "PromptReader", body: CountTokensBody) -> Json:
    found = await _tokenize(prompts, parse(TokenizeBody, body.for_tokenize()))
    return {"input_tokens": found["count"]}


class DetokenizeBody(ModelBody):
    """Turn tokens into a text."""

    tokens: list[int] = Field(
        max_length=_MOST_TOKENS, fail_fast=True, description="The ids of the tokens."
    )


async def _detokenize(prompts: "PromptReader", body: DetokenizeBody) -> Json:
    return {"prompt": await prompts.tokens.decode(body.tokens)}


class TokenizerInfoQuery(ModelBody):
    """Describe the tokenizer."""


async def _tokenizer_info(prompts: "PromptReader", _: TokenizerInfoQuery) -> Json:
    return prompts.tokens.info()


QUESTIONS: Final = {
    "/v1/messages/count_tokens": Endpoint(CountTokensBody, _count_tokens, example=EXAMPLE_CHAT),
    "/tokenize": Endpoint(TokenizeBody, _tokenize, example={"prompt": EXAMPLE_PROMPT}),
    "/detokenize": Endpoint(DetokenizeBody, _detokenize, example={"tokens": [1, 2, 3]}),
    "/tokenizer_info": Endpoint(TokenizerInfoQuery, _tokenizer_info, "GET", queried=True),
}
