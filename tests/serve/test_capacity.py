"""What a cluster lacks is told in words, and only where it lacks something."""

import pytest

from diffray.cluster.serve.capacity import ClusterNodes, Resources, Shortages, fits, shortage

FRONT: Resources = {"CPU": 1.0}
RANK: Resources = {"GPU": 1.0, "CPU": 1.0}
FOUR = [FRONT, RANK, RANK, RANK, RANK]


def nodes(*total: Resources, free: tuple[Resources, ...] | None = None) -> ClusterNodes:
    return ClusterNodes(total, total if free is None else free)


def node(gpus: float, cpus: float = 16, **more: float) -> Resources:
    return {"GPU": gpus, "CPU": cpus, "memory": 1e9} | more


@pytest.mark.parametrize(
    ("strategy", "cluster", "words"),
    [
        ("STRICT_PACK", nodes(node(4)), None),
        ("STRICT_PACK", nodes(node(2), node(4)), None),
        ("PACK", nodes(node(2), node(2)), None),
        ("SPREAD", nodes(node(4)), None),
        ("STRICT_SPREAD", nodes(*[node(1)] * 5), None),
        ("STRICT_PACK", nodes(node(2, 64), node(3)), "largest node has 3 GPU, 16 CPU; add a large"),
        ("STRICT_PACK", nodes(node(2), node(2)), "span nodes with placement_group_config"),
        ("STRICT_PACK", nodes(node(0, 64), node(1)), "has 1 GPU, 16 CPU; add a node that is large"),
        ("STRICT_PACK", nodes(), "largest node has 0 GPU, 0 CPU"),
        ("PACK", nodes(node(2), node(1)), "the cluster has 3 GPU, 32 CPU on 2 nodes; add nodes"),
        ("PACK", nodes(node(2)), "the cluster has 2 GPU, 16 CPU on 1 node;"),
        (
            "STRICT_SPREAD",
            nodes(node(8), node(8)),
            "on 5 nodes (STRICT_SPREAD), and the cluster has",
        ),
        ("PACK", nodes(node(4), free=(node(3),)), "other work holds it"),
        ("STRICT_SPREAD", nodes(*[node(1)] * 5, free=(node(1),)), "other work holds it"),
    ],
)
def test_what_is_missing_is_said(strategy: str, cluster: ClusterNodes, words: str | None) -> None:
    reason = shortage(FOUR, strategy, cluster)
    if words is None:
        assert reason is None
        return
    assert reason is not None and words in reason
    assert reason.startswith("a replica needs 4 GPU, 5 CPU")


def test_a_kind_of_accelerator_is_named_and_not_counted() -> None:
    wanted = [FRONT, {"GPU": 1.0, "accelerator_type:H200": 0.001}]
    other = nodes(node(8, **{"accelerator_type:L4": 1.0}))
    reason = shortage(wanted, "STRICT_PACK", other)
    assert reason == (
        "a replica needs 1 GPU, 1 CPU, H200 on one node, and the largest node has 8 GPU, 16 CPU, "
        "no H200; add a node that is large enough"
    )
    assert shortage(wanted, "PACK", nodes(node(8, **{"accelerator_type:H200": 1.0}))) is None


def test_large_bundles_are_placed_first() -> None:
    assert fits([{"GPU": 1}, {"GPU": 3}, {"GPU": 2}], "PACK", [{"GPU": 3}, {"GPU": 3}])


def test_fractions_of_a_resource_fill_a_node() -> None:
    assert fits([{"GPU": 0.1}] * 10, "PACK", [{"GPU": 1.0}])
    assert not fits([{"GPU": 0.1}] * 11, "PACK", [{"GPU": 1.0}])


def test_a_shortage_is_told_once_and_only_when_it_lasts() -> None:
    said: list[str] = []
    shortages = Shortages(said.append)
    for now, reasons in enumerate([["a"], [], ["a", "b"], ["b"], *[["b"]] * 8]):
        shortages.see(reasons, now)
    assert said == ["Waiting: b"]
