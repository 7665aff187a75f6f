"""Prefix sharing: requests with a common prefix read the same K/V, with block-causal attention.

There the K/V of a block depend only on the tokens up to its end. Requests that start with the same
tokens, in blocks of the same length, can therefore read the same pages. Stored prefixes form a
tree; the path from its root to a node spells the tokens of a prefix.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING

from diffray.components.lora import LoRA

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


# Tokens; at the root of a tree also the other things that must be equal.
Key = tuple[str | int | LoRA | None, ...]


@dataclass(slots=True, eq=False)
class Node:
    """The K/V of [start, stop): whole blocks in whole pages.

    The first admitted of its holders stores it; the others wait for that. Without holders it stays
    until its pages are needed.
    """

    parent: "Node | None"
    key: Key
    start: int
    stop: int
    pages: list[int]
    stored: bool = False
    children: "dict[Key, Node]" = field(default_factory=dict)
    holders: "dict[Sequence, None]" = field(default_factory=dict)  # in the order of admission


def num_held(nodes: list[Node]) -> int:
    """Return how many of their pages have holders, so that another reader takes no free ones."""
    return sum(len(node.pages) for node in nodes if node.holders)


class Prefixes:
    """The stored prefixes, their pages, and their readers."""

    def __init__(self, page_size: int, *, enabled: bool = True) -> None:
        self.page_size, self.enabled = page_size, enabled
        self._root = Node(None, (), 0, 0, [])
        self._idle: dict[Node, None] = {}  # stored and without holders, least recently used first
        self._idle_pages = 0

    @property
    def num_idle(self) -> int:
        """How many pages can be reclaimed at once."""
        return self._idle_pages

    def find(self, sequence: "Sequence") -> list[Node]:
        """Return the stored nodes of the tokens before a sequence's block, from the first on."""
        found: list[Node] = []
        if not self._shares(sequence):
            return found
        node = self._root
        for start in range(0, self._whole(sequence, sequence.start), self._unit(sequence)):
            child = node.children.get(self._key(sequence, start))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def hold(self, sequence: "Sequence", found: list[Node]) -> None:
        """Give a sequence the pages of these nodes as its first pages."""
        sequence.nodes = found
        for node in found:
            if node in self._idle:
                del self._idle[node]
                self._idle_pages -= len(node.pages)
            node.holders[sequence] = None
            sequence.pages += node.pages

    def promise(self, sequence: "Sequence") -> None:
        """Register what a sequence, which has all its pages, will store before its block."""
        self._grow(sequence, sequence.start, stored=False)

    def reach(self, sequence: "Sequence", soon: "Callable[[Sequence], int] | None" = None) -> None:
        """Move a sequence's clean end past what others have stored.

        With `soon`, also past what others store in the next forward: a layer stores all K/V before
        it reads any.
        """
        for node in sequence.nodes[sequence.clean_end // self._unit(sequence) :]:
            if not node.stored:
                storer = next(iter(node.holders))
                if storer is sequence or soon is None or soon(storer) < node.stop:
                    break
            sequence.clean_end = node.stop

    def has_turn(self, sequence: "Sequence") -> bool:
        """Whether no other sequence is about to store what this one needs next."""
        at = sequence.clean_end // self._unit(sequence)
        if at >= len(sequence.nodes):
            return True
        node = sequence.nodes[at]
        return node.stored or next(iter(node.holders)) is sequence

    def keep(self, sequence: "Sequence", stop: int) -> None:
        """Record that a sequence has stored final K/V from its clean end up to `stop`."""
        for node in sequence.nodes[sequence.clean_end // self._unit(sequence) :]:
            if node.stop <= stop:
                node.stored = True
        self._grow(sequence, stop, stored=True)
        sequence.clean_end = stop

    def release(self, sequence: "Sequence") -> list[int]:
        """Release a sequence; return its pages that are free now."""
        free = sequence.pages[sum(len(node.pages) for node in sequence.nodes) :]
        missing = next((node for node in sequence.nodes if not node.stored), None)
        if missing is not None:  # another holder has to store it, and what follows
            for other in missing.holders:
                other.clean_end = min(other.clean_end, missing.start)
        for node in reversed(sequence.nodes):  # so that the end of a prefix is evicted first
            del node.holders[sequence]
            if node.holders:
                continue
            if node.stored:
                self._idle[node] = None
                self._idle_pages += len(node.pages)
            else:
                free += self._cut(node)
        sequence.nodes = []
        return free

    def give_up(self) -> list[int]:
        """Evict the least recently used node, and return its pages."""
        node = next(iter(self._idle))
        del self._idle[node]
        self._idle_pages -= len(node.pages)
        return self._cut(node)

    def _grow(self, sequence: "Sequence", stop: int, *, stored: bool) -> None:
        """Add nodes for a sequence's own pages up to `stop`, or up to existing nodes."""
        if not self._shares(sequence):
            return
        unit = self._unit(sequence)
        for start in range(len(sequence.nodes) * unit, self._whole(sequence, stop), unit):
            parent = sequence.nodes[-1] if sequence.nodes else self._root
            key = self._key(sequence, start)
            if key in parent.children:
                return  # two sequences stored the same at the same time
            pages = sequence.pages[start // self.page_size : (start + unit) // self.page_size]
            node = Node(parent, key, start, start + unit, pages, stored)
            node.holders[sequence] = None
            parent.children[key] = node
            sequence.nodes.append(node)

    def _shares(self, sequence: "Sequence") -> bool:
        return self.enabled and sequence.policy.cache.keeps_prefix and not sequence.guided

    def _unit(self, sequence: "Sequence") -> int:
        return lcm(sequence.causal_block or 1, self.page_size)

    def _whole(self, sequence: "Sequence", stop: int) -> int:
        return stop - stop % self._unit(sequence)

    def _key(self, sequence: "Sequence", start: int) -> Key:
        tokens = sequence.tokens(start, start + self._unit(sequence))
        ids = sequence.images.key(tokens, start)
        own = sequence.cache_salt, sequence.lora, sequence.causal_block
        return ids if start else (*own, *ids)

    @staticmethod
    def _cut(node: Node) -> list[int]:
        assert node.parent is not None, "the root is no beginning of anything"
        del node.parent.children[node.key]
        return node.pages
