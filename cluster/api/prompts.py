"""The prompts of a body as token ids: texts, conversations by their chat template, images."""

import asyncio
import inspect
import socket
from collections.abc import Iterable
from functools import partial
from ipaddress import ip_address
from typing import Final

import httpx2

from diffray.cluster.api.bodies import ChatBody, CompletionBody, GenerationBody, TemplateFields
from diffray.cluster.api.choices import Prompt
from diffray.cluster.api.errors import as_api_error, invalid
from diffray.cluster.api.fields import Message
from diffray.cluster.api.settings import ApiSettings
from diffray.cluster.api.tokens import Tokens
from diffray.cluster.frontend.image_files import from_data_url, place_images, read_image
from diffray.cluster.frontend.text import Tokenizer
from diffray.components.config import InvalidField
from diffray.components.image import Image, Sight

_SECONDS: Final = 10.0  # for an image, with all redirects
_REDIRECTS: Final = 3
_AT_ONCE: Final = 2  # images decoded concurrently, for all requests: each may take 100 MB
_HEADERS: Final = {"Accept": "image/*", "Accept-Encoding": "identity"}  # so that no part expands


class RemoteImages:
    """Reads images by URL, each at most as large as a request's body may be.

    It connects only to addresses that are public or themselves allowed, so that a name whose
    address changes gives no access to the operator's other machines.
    """

    def __init__(self, settings: ApiSettings | None = None, seconds: float = _SECONDS) -> None:
        settings = settings or ApiSettings()
        self._hosts = frozenset(settings.allowed_media_domains)
        self._most_bytes, self._seconds = settings.max_body_bytes, seconds
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._names = {httpx2.URL(f"http://{host}").host for host in self._hosts}
        self._tls = httpx2.create_ssl_context() if self._hosts else False  # slow to create

    async def image(self, url: str, sight: Sight) -> Image:
        """Return the patches of the image at a URL; a thread decodes it when its turn comes."""
        data = await self.read(url)
        async with self._turns:
            return await asyncio.to_thread(read_image, data, sight)

    async def read(self, url: str) -> bytes:
        """Return the content of a data URL, or of a URL of an allowed host."""
        if url.startswith("data:"):
            return from_data_url(url)
        try:
            where = httpx2.URL(url)
            self._check(where, "")
            async with asyncio.timeout(self._seconds):
                return await self._fetch(where)
        except TimeoutError:
            raise _refusal(f"{where.host} takes longer than {self._seconds:g} s") from None
        except (httpx2.HTTPError, OSError):
            raise _refusal(f"{where.host} cannot be reached, or the connection broke") from None
        except httpx2.InvalidURL as error:
            raise _refusal(f"this is not a URL: {error}") from None

    async def _fetch(self, url: httpx2.URL) -> bytes:
        async with httpx2.AsyncClient(verify=self._tls, timeout=None, trust_env=False) as client:
            for _ in range(_REDIRECTS + 1):
                # Connect to the address that was checked: the name may get another one.
                request = client.build_request(
                    "GET",
                    url.copy_with(host=await self._address(url), userinfo=b""),
                    headers=_HEADERS | {"Host": url.netloc.decode("ascii")},
                    extensions={"sni_hostname": url.raw_host.decode("ascii")},
                )
                answer = await client.send(request, stream=True)
                try:
                    if not answer.has_redirect_location:
                        return await self._content(url, answer)
                finally:
                    await answer.aclose()
                moved = url.join(answer.headers["Location"])
                self._check(moved, f"{url.host} redirects to another place: ")
                url = moved
        raise _refusal(f"{url.host} redirects more than {_REDIRECTS} times")

    async def _content(self, url: httpx2.URL, answer: httpx2.Response) -> bytes:
        if answer.status_code != 200:
            raise _refusal(f"{url.host} answers with status {answer.status_code}")
        found = bytearray()
        async for part in answer.aiter_raw():
            found += part
            if len(found) > self._most_bytes:
                raise _refusal(f"it has more than {self._most_bytes} bytes")
        return bytes(found)

    async def _address(self, url: httpx2.URL) -> str:
        """Return an allowed address of the URL's host, preferably an IPv4 one."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(url.raw_host, None, type=socket.SOCK_STREAM)
        addresses = {ip_address(each[4][0]) for each in found}
        for address in sorted(addresses, key=lambda each: each.version):
            if address.is_global or str(address) in self._names:
                return str(address)
        raise _refusal(f"{url.host} has no public address, and its own is not allowed")

    def _check(self, url: httpx2.URL, why: str) -> None:
        if url.scheme in ("http", "https") and url.netloc.decode("ascii") in self._hosts:
            return
        raise _refusal(
            f"{why}send images as data URLs, data:image/png;base64,...; others are not fetched, "
            "except from the hosts that the server allows (--allowed-media-domains)"
        )


def _refusal(reason: str) -> InvalidField:
    return InvalidField(f"an image's URL: {reason}", "images")


async def conversation_text(
    messages: list[Message], fields: TemplateFields, tokenizer: Tokenizer
) -> str:
    """Return a conversation as text, up to the start of the assistant's answer."""
    if not tokenizer.fast.chat_template:
        raise invalid(
            "the checkpoint has no chat template; use /v1/completions with a prompt in the "
            "model's own format"
        )
    if fields.continue_final_message and fields.add_generation_prompt:
        raise invalid(
            "continue_final_message and add_generation_prompt exclude each other; "
            "send add_generation_prompt: false",
            "continue_final_message",
        )
    _refuse_reserved(fields.chat_template_kwargs, tokenizer)
    tools = [each.model_dump(exclude_unset=True) for each in fields.shown_tools] or None
    effort = fields.model_dump(include={"reasoning_effort"}, exclude_none=True)
    render = partial(
        tokenizer.chat_text,
        [each.for_template() for each in messages],
        tools=tools,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        **effort | fields.chat_template_kwargs,
    )
    try:
        return await asyncio.to_thread(render)
    except ValueError as error:
        raise invalid(str(error), "messages") from None


def _refuse_reserved(given: Iterable[str], tokenizer: Tokenizer) -> None:
    """Refuse template arguments that control rendering instead of filling in variables."""
    reserved = inspect.signature(tokenizer.fast.apply_chat_template).parameters
    for name in given:
        if name in reserved or name in ("messages", "conversations"):
            place = f"chat_template_kwargs.{name}"
            raise invalid(f"{place} cannot be overridden", place)


_MOST_IMAGES: Final = 16  # of a conversation: decoding one takes some tenths of a second


class PromptReader:
    """Turns clients' prompts into token ids, with a service's tokenizer and its chat template."""

    def __init__(self, tokens: Tokens, sight: Sight | None, remote: RemoteImages) -> None:
        self.tokens, self._sight = tokens, sight
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
        text = await conversation_text(messages, fields, self.tokens.tokenizer)
        (ids,) = await self.tokens.encode([text], special, "messages")
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
        encoded = iter(await self.tokens.encode(texts, body.add_special_tokens))
        suffix: list[int] = []
        if body.suffix is not None:
            (suffix,) = await self.tokens.encode([body.suffix], False, "suffix")
        prompts = []
        for each in body.prompt:
            ids = next(encoded) if isinstance(each, str) else each
            prompt = Prompt(tuple(ids), tuple(suffix))
            if body.echo:
                before = each if isinstance(each, str) else self.tokens.prompt_text(each)
                prompt = prompt._replace(before=before, after=body.suffix or "")
            prompts.append(prompt)
        return prompts
