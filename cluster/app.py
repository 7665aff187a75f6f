"""The Ray Serve application: `serve run diffray.cluster.app:build model_loading_config=...`."""

from diffray.cluster.serve.app import build, deployment, ingress

__all__ = ["build", "deployment", "ingress"]
