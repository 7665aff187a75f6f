"""Cut custom resource definitions down to the schemas that the manifests are held to.

    python tests/serve/k8s_schemas/make.py <a checkout of ray-project/kuberay>
    python tests/serve/k8s_schemas/make.py <a checkout of prometheus-operator/prometheus-operator>

Descriptions and what only Kubernetes reads (x-kubernetes-*, status) go; an object may then hold no
key that its schema does not name, unless the schema lets every key through.
"""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import yaml

DROPPED = ("properties", "description", "format")
FOLDERS = "helm-chart/kuberay-operator/crds", "example/prometheus-operator-crd"
KINDS = ("RayCluster", "RayJob", "RayService", "PrometheusRule", "ServiceMonitor")


def strict(schema: Any) -> Any:
    """Return a schema in which unknown keys are errors, without what no validation needs."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: strict(part)
        for name, part in schema.items()
        if name not in DROPPED and not name.startswith("x-kubernetes-")
    }
    if "properties" in schema:
        kept["properties"] = {name: strict(part) for name, part in schema["properties"].items()}
        kept["additionalProperties"] = schema.get("x-kubernetes-preserve-unknown-fields", False)
    return kept


def main(checkout: Path) -> None:
    files = (file for folder in FOLDERS for file in (checkout / folder).glob("*.yaml"))
    for crd in map(yaml.safe_load, map(Path.read_text, files)):
        if (kind := crd["spec"]["names"]["kind"]) not in KINDS:
            continue
        (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1")
        schema = strict(version["schema"]["openAPIV3Schema"])
        schema["properties"].pop("status", None)
        schema["properties"]["metadata"] = {"type": "object"}  # Kubernetes' own, and open
        schema["required"] = ["apiVersion", "kind", "metadata", "spec"]
        text = json.dumps(schema, separators=(",", ":"), sort_keys=True)
        target = Path(__file__).with_name(f"{kind}.json.gz")
        target.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
