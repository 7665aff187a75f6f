"""Who owns each page of an engine's memory for K/V."""

from collections import Counter

from diffray.workers.engine import Engine


def pages_are_in_order(engine: Engine) -> None:
    """Each page is free, idle, of a first step, shared by those who hold its node, or one's own."""
    kv, prefixes = engine.kv, engine.kv.prefixes
    pages = Counter(kv.unused)
    for node in prefixes.idle:
        assert node.stored and not node.holders
        pages.update(node.pages)
    shared = {node for sequence in engine.running for node in sequence.kv.nodes}
    for node in shared:
        pages.update(node.pages)
    for sequence in engine.running:
        first = [page for node in sequence.kv.nodes for page in node.pages]
        assert sequence.kv.pages[: len(first)] == first
        pages.update(sequence.kv.pages[len(first) :])
        for copy in (*sequence.mirrors, *sequence.copies):
            pages.update(copy.pages)
    kept = [page for step in kv.first_steps.kept.values() for page in step.pages]
    assert len(kept) == kv.first_steps.num_pages
    assert pages + Counter(kept) == Counter(range(1, kv.num_pages))
    idle = sum(len(node.pages) for node in prefixes.idle)
    assert kv.num_free == len(kv.unused) + idle + len(kept)
    host = Counter(prefixes.free_host)
    for node in prefixes.away:
        assert node.stored and not node.holders and not node.pages
        assert all(child in prefixes.away for child in node.children.values())
        host.update(node.host_pages)
    assert host == Counter(range(kv.host.num_pages))
    assert prefixes.num_device == sum(len(node.pages) for node in shared | {*prefixes.idle})
