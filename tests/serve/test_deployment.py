"""A replica reserves what its ranks need, and Serve accepts and runs what it is given."""

from typing import Any

import pytest

from diffray.cluster.serve.app_config import AppConfig, app_config
from diffray.cluster.serve.deployment import (
    ONGOING_TOKENS,
    OngoingTokensPolicy,
    deployment_options,
    placement_bundles,
    resources,
)


def config(device: str = "cuda", **parts: Any) -> AppConfig:
    engine = {"device": device} | parts.pop("engine_kwargs", {})
    return app_config(
        {"model_loading_config": {"model_id": "llada"}, "engine_kwargs": engine} | parts
    )


TWO = {"tensor_parallel_size": 2}
HALF = {"GPU": 0.5, "CPU": 4}
LISTED: list[dict[str, float]] = [{"GPU": 1, "node_a": 1}, {"GPU": 1}]


class TestPlacement:
    @pytest.mark.parametrize(
        ("wish", "ranks"),
        [
            (config(engine_kwargs=TWO), [{"GPU": 1, "CPU": 1}] * 2),
            (config("cpu"), [{"CPU": 1}]),
            (config("cpu", engine_kwargs=TWO | {"cpu_threads": 3}), [{"CPU": 3}] * 2),
            (config(accelerator_type="L4"), [{"GPU": 1, "CPU": 1, "accelerator_type:L4": 0.001}]),
            (
                config(engine_kwargs=TWO, placement_group_config={"bundle_per_worker": HALF}),
                [HALF, HALF],
            ),
            (config(engine_kwargs=TWO, placement_group_config={"bundles": LISTED}), LISTED),
        ],
    )
    def test_each_rank_has_a_bundle(self, wish: AppConfig, ranks: list[dict[str, float]]) -> None:
        assert placement_bundles(wish) == [{"CPU": 1}, *ranks]
        assert resources(wish, replicas=2)["CPU"] == 2 + 2 * sum(
            each.get("CPU", 0) for each in ranks
        )

    def test_bundle_must_fit_the_device(self) -> None:
        for device, bundle, words in (
            ("auto", None, "'cuda' or 'cpu'"),
            ("cpu", {"GPU": 1}, "leave GPU out"),
            ("cuda", {"CPU": 1}, "one GPU"),
            ("cuda", {"GPU": 2}, "one GPU"),
        ):
            wish = config(device, placement_group_config={"bundle_per_worker": bundle})
            with pytest.raises(ValueError, match=words):
                placement_bundles(wish)


@pytest.mark.slow  # imports Ray Serve
class TestServe:
    @pytest.mark.parametrize("scaling", [None, {"max_replicas": 3, "min_replicas": 0}])
    def test_serve_takes_every_option(self, scaling: dict[str, Any] | None) -> None:
        from ray import serve

        wish = config(deployment_config={"autoscaling_config": scaling, "max_surge_percent": 50})
        options = deployment_options(wish)
        plain: Any = serve.deployment(Nothing)
        made = plain.options(**options)
        assert made._replica_config.placement_group_bundles == options["placement_group_bundles"]
        assert made._replica_config.placement_group_strategy == "STRICT_PACK"
        assert made.max_ongoing_requests == 16 + 256 + 64
        settings = made._deployment_config
        assert settings.max_surge_percent == 50
        assert settings.backpressure_config.status_code == 429
        found = settings.autoscaling_config
        assert made.num_replicas == 1 if scaling is None else found and found.max_replicas == 3
        assert wish.deployment_config.fewest_replicas == (1 if scaling is None else 0)

    def test_prefix_routing_has_a_router_of_its_own(self) -> None:
        from ray import serve
        from ray.serve._private.config import DeploymentConfig

        from diffray.cluster.serve.prefix_routing import PrefixRouter

        given = {"num_replicas": 2, "prefix_routing": True}
        options = deployment_options(config(deployment_config=given))
        plain: Any = serve.deployment(Nothing)
        sent = plain.options(**options)._deployment_config.to_proto_bytes()
        found = DeploymentConfig.from_proto_bytes(sent).request_router_config
        assert found.get_request_router_class() is PrefixRouter

    def test_serve_runs_the_policy(self) -> None:
        """As Serve's controller does: by value, with factors and delays around it."""
        from ray.serve._private.autoscaling_state import _resolve_policy_callable
        from ray.serve.autoscaling_policy import _apply_autoscaling_config
        from ray.serve.config import AutoscalingConfig

        scaling = {"max_replicas": 8, "target_ongoing_tokens": 100, "upscale_delay_s": 0}
        given = deployment_options(config(deployment_config={"autoscaling_config": scaling}))
        settings = AutoscalingConfig(**given["autoscaling_config"])
        policy = _apply_autoscaling_config(_resolve_policy_callable(settings.policy))
        assert policy(context(250, high=8, config=settings))[0] == 3
        kept, _ = policy(context(250, 20, replicas=4, high=8, config=settings))
        assert kept == 4  # until downscale_delay_s is over

    def test_one_replica_for_each_target_within_bounds(self) -> None:
        policy = OngoingTokensPolicy(target_ongoing_tokens=100)
        for tokens, replicas in ((0, 1), (100, 1), (100.00000001, 1), (101, 2), (10_000, 5)):
            assert policy(context(tokens / 2, tokens / 2)) == (replicas, {})
        assert policy(context(replicas=4)) == (4, {}), "no replica has reported yet"
        # Requests that no replica has taken count as much as others.
        assert policy(context(100, running=4, queued=8)) == (3, {})
        for tokens, low, high, replicas in ((0, 0, 5, 0), (1e9, 2, 3, 3), (0, 2, 3, 2)):
            assert policy(context(tokens, low=low, high=high)) == (replicas, {})

    def test_requests_as_the_target_leave_serve_its_own_policy(self) -> None:
        from ray.serve.config import AutoscalingConfig

        scaling = {"max_replicas": 8, "target_ongoing_requests": 4}
        given = deployment_options(config(deployment_config={"autoscaling_config": scaling}))
        settings = AutoscalingConfig(**given["autoscaling_config"])
        assert settings.policy.is_default_policy_function()
        assert settings.get_target_ongoing_requests() == 4


class Nothing:
    """A deployment for options to be set on."""


def context(
    *tokens: float,
    running: float = 0.0,
    queued: float = 0.0,
    replicas: int = 1,
    low: int = 1,
    high: int = 5,
    config: Any = None,
) -> Any:
    """Return what Serve passes to a policy; each of the replicas has reported tokens."""
    from ray.serve._private.common import DeploymentID
    from ray.serve.config import AutoscalingContext

    unused: Any = dict.fromkeys(
        ("raw_metrics", "last_scale_up_time", "last_scale_down_time", "current_time")
    )
    reported: Any = {str(number): each for number, each in enumerate(tokens)}
    return AutoscalingContext(
        deployment_id=DeploymentID("a", "b"), deployment_name="a", app_name="b",
        current_num_replicas=replicas, target_num_replicas=replicas, running_replicas=[],
        total_num_requests=lambda: running + queued, total_queued_requests=lambda: queued,
        aggregated_metrics=lambda: {ONGOING_TOKENS: reported}, capacity_adjusted_min_replicas=low,
        capacity_adjusted_max_replicas=high, policy_state={}, config=config, **unused,
    )  # fmt: skip
