"""What a replica waits for is reported once it has waited for a while."""

from diffray.cluster.serve.ray_session import ClusterNodes, Resources, Shortages, shortage

FRONT: Resources = {"CPU": 1.0}


def nodes(*total: Resources, free: Resources | None = None) -> ClusterNodes:
    all_free = {name: sum(n[name] for n in total) for name in ("GPU", "CPU")}
    return ClusterNodes(total, all_free if free is None else free)


def node(gpus: float, cpus: float = 16, **more: float) -> Resources:
    return {"GPU": gpus, "CPU": cpus, "memory": 1e9} | more


def test_needed_and_available_resources_are_reported() -> None:
    four: list[Resources] = [FRONT, *[{"GPU": 1.0, "CPU": 1.0}] * 4]
    assert shortage(four, "STRICT_PACK", nodes(node(2, 64), node(3))) == (
        "a replica needs 4 GPU, 5 CPU on one node; the largest node has 3 GPU, 16 CPU, and the "
        "cluster has 5 GPU, 80 CPU on 2 nodes, of which 5 GPU, 80 CPU free"
    )
    assert "node has 0 GPU, 0 CPU, and" in shortage(four, "STRICT_PACK", nodes())
    said = shortage(four, "SPREAD", nodes(node(4), free=node(3)))
    assert " (SPREAD), and the cluster has 4 GPU, 16 CPU on 1 node, of which 3 GPU, 16" in said
    kind: list[Resources] = [FRONT, {"GPU": 1.0, "accelerator_type:H200": 0.001}]
    said = shortage(kind, "STRICT_PACK", nodes(node(8, **{"accelerator_type:L4": 1.0})))
    assert "1 GPU, 1 CPU, H200 on one node; the largest node has 8 GPU, 16 CPU, no H200," in said


def test_a_shortage_is_reported_once_and_only_when_it_lasts() -> None:
    said: list[str] = []
    shortages = Shortages(said.append)
    for now, reasons in enumerate([["a"], [], ["a", "b"], ["b"], *[["b"]] * 8]):
        shortages.see(reasons, now)
    assert said == ["Waiting: b"]
