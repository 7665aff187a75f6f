"""Single tokens as clients see them: their text and their bytes."""

from diffray.workers.text import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """The text of each token id, looked up once."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}
        self._byte_of = _byte_alphabet()

    def __getitem__(self, token: int) -> tuple[str, list[int]]:
        """Return a token's text and its bytes; without a tokenizer, `token_id:7`."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._look_up(token)
        return found

    def _look_up(self, token: int) -> tuple[str, list[int]]:
        if self._tokenizer is None:
            text = f"token_id:{token}"
            return text, list(text.encode())
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if _REPLACEMENT in text:  # part of a character, or the replacement character itself
            spelling = str(self._tokenizer.fast.convert_ids_to_tokens(token))
            if spelling.startswith("<0x") and len(spelling) == 6:
                return text, [int(spelling[3:5], 16)]
            if all(sign in self._byte_of for sign in spelling):
                return text, [self._byte_of[sign] for sign in spelling]
        return text, list(text.encode())


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's alphabet of byte-level tokens: a printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + rank): byte for rank, byte in enumerate(others)}
