"""Prefix sharing: requests with a common prefix read the same K/V, with block-causal attention.

The K/V of a block then depend only on the tokens up to its end. Requests that start with the same
tokens, in blocks of the same length, can therefore read the same pages. Stored prefixes form a
tree; the path from its root to a node spells the tokens of a prefix.

A node is on the device or, once its pages there were needed, on the host. It leaves the device
after its children, so a path from the root starts with the nodes that are on the device. All ranks
make the same decisions; `HostPages` moves the bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf, lcm
from typing import TYPE_CHECKING

from diffray.components.lora import LoRA

if TYPE_CHECKING:
    from diffray.components.sequence import Sequence


# Tokens; for nodes directly below the root, also everything else that must be equal.
Key = tuple[str | int | LoRA | None, ...]


@dataclass(slots=True, eq=False)
class Node:
    """The K/V of [start, stop): whole blocks in whole pages.

    The holder that was admitted first stores it; the others wait. Without holders, it stays until
    its pages are needed, and may then move to the host.
    """

    parent: "Node | None"
    key: Key
    start: int
    stop: int
    pages: list[int]  # empty while it is on the host
    stored: bool = False
    children: "dict[Key, Node]" = field(default_factory=dict)
    holders: "dict[Sequence, None]" = field(default_factory=dict)  # in the order of admission
    host_pages: list[int] = field(default_factory=list)
    used: float = 0.0  # when its last holder left


def num_held(nodes: list[Node]) -> int:
    """Return how many of their pages have holders: another reader of these takes no free pages."""
    return sum(len(node.pages) for node in nodes if node.holders)


class Prefixes:
    """The stored prefixes, their pages, and their readers.

    To make room on the device, prefixes without readers move to the host, where the least recently
    used ones make room for them; without room there, they are forgotten. So are those without a
    reader for `ttl` seconds.
    """

    def __init__(
        self,
        page_size: int,
        *,
        enabled: bool = True,
        host_pages: int = 0,
        ttl: float | None = None,
    ) -> None:
        self.page_size, self.enabled, self.ttl = page_size, enabled, inf if ttl is None else ttl
        self.now = 0.0  # by the scheduler's clock: all ranks must forget the same prefixes
        self._root = Node(None, (), 0, 0, [])
        self.idle: dict[Node, None] = {}  # stored and without holders, least recently used first
        self._idle_pages = 0
        self.away: dict[Node, None] = {}  # on the host, least recently used first
        self._host_pages = host_pages
        self.free_host = list(range(host_pages))
        self.num_device = 0  # pages of nodes on the device
        self.host_queries = self.host_hits = 0  # tokens, since the start

    @property
    def num_idle(self) -> int:
        """How many pages can be reclaimed immediately."""
        return self._idle_pages

    @property
    def num_host(self) -> int:
        """How many pages of the host are in use."""
        return self._host_pages - len(self.free_host)

    def find(self, sequence: "Sequence") -> list[Node]:
        """Return the nodes of the longest known prefix before a sequence's block, in order."""
        found: list[Node] = []
        if not self._shares(sequence):
            return found
        node = self._root
        stop = self._whole(sequence, sequence.block.final_stop)
        for start in range(0, stop, self._unit(sequence)):
            child = node.children.get(self._key(sequence, start))
            if child is None:
                break
            found.append(child)
            node = child
        return found

    def take(self, found: list[Node]) -> list[int]:
        """Keep nodes from being evicted; return the pages of those that are on the host."""
        for node in found:
            if node in self.idle:
                del self.idle[node]
                self._idle_pages -= len(node.pages)
            self.away.pop(node, None)
        return [page for node in found for page in node.host_pages]

    def hold(self, sequence: "Sequence", found: list[Node], onto: list[int]) -> None:
        """Give a sequence the pages of these nodes as its first pages.

        Contents on the host have been copied to the pages `onto`.
        """
        if self._host_pages and not sequence.forwards and self._shares(sequence):
            here = sum(node.stop - node.start for node in found if node.pages)
            self.host_queries += sequence.canvas.prompt_len - min(here, sequence.canvas.prompt_len)
            self.host_hits += len(onto) * self.page_size
        sequence.kv.nodes = found
        for node in found:
            if node.host_pages:
                size = len(node.host_pages)
                self._return_to_device(node, onto[:size])
                onto = onto[size:]
            node.holders[sequence] = None
            sequence.kv.pages += node.pages

    def promise(self, sequence: "Sequence") -> None:
        """Register the prefix that a sequence, which has all its pages, is going to store."""
        self._grow(sequence, sequence.block.final_stop, stored=False)

    def skip_stored(
        self, sequence: "Sequence", stored_next: "Callable[[Sequence], int] | None" = None
    ) -> None:
        """Move a sequence's clean end past what others have stored.

        With `stored_next`, also past what others store in the next forward: a layer stores all K/V
        before it reads any.
        """
        for node in sequence.kv.nodes[sequence.kv.clean_end // self._unit(sequence) :]:
            if not node.stored:
                storer = next(iter(node.holders))
                if storer is sequence or stored_next is None or stored_next(storer) < node.stop:
                    break
            sequence.kv.clean_end = node.stop

    def has_turn(self, sequence: "Sequence") -> bool:
        """Whether no other sequence is about to store what this one needs next."""
        at = sequence.kv.clean_end // self._unit(sequence)
        if at >= len(sequence.kv.nodes):
            return True
        node = sequence.kv.nodes[at]
        return node.stored or next(iter(node.holders)) is sequence

    def keep(self, sequence: "Sequence", stop: int) -> None:
        """Record that a sequence has stored final K/V from its clean end up to `stop`."""
        for node in sequence.kv.nodes[sequence.kv.clean_end // self._unit(sequence) :]:
            if node.stop <= stop:
                node.stored = True
        self._grow(sequence, stop, stored=True)
        sequence.kv.clean_end = stop

    def release(self, sequence: "Sequence") -> list[int]:
        """Release a sequence; return its pages that are free now."""
        free = sequence.kv.pages[sum(len(node.pages) for node in sequence.kv.nodes) :]
        missing = next((node for node in sequence.kv.nodes if not node.stored), None)
        if missing is not None:  # another holder has to store it, and what follows
            for other in missing.holders:
                other.kv.clean_end = min(other.kv.clean_end, missing.start)
        for node in reversed(sequence.kv.nodes):  # so that the end of a prefix is evicted first
            del node.holders[sequence]
            if node.holders:
                continue
            if node.stored:
                node.used = self.now
                self.idle[node] = None
                self._idle_pages += len(node.pages)
            else:
                free += self._cut(node)
        sequence.kv.nodes = []
        return free

    def give_up(self) -> tuple[list[int], list[int]]:
        """Evict the least recently used node; return its pages, and the host pages it moves to.

        Without room on the host it is forgotten, and there are no host pages.
        """
        node = next(iter(self.idle))
        del self.idle[node]
        self._idle_pages -= len(node.pages)
        node.host_pages = self._room_on_host(len(node.pages))
        if not node.host_pages:
            return self._cut(node), []
        self.away[node] = None
        pages, node.pages = node.pages, []
        self.num_device -= len(pages)
        return pages, node.host_pages

    def forget(self, unused_since: float = inf) -> list[int]:
        """Forget nodes that no request has held since `unused_since`; return their device pages."""
        for node in list(takewhile(lambda node: node.used <= unused_since, self.away)):
            self._drop(node)
        free: list[int] = []
        for node in list(takewhile(lambda node: node.used <= unused_since, self.idle)):
            del self.idle[node]
            self._idle_pages -= len(node.pages)
            free += self._cut(node)
        return free

    def _room_on_host(self, num_pages: int) -> list[int]:
        """Take host pages, dropping nodes there if needed; return none if there are too few."""
        if num_pages > self._host_pages:
            return []
        while num_pages > len(self.free_host) and self.away:
            self._drop(next(iter(self.away)))
        if num_pages > len(self.free_host):
            return []  # others are being copied back
        return [self.free_host.pop() for _ in range(num_pages)]

    def _return_to_device(self, node: Node, pages: list[int]) -> None:
        """Record that a node of the host is on the device now, with its K/V on these pages."""
        self.free_host += node.host_pages
        node.pages, node.host_pages = pages, []
        self.num_device += len(pages)

    def _drop(self, node: Node) -> None:
        """Forget a node on the host, which must be a leaf."""
        assert not node.children, "the end of a prefix leaves the host before its start"
        del self.away[node]
        self.free_host += node.host_pages
        self._cut(node)

    def _grow(self, sequence: "Sequence", stop: int, *, stored: bool) -> None:
        """Add nodes for a sequence's own pages up to `stop`, or up to existing nodes."""
        if not self._shares(sequence):
            return
        unit = self._unit(sequence)
        for start in range(len(sequence.kv.nodes) * unit, self._whole(sequence, stop), unit):
            parent = sequence.kv.nodes[-1] if sequence.kv.nodes else self._root
            key = self._key(sequence, start)
            pages = sequence.kv.pages[start // self.page_size : (start + unit) // self.page_size]
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = Node(parent, key, start, start + unit, pages, stored)
                self.num_device += len(pages)
            elif node in self.away and stored:
                del self.away[node]
                self._return_to_device(node, pages)
            else:
                return  # two sequences stored the same tokens at the same time
            node.holders[sequence] = None
            sequence.kv.nodes.append(node)

    def _shares(self, sequence: "Sequence") -> bool:
        return self.enabled and sequence.policy.shares_prefixes

    def _unit(self, sequence: "Sequence") -> int:
        return lcm(sequence.policy.causal_length or 1, self.page_size)

    def _whole(self, sequence: "Sequence", stop: int) -> int:
        return stop - stop % self._unit(sequence)

    def _key(self, sequence: "Sequence", start: int) -> Key:
        tokens = sequence.canvas.tokens(start, start + self._unit(sequence))
        ids = sequence.images.key(tokens, start)
        own = sequence.cache_salt, sequence.stored_lora, sequence.policy.causal_length
        return ids if start else (*own, *ids)

    def _cut(self, node: Node) -> list[int]:
        assert node.parent is not None, "the root has no parent"
        del node.parent.children[node.key]
        self.num_device -= len(node.pages)
        return node.pages
