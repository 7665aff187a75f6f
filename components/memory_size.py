"""Memory sizes in readable form: 4GiB, 512MB, or a number of bytes."""

import re

_UNITS = {"": 1} | {
    f"{letter}{end}": base**power
    for power, letter in enumerate("KMGT", 1)
    for end, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


def in_bytes(given: int | str | None) -> int | None:
    """Return a text as bytes; return anything else unchanged."""
    if not isinstance(given, str):
        return given
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?(\w*)", given.strip())
    units = {name.lower(): size for name, size in _UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ValueError(f"{given!r:.99} is not an amount of memory; write bytes, 4GiB or 512MB")
    return int(float(found[1]) * units[found[2].lower()])
