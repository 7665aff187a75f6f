"""A checkpoint's facts as text or as JSON: `diffray info`."""

import json
from dataclasses import asdict
from typing import Any

from diffray.components.checkpoints.info import Info


def as_values(info: Info) -> dict[str, Any]:
    """Return the facts in JSON's types."""
    return asdict(info) | {"path": str(info.path)}


def as_lines(info: Info) -> str:
    """Return the facts in two columns; long values are not wrapped."""
    facts = {name: value for name, value in as_values(info).items() if value not in ({}, (), None)}
    width = max(map(len, facts))
    return "\n".join(
        f"{name.replace('_', ' '):<{width}}  {_text(name, value)}" for name, value in facts.items()
    )


def _text(name: str, value: object) -> str:
    if name in ("diffusion", "policies"):
        return json.dumps(value)
    if isinstance(value, dict):
        return ", ".join(f"{_text(name, part)} in {key}" for key, part in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) and "bytes" in name:
        return in_units(value)
    return f"{value:,}" if name.startswith("parameters") else str(value)


def in_units(num_bytes: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = min((max(num_bytes, 1).bit_length() - 1) // 10, len(units) - 1)
    return f"{num_bytes / 1024**power:.4g} {units[power]}"
