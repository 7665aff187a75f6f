"""Starts Ray on this machine as `diffray serve` does, prints its version, and stops it."""

import logging

from diffray.cluster.serve.environment import prepare_server


def main() -> None:
    prepare_server((), ())  # before ray is imported
    import ray

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    print(ray.__version__)
    ray.shutdown()


if __name__ == "__main__":
    main()
