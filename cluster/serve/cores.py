"""The threads of each CPU rank if `diffray serve` has the machine to itself."""

from diffray.cluster.serve.app import on_this_machine
from diffray.cluster.serve.config_file import Application
from diffray.cluster.serve.deployment import most_replicas


def threads_of_ranks(applications: tuple[Application, ...], cores: int) -> int | None:
    """Return an equal share of the cores for the maximum number of ranks; None without CPU ranks.

    With more threads than cores, a rank's threads would wait for one that has no core.
    """
    configs = [on_this_machine(each.config) for each in applications]
    ranks = sum(
        most_replicas(config) * config.engine_kwargs.tensor_parallel_size
        for config in configs
        if config.engine_kwargs.device == "cpu"
    )
    return max(cores // ranks, 1) if ranks else None
