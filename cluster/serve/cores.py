"""How many threads each rank on the CPU gets where `diffray serve` has this machine to itself."""

from diffray.cluster.serve.app import on_this_machine
from diffray.cluster.serve.config_file import Application
from diffray.cluster.serve.deployment import most_replicas


def threads_of_ranks(applications: tuple[Application, ...], cores: int) -> int | None:
    """Return an equal share of the cores for all ranks there may be at once; None: there are none.

    With more threads than cores, the threads of a rank would wait for one that has no core.
    """
    configs = [on_this_machine(each.config) for each in applications]
    ranks = sum(
        most_replicas(config) * config.engine_kwargs.tensor_parallel_size
        for config in configs
        if config.engine_kwargs.device == "cpu"
    )
    return max(cores // ranks, 1) if ranks else None
