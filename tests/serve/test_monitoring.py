"""What Prometheus and Grafana read in k8s/monitoring is of metrics and headings that exist."""

import gzip
import json
import re
import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from prometheus_client.parser import text_string_to_metric_families

from diffray.cluster.api.metrics import Metrics, Snapshot, render
from diffray.cluster.control.engine_client import Load
from tests.helpers.monitoring import ALERTS, DASHBOARD, FOLDER, PANELS, RULES, VARIABLES, filled
from tests.helpers.needed import needed
from tests.helpers.paths import ROOT
from tests.helpers.recorder import LIMITS

OPERATIONS = (ROOT / "docs/operations.md").read_text()
SCHEMAS = Path(__file__).with_name("k8s_schemas")
UP = {"up": {"job", "instance"}}  # Prometheus's own
# Of a query: its series with their matchers, and the labels that remain.
SERIES = re.compile(r"\b(diffray:\w+|up)\b(?:\{([^}]*)\})?")
KEPT = re.compile(r"\b(?:by|on) \(([\w, ]+)\)")


def exposed() -> dict[str, set[str]]:
    """Return the labels of each series that a server exposes."""
    snapshot = Snapshot("r", Metrics("some", "r").families(Load(), LIMITS))
    text = render([snapshot], vllm_names=False).decode()
    families = text_string_to_metric_families(text)
    return UP | {each.name: {*each.labels} for family in families for each in family.samples}


EXPOSED = exposed()
TARGETS = [
    pytest.param(target, id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


def remaining(query: str) -> set[str]:
    """Check a query's series and labels; return the labels of its result."""
    labels = set[str]()
    assert SERIES.search(query)
    for name, matchers in SERIES.findall(query):
        assert name in EXPOSED, query
        assert {*re.findall(r"(\w+)(?:=~|!~|!=|=)", matchers)} <= EXPOSED[name], query
        labels |= EXPOSED[name]
    kept = {label for found in KEPT.findall(query) for label in found.split(", ")}
    assert kept <= labels, query
    return kept - {"le"} if kept or re.search(r"\bsum\(", query) else labels


@pytest.mark.parametrize("target", TARGETS)
def test_panels_ask_for_what_a_server_exposes(target: dict[str, Any]) -> None:
    labels = remaining(filled(target["expr"], "1m"))
    assert {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= labels
    assert all('model_name=~"$model"' in chosen for _, chosen in SERIES.findall(target["expr"]))


def test_the_dashboard_is_whole() -> None:
    """Grafana would accept another one, and show it broken."""
    assert "id" not in DASHBOARD and len({panel["id"] for panel in PANELS}) == len(PANELS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    assert VARIABLES["datasource"]["type"] == "datasource"
    for asking in (*PANELS, VARIABLES["model"], VARIABLES["replica"]):
        assert asking["datasource"] == source
    for variable in (VARIABLES["model"], VARIABLES["replica"]):
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"])
        assert found and found[2] in remaining(filled(found[1], "1m"))
    places = [panel["gridPos"] for panel in PANELS]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        across = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        down = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert across or down, (one, other)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_alerts_ask_for_what_a_server_exposes_and_say_what_to_do(rule: dict[str, Any]) -> None:
    labels, told = remaining(rule["expr"]), rule["annotations"]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(told) == {"summary", "description", "runbook_url"}
    assert {*re.findall(r"\$labels\.(\w+)", f"{told}")} <= labels
    page, _, anchor = told["runbook_url"].partition("#")
    headings = re.findall(r"^### (.*)$", (ROOT / page).read_text(), re.M)
    assert rule["alert"] in headings and anchor == rule["alert"].lower()


def test_every_alert_of_the_page_exists() -> None:
    assert re.findall(r"^### (.*)$", OPERATIONS, re.M) == [rule["alert"] for rule in RULES]


def check_schema(document: dict[str, Any]) -> None:
    file = SCHEMAS / f"{document['kind']}.json.gz"
    schema = json.loads(gzip.decompress(file.read_bytes()))
    Draft202012Validator(schema).validate(document)


def test_the_operators_objects_are_theirs() -> None:
    """The monitor finds one head pod, of the alerts' job; the page's command wraps the rules."""
    monitor = yaml.safe_load((FOLDER / "servicemonitor.yaml").read_text())
    check_schema(monitor)
    assert monitor["spec"]["selector"]["matchLabels"]["ray.io/node-type"] == "head"
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    (relabelled,) = monitor["spec"]["endpoints"][0]["relabelings"]
    jobs = {config["scrape_configs"][0]["job_name"], relabelled["replacement"]}
    assert jobs == {*re.findall(r'job="(\w+)"', ALERTS.read_text())}
    (block,) = (
        each for each in re.findall(r"```\n(.*?)```", OPERATIONS, re.S) if "kubectl" in each
    )
    script = f'kubectl() {{ if [ "$3" = - ]; then cat; fi; }}\n{block}'
    made = subprocess.run(["bash", "-euc", script], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    check_schema(rules := yaml.safe_load(made.stdout))
    for one, other in zip(rules["spec"]["groups"][0]["rules"], RULES, strict=True):
        link = one["annotations"]["runbook_url"]
        assert link == f"https://example.com/diffray/{other['annotations']['runbook_url']}"
        assert {**one, "annotations": 0} == {**other, "annotations": 0}
    for file in re.findall(r"k8s/monitoring/[\w.]+", block):
        assert (ROOT / file).exists()


def test_alerts_fire_in_time_and_not_before() -> None:
    """As promtool plays it; it parses the rules and the configuration too."""
    config = str(FOLDER / "prometheus.yml")
    for asked in (["test", "rules", "tests/serve/alerts.yaml"], ["check", "config", config]):
        command = [needed("promtool"), *asked]
        made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert made.returncode == 0, made.stdout + made.stderr
