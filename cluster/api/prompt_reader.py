"""The prompts of a body as token ids: texts, conversations and their images."""

from typing import Final

from diffray.cluster.api.bodies import ChatBody, CompletionBody, GenerationBody, TemplateFields
from diffray.cluster.api.chat_messages import Message
from diffray.cluster.api.choices import Prompt
from diffray.cluster.api.errors import as_api_error, invalid
from diffray.cluster.api.remote_images import RemoteImages
from diffray.cluster.api.templates import conversation_text
from diffray.cluster.api.tokens import Tokens
from diffray.components.image import Sight
from diffray.workers.image_files import place_images

_MOST_IMAGES: Final = 16  # of a conversation: decoding one takes some tenths of a second


class PromptReader:
    """Turns clients' prompts into token ids, with a service's tokenizer and its chat template."""

    def __init__(self, tokens: Tokens, sight: Sight | None, remote: RemoteImages) -> None:
        self._tokens, self._sight = tokens, sight
        self._remote = remote

    async def prompts(self, body: GenerationBody) -> list[Prompt]:
        match body:
            case ChatBody():
                return [await self.conversation(body.messages, body, body.add_special_tokens)]
            case CompletionBody():
                return await self._texts_and_ids(body)
        raise NotImplementedError(type(body))

    async def conversation(
        self, messages: list[Message], fields: TemplateFields, special: bool
    ) -> Prompt:
        urls = [url for message in messages for url in message.images]
        if urls and self._sight is None:
            raise invalid("this model takes no images; leave them out", "messages")
        if len(urls) > _MOST_IMAGES:
            raise invalid(f"send at most {_MOST_IMAGES} images (given: {len(urls)})", "messages")
        text = await conversation_text(messages, fields, self._tokens.tokenizer)
        (ids,) = await self._tokens.encode([text], special, "messages")
        if not urls or self._sight is None:
            return Prompt(tuple(ids))
        sight, images = self._sight, []
        try:
            for url in urls:
                images.append(await self._remote.image(url, sight))
            placed, shown = place_images(ids, images, sight)
        except ValueError as error:
            refusal = as_api_error(error)
            refusal.param = "messages"
            raise refusal from None
        return Prompt(placed, images=shown)

    async def _texts_and_ids(self, body: CompletionBody) -> list[Prompt]:
        texts = [each for each in body.prompt if isinstance(each, str)]
        encoded = iter(await self._tokens.encode(texts, body.add_special_tokens))
        suffix: list[int] = []
        if body.suffix is not None:
            (suffix,) = await self._tokens.encode([body.suffix], False, "suffix")
        prompts = []
        for each in body.prompt:
            ids = next(encoded) if isinstance(each, str) else each
            prompt = Prompt(tuple(ids), tuple(suffix))
            if body.echo:
                before = each if isinstance(each, str) else self._tokens.prompt_text(each)
                prompt = prompt._replace(before=before, after=body.suffix or "")
            prompts.append(prompt)
        return prompts
