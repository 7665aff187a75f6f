"""The Ray Serve application: `serve run diffray.cluster.app:build model_loading_config=...`.

One deployment per model; each replica has a coordinator and ranks in a placement group.
"""

from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from diffray.cluster.api.http_app import build_api
from diffray.cluster.serve.app_config import AppConfig, app_config
from diffray.cluster.serve.deployment import deployment_options
from diffray.cluster.serve.replica import Replica, current_service


def build(args: dict[str, Any]) -> Application:
    """Return the application of one model; `args` is what `AppConfig` describes."""
    return application(app_config(args))


def deployment(args: dict[str, Any]) -> Application:
    """Return a model without an endpoint, for an ingress of your own that uses its handle."""
    config = app_config(args)
    for name in ("api", "api_key_env"):
        if name in config.model_fields_set:
            raise ValueError(f"args: {name} is for the endpoint, which a deployment does not have")
    return _bound(Replica, config)


def application(config: AppConfig) -> Application:
    settings = config.api_settings()

    def api() -> FastAPI:  # built in the replica, because not all of it can be pickled
        return build_api(current_service, settings, request_ids=False)

    return _bound(serve.ingress(api)(Replica), config)


def _bound(replica: type[Replica], config: AppConfig) -> Application:
    config = with_device(config)
    plain: Any = serve.deployment(replica)
    app: Application = plain.options(name="Replica", **deployment_options(config)).bind(config)
    return app


def with_device(config: AppConfig) -> AppConfig:
    """Return the configuration with "auto" replaced by what the cluster, or this machine, has."""
    if config.engine_kwargs.device != "auto":
        return config
    if ray.is_initialized():
        gpus = ray.cluster_resources().get("GPU", 0)
    else:
        from ray._private.accelerators.nvidia_gpu import NvidiaGPUAcceleratorManager

        gpus = NvidiaGPUAcceleratorManager.get_current_node_num_accelerators()
    return config.on("cuda" if gpus else "cpu")
