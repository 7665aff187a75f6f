"""Images by URL: fetched only from hosts that the operator allows, decoded in threads."""

import asyncio
import socket
from ipaddress import ip_address
from typing import Final

import httpx2

from diffray.cluster.api.settings import ApiSettings
from diffray.components.config import InvalidField
from diffray.components.image import Image, Sight
from diffray.workers.image_files import from_data_url, read_image

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
