"""The manifests mean what they say to Kubernetes, to Ray Serve and to diffray."""

import gzip
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from jsonschema import Draft202012Validator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from diffray.cluster.control.yaml_file import parse_yaml
from diffray.cluster.serve.address import SETTINGS
from diffray.cluster.serve.app_config import AppConfig, IngressConfig, app_config, ingress_config
from diffray.cluster.serve.config_file import BUILDER, INGRESS_BUILDER
from diffray.cluster.serve.deployment import Deployment, placement_bundles, resources
from tests.helpers.paths import ROOT

MANIFESTS = sorted((ROOT / "k8s").glob("*.yaml"))
LOCK = ROOT / "k8s/requirements.lock"
SCHEMAS = Path(__file__).with_name("k8s_schemas")
NAME_LENGTHS = {"RayCluster": 53, "RayJob": 47, "RayService": 47}
EXPLICIT = {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}


def documents(*paths: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for path in paths or MANIFESTS:
        for document in yaml.safe_load_all(path.read_text()):
            yield path.name, document


def cluster(document: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]
    where = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}.get(document["kind"])
    return spec[where] if where else spec


def main_container(group: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = group["template"]["spec"]["containers"][0]
    return container


def all_groups(document: dict[str, Any]) -> list[dict[str, Any]]:
    found = cluster(document)
    return [found["headGroupSpec"], *found["workerGroupSpecs"]]


def each_of(*kinds: str) -> pytest.MarkDecorator:
    found = [pytest.param(doc, id=name) for name, doc in documents() if doc["kind"] in kinds]
    return pytest.mark.parametrize("document", found)


EACH, SERVICES = each_of(*NAME_LENGTHS), each_of("RayService")


class TestKubeRay:
    def test_manifests_are_of_every_kind_and_fit_the_schemas(self) -> None:
        """No key is unknown to KubeRay."""
        kinds = set()
        for name, document in documents():
            kinds.add(kind := document["kind"])
            schema = json.loads(gzip.decompress((SCHEMAS / f"{kind}.json.gz").read_bytes()))
            errors = Draft202012Validator(schema).iter_errors(document)
            assert [(name, each.json_path, each.message) for each in errors] == []
            assert document["apiVersion"] == "ray.io/v1"
        assert kinds == set(NAME_LENGTHS)

    @EACH
    def test_pods_agree_and_can_run(self, document: dict[str, Any]) -> None:
        found, groups = cluster(document), all_groups(document)
        assert found["rayVersion"] == ray.__version__
        assert groups[0]["rayStartParams"]["num-cpus"] == "0"
        head, *workers = map(main_container, groups)
        said = {each["name"]: each.get("value") for each in head["env"]}
        assert EXPLICIT.items() <= said.items()
        assert found["authOptions"] == {"mode": said["RAY_AUTH_MODE"]}
        for worker in workers:
            assert (worker["env"], worker["image"]) == (head["env"], head["image"])
            assert {"name": "serve", "containerPort": 8000} in worker["ports"]
        for group in groups:
            pod, container = group["template"]["spec"], main_container(group)
            assert pod["securityContext"]["runAsNonRoot"] is True
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) == set(volumes)
            assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
            assert container["resources"]["requests"] == container["resources"]["limits"]
        for group in groups[1:]:
            assert group["template"]["spec"]["tolerations"][0]["key"] == "nvidia.com/gpu"

    @EACH
    def test_rules_that_kuberay_checks_itself(self, document: dict[str, Any]) -> None:
        name, found = document["metadata"]["name"], cluster(document)
        assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)
        assert len(name) <= NAME_LENGTHS[document["kind"]]
        groups = all_groups(document)
        if found.get("enableInTreeAutoscaling"):
            assert found["autoscalerOptions"]["version"] == "v2"
            for group in groups:
                assert group["template"]["spec"].get("restartPolicy", "Never") == "Never"
        for group in found["workerGroupSpecs"]:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
            # KubeRay adds the probes; others would fight with them.
            assert not {"livenessProbe", "readinessProbe"} & set(main_container(group))


class TestImage:
    def test_image_has_that_version_and_a_python_that_fits(self) -> None:
        text = (ROOT / "k8s/Dockerfile").read_text()
        assert locked()["ray"] == {ray.__version__}
        (version,) = re.findall(r"^FROM python:([\d.]+)-slim", text, re.MULTILINE)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        assert f"Programming Language :: Python :: {version}" in project["classifiers"]
        assert re.search(r"^USER 1000$", text, re.MULTILINE)
        for name, value in SETTINGS.items():
            if name.startswith("RAY_SERVE_"):
                assert f"{name}={value} " in text, name


class TestLock:
    """The image installs nothing but what stands in the lock, each file by its hash."""

    def test_everything_that_is_needed_is_there_once_and_fits(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for text in project["dependencies"]:
            needed = Requirement(text)
            (version,) = locked()[canonicalize_name(needed.name)]
            assert version in needed.specifier, text
        assert "setuptools" in locked()  # the image builds diffray with it

    def test_image_installs_by_hash_alone(self) -> None:
        text = (ROOT / "k8s/Dockerfile").read_text().replace("\\\n", " ")
        installs = re.findall(r"^RUN pip install (.*)$", text, re.MULTILINE)
        assert len(installs) == 2 and all("--no-deps" in each for each in installs)
        assert "--require-hashes" in installs[0] and "--no-index" in installs[1]


def locked() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^(\S+)==(\S+)", LOCK.read_text(), re.MULTILINE):
        found.setdefault(canonicalize_name(name), set()).add(version)
    return found


def serve_config(document: dict[str, Any]) -> dict[str, Any]:
    parsed = parse_yaml(document["spec"]["serveConfigV2"], "serveConfigV2")
    assert isinstance(parsed, dict)
    return parsed


def configs(document: dict[str, Any]) -> list[AppConfig]:
    apps = serve_config(document)["applications"]
    return [app_config(a["args"], a["name"]) for a in apps if a["import_path"] == BUILDER]


def ingresses(document: dict[str, Any]) -> list[IngressConfig]:
    apps = serve_config(document)["applications"]
    return [
        ingress_config(a["args"], a["name"]) for a in apps if a["import_path"] == INGRESS_BUILDER
    ]


class TestServe:
    @SERVICES
    def test_serve_reads_everything_and_several_have_an_ingress(
        self, document: dict[str, Any]
    ) -> None:
        from ray.serve.schema import ServeDeploySchema

        config = serve_config(document)
        read = ServeDeploySchema.model_validate(config)  # without the keys that it does not know
        assert read.model_dump(mode="json", exclude_unset=True) == config
        apps = config["applications"]
        known = {each["name"] for each in main_container(all_groups(document)[0])["env"]}
        made: list[AppConfig | IngressConfig] = [*configs(document), *ingresses(document)]
        assert len(made) == len(apps) == len({app["route_prefix"] for app in apps})
        assert {each.api_key_env for each in made} <= known
        several = {a["args"]["model_loading_config"]["model_id"]: a["name"] for a in apps[:-1]}
        assert [ingress.models for ingress in ingresses(document)] == [several] * (len(apps) > 1)

    @SERVICES
    def test_builder_builds_them(
        self, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from ray.serve._private.build_app import build_app

        from diffray.cluster.serve.app import build, ingress

        monkeypatch.setenv("DIFFRAY_API_KEYS", "key")
        found = iter(configs(document))
        for app in serve_config(document)["applications"]:
            builder = {BUILDER: build, INGRESS_BUILDER: ingress}[app["import_path"]]
            (deployment,) = build_app(builder(app["args"]), name=app["name"]).deployments
            wanted = placement_bundles(next(found)) if builder is build else None
            assert deployment._replica_config.placement_group_bundles == wanted

    @SERVICES
    def test_replicas_fit_the_pods(self, document: dict[str, Any]) -> None:
        """Every replica in one pod (STRICT_PACK), all replicas at once in all pods."""
        workers = cluster(document)["workerGroupSpecs"]
        limits = [main_container(group)["resources"]["limits"] for group in workers]
        pods = 0
        for config in configs(document):
            assert config.placement_group_config.strategy == "STRICT_PACK"
            needed = resources(config, replicas=1)
            assert any(
                int(limit["nvidia.com/gpu"]) >= needed["GPU"] and int(limit["cpu"]) >= needed["CPU"]
                for limit in limits
            )
            pods += config.deployment_config.most_replicas
        assert sum(group["maxReplicas"] for group in workers) >= pods

    @SERVICES
    def test_pods_outlive_draining(self, document: dict[str, Any]) -> None:
        parts: list[Deployment | IngressConfig]
        parts = [*(each.deployment_config for each in configs(document)), *ingresses(document)]
        longest = max(each.graceful_shutdown_timeout_s for each in parts)
        for group in cluster(document)["workerGroupSpecs"]:
            container = main_container(group)
            environment = {each["name"]: each.get("value") for each in container["env"]}
            drains = float(environment["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
            pod = group["template"]["spec"]
            assert longest < drains < pod["terminationGracePeriodSeconds"]
            assert "lifecycle" not in container, "what runs before SIGTERM delays the draining"
