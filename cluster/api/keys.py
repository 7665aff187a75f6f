"""API keys: configured in plain text or as digests, stored only as digests."""

import hmac
import re
from collections.abc import Iterable
from hashlib import sha256
from typing import Final

_MARK: Final = "sha256:"
_DIGEST: Final = re.compile(rf"{_MARK}[0-9a-f]{{64}}")
_KEY: Final = re.compile(r"[\x21-\x7e]{1,512}")  # characters that a header carries unchanged


def key_digest(key: str) -> str:
    """Return a key's digest, which a configuration may contain instead of the key."""
    return _MARK + sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def as_digest(given: str) -> str:
    """Return the digest of a configured key or digest. Errors never quote a key."""
    if _DIGEST.fullmatch(given):
        return given
    if given.startswith(_MARK):
        raise ValueError(f"a digest is {_MARK} and 64 hexadecimal digits in lower case")
    if not _KEY.fullmatch(given):
        raise ValueError("a key is 1 to 512 printable ASCII characters without spaces")
    return key_digest(given)


def is_known(key: str, digests: Iterable[str]) -> bool:
    """Return whether a key is one of these, in constant time."""
    shown = key_digest(key)
    return any([hmac.compare_digest(shown, digest) for digest in digests])
