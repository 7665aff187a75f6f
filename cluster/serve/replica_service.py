"""Makes a replica's service; its imports take seconds, for which the engine need not wait."""

from functools import partial

from ray import serve
from ray.serve.handle import DeploymentHandle

from diffray.cluster.api.prompts import RemoteImages
from diffray.cluster.api.service import Service
from diffray.cluster.api.settings import read_generation_defaults
from diffray.cluster.control.engine_client import EngineFailed
from diffray.cluster.control.remote import RemoteEngine
from diffray.cluster.frontend.prompts import check_default
from diffray.cluster.frontend.text import Tokenizer
from diffray.cluster.serve.app_config import AppConfig
from diffray.cluster.serve.desired_state import EveryReplica, Record
from diffray.cluster.serve.replicas import Replicas
from diffray.components.checkpoints.demos import description, examples
from diffray.components.checkpoints.folder import resolve
from diffray.components.checkpoints.update import check_folder
from diffray.workers.adapters import LoadedAdapters


def adapters_of(config: AppConfig) -> LoadedAdapters:
    """Return the adapters of the configuration, checked against the model's."""
    source, options = config.model_source, config.engine_kwargs
    return LoadedAdapters.of(
        source, options.lora_modules, options.max_lora_rank, reserved=(config.model_id,)
    )


async def service_of(
    engine: RemoteEngine, config: AppConfig, adapters: LoadedAdapters, deployed: str
) -> tuple[Service, EveryReplica]:
    """Return the service over an engine, in the desired state."""
    source, options, limits = config.model_source, config.engine_kwargs, engine.limits
    path = resolve(source)
    tokenizer = Tokenizer.load(path, limits.mask_token_id)
    context = serve.get_replica_context()
    if config.deployment_config.prefix_routing and not limits.spec.block_causal:
        raise EngineFailed(
            "prefix_routing needs block-causal attention: with this model no two requests can "
            "share K/V; leave it out"
        )
    try:
        check_default(config.diffusion, limits.spec)
    except ValueError as error:
        raise EngineFailed(str(error)) from None
    own = context.replica_id.unique_id
    replicas = Replicas(DeploymentHandle(context.deployment, context.app_name))
    check = partial(check_folder, path, options.dtype)
    every = EveryReplica(
        engine,
        adapters,
        replicas,
        Record(deployed),
        check,
        options.load_timeout_s,
        own,
        options.tensor_parallel_size,
    )
    if failure := await every.catch_up():
        raise EngineFailed(failure)
    service = Service(
        engine,
        tokenizer,
        (config.model_id,),
        diffusion=config.diffusion,
        defaults=config.generation_defaults.over(read_generation_defaults(path)),
        deadline=config.request_timeout_s,
        replica=own,
        others=partial(replicas.ask, "snapshot"),
        operated=every,
        adapters=adapters,
        scheduling_policy=options.scheduling_policy,
        description=description(source, config.model_id),
        examples=examples(source),
        remote_images=RemoteImages(config.api),
    )
    service.metrics.expect_replicas(config.deployment_config.fewest_replicas)
    return service, every
