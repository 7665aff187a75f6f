"""The dashboard and the alerts of k8s/monitoring, as tests read them."""

import json
from typing import Any, Final

import pytest
import yaml

from tests.helpers.paths import ROOT

FOLDER: Final = ROOT / "k8s/monitoring"
if not FOLDER.exists():
    pytest.skip("the tests stand alone, without the source tree", allow_module_level=True)
ALERTS: Final = FOLDER / "alerts.yaml"
DASHBOARD: Final[dict[str, Any]] = json.loads((FOLDER / "dashboard.json").read_text())
PANELS: Final[list[dict[str, Any]]] = DASHBOARD["panels"]
VARIABLES: Final = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
RULES: Final[list[dict[str, Any]]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]


def filled(query: str, interval: str, **chosen: str) -> str:
    """Return a query as Grafana sends it; a variable that is not chosen stands for all."""
    for name, variable in VARIABLES.items():
        query = query.replace(f"${name}", chosen.get(name, variable.get("allValue", "")))
    return query.replace("$__rate_interval", interval)
