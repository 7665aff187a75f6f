"""The Ray Serve application: `serve run diffray.cluster.app:build model_loading_config=...`.

One deployment per model; each replica has a coordinator and ranks in a placement group. An ingress
is one more application, which serves several models at one endpoint.
"""

import secrets
from typing import Any, Final

import ray
from fastapi import FastAPI
from ray import serve
from ray.serve import Application

from diffray.cluster.control.ranks import device_of_cluster
from diffray.cluster.serve.app_config import AppConfig, IngressConfig, app_config, ingress_config
from diffray.cluster.serve.batch_worker import batch_workers, with_own_files
from diffray.cluster.serve.deployment import REPLICA, deployment_options, ingress_options
from diffray.cluster.serve.ingress import IngressReplica, current_ingress
from diffray.cluster.serve.replica import Replica, current_service
from diffray.components.checkpoints.demos import description, examples
from diffray.components.container import nvidia_gpus

INGRESS: Final = "ingress"  # its folder of files, whichever models it has


def build(args: dict[str, Any]) -> Application:
    """Return the application of one model; `args` is what `AppConfig` describes."""
    return application(app_config(args))


def deployment(args: dict[str, Any]) -> Application:
    """Return a model without an endpoint, for an ingress of your own that uses its handle."""
    config = app_config(args)
    for name in ("api", "api_key_env", "operator_key_env"):
        if name in config.model_fields_set:
            raise ValueError(f"args: {name} is for the endpoint, which a deployment does not have")
    return _bound(Replica, config)


def ingress(args: dict[str, Any]) -> Application:
    """Return the ingress of models in other applications; `args` is an `IngressConfig`'s."""
    return ingress_application(ingress_config(args))


def application(config: AppConfig) -> Application:
    settings, about = config.api_settings(), about_toy(config)

    def api() -> FastAPI:  # built in the replica, because not all of it can be pickled
        from diffray.cluster.api.http_app import build_api

        return build_api(current_service, with_own_files(settings), about=about)

    batches = batch_workers(config.api, {config.model_id: ""})
    return _bound(serve.ingress(api)(Replica), config, *batches)


def about_toy(config: AppConfig) -> str:
    """Return a demo model's description and prompts to try; empty for any other model."""
    said = description(config.model_source, config.model_id)
    prompts = " ".join(f"`{prompt}`" for prompt in examples(config.model_source))
    return said and f"{said} Prompts to try: {prompts}"


def ingress_application(config: IngressConfig) -> Application:
    settings, first = config.api_settings(), next(iter(config.models))

    def api() -> FastAPI:
        from diffray.cluster.api.http_app import build_api

        return build_api(current_ingress, with_own_files(settings, INGRESS), model=first)

    plain: Any = serve.deployment(serve.ingress(api)(IngressReplica))
    app: Application = plain.options(name="Ingress", **ingress_options(config)).bind(
        config, *batch_workers(config.api, config.models, INGRESS)
    )
    return app


def _bound(replica: type[Replica], config: AppConfig, *batches: Application) -> Application:
    config = with_device(config)
    plain: Any = serve.deployment(replica)
    # A new record, so that later replicas do not find the desired state of an earlier one.
    options, deployed = deployment_options(config), secrets.token_hex(8)
    app: Application = plain.options(name=REPLICA, **options).bind(config, deployed, *batches)
    return app


def with_device(config: AppConfig) -> AppConfig:
    """Return the configuration with "auto" replaced by what the cluster, or this machine, has."""
    if config.engine_kwargs.device != "auto":
        return config
    if ray.is_initialized():
        return config.on(device_of_cluster())
    return config.on("cuda" if nvidia_gpus() else "cpu")
