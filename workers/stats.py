"""What an engine reports of itself with every reply, and under which metric each number is shown.

A number that is counted here and declared with `gauge` or `counter` appears in /metrics.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Shown(NamedTuple):
    """A field's metric: its name without diffray's prefix, its description, and its kind."""

    name: str
    text: str
    counts: bool  # whether it only grows


def gauge(name: str, text: str) -> Any:
    """Declare a field that is 0 by default and shown as a gauge."""
    return field(default=0, metadata={"shown": Shown(name, text, False)})


def counter(name: str, text: str) -> Any:
    """Declare a field that is 0 by default and shown as a counter."""
    return field(default=0, metadata={"shown": Shown(name, text, True)})


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """A rank's memory for prefixes, and its counts of host hits and copies since the start."""

    device_bytes: int = 0
    host_bytes: int = 0
    host_capacity: int = 0  # in bytes
    host_queries: int = counter(
        "external_prefix_cache_queries",
        "Tokens of prompts looked up on the host, as they were not on the device.",
    )
    host_hits: int = counter("external_prefix_cache_hits", "Of these, tokens found on the host.")
    stored_bytes: int = counter(
        "kv_offload_store_bytes", "Bytes copied from each device to the host."
    )
    loaded_bytes: int = counter(
        "kv_offload_load_bytes", "Bytes copied from the host to each device."
    )


@dataclass(frozen=True, slots=True)
class DraftStats:
    """An engine's drafts since the start: canvases under `verify`, else tokens."""

    run: int = counter("spec_decode_num_draft_tokens", "Drafts that a forward verified.")
    right: int = counter("spec_decode_num_accepted_tokens", "Of these, drafts that were right.")


@dataclass(frozen=True, slots=True)
class Stats:
    """An engine's load, and its counts since the start."""

    running: int = 0
    waiting: int = 0
    free_pages: int = 0
    num_pages: int = 0  # that can be handed out
    preemptions: int = 0
    forwards: int = counter("num_forwards", "Forwards of the model; a shared one counts once.")
    tokens: int = 0  # reported as final
    prefixes: PrefixStats = PrefixStats()
    drafts: DraftStats = DraftStats()
