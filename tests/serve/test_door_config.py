"""Several models get a door, whose options follow from theirs or are given."""

from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diffray.cluster.api.settings import ApiSettings, key_digest
from diffray.cluster.cli.main import app
from diffray.cluster.serve.config_file import (
    Applications,
    DoorApplication,
    applications,
)
from diffray.cluster.serve.deployment import MARGIN, door_options
from diffray.cluster.serve.door_config import door_config


def model(name: str, **options: Any) -> dict[str, Any]:
    return {"model_loading_config": {"model_id": name}} | options


def described(*models: dict[str, Any], door: object = None) -> Applications:
    return applications({"llm_configs": [*models], "door": door}, "x")


def door_of(*models: dict[str, Any], **door: Any) -> DoorApplication:
    found = described(*models, door=door).door
    assert found is not None
    return found


def test_it_follows_from_the_models() -> None:
    several = {"autoscaling_config": {"max_replicas": 3}, "graceful_shutdown_timeout_s": 7}
    slots = {"max_num_seqs": 2, "max_queued_requests": 3}
    api = {"cors_origins": ["https://chat.example.com"]}
    shared = {"api": api, "api_key_env": "KEYS"}
    door = door_of(
        model("org/a", deployment_config=several, engine_kwargs=slots, **shared),
        model("b", deployment_config={"graceful_shutdown_timeout_s": 5}, **shared),
    )
    assert (door.name, door.route_prefix) == ("door-org-a-b", "/")
    config = door.config
    assert config.models == {"org/a": "org-a", "b": "b"}
    assert config.num_replicas == 2
    assert config.max_ongoing_requests == 3 * (5 + MARGIN) + 16 + 256 + MARGIN
    assert config.graceful_shutdown_timeout_s == 7
    assert (config.api, config.api_key_env) == (ApiSettings.model_validate(api), "KEYS")
    assert config.api_settings({"KEYS": "a"}).api_keys == (key_digest("a"),)
    assert door_of(model("a"), model("b")).config.num_replicas == 1
    assert described(model("a")).door is None


def test_what_is_given_wins() -> None:
    door = door_of(
        model("a", api={"api_keys": ["one"]}),
        model("b", api_key_env="B"),
        route_prefix="/all",
        num_replicas=4,
        api_key_env="KEYS",
    )
    assert door.route_prefix == "/all"
    assert (door.config.num_replicas, door.config.api_key_env) == (4, "KEYS")
    assert door.config.api == ApiSettings()


TWO = [model("a"), model("b")]


@pytest.mark.parametrize(
    ("models", "door", "words"),
    [
        ([model("a")], {"num_replicas": 2}, "several models | leave it out"),
        ([model("a"), model("b", api_key_env="B")], {}, "door | differ | api_key_env"),
        (
            [model("a", api_key_env="A"), model("b", api_key_env="A")],
            {"api": {"docs": False}},
            "door | must, too | api_key_env",
        ),
        (TWO, {"api": {"api_keys": ["k"]}, "api_key_env": "A"}, "door | not both"),
        (TWO, {"models": {"c": "d"}}, "door | leave models out"),
        (TWO, {"num_replica": 2}, "door | 'num_replica' | num_replicas"),
        (TWO, {"route_prefix": "all"}, "door | route_prefix | 'all'"),
        (TWO, 3, "x, door: expected a mapping"),
        ([model("a", route_prefix="/"), model("b")], {}, "route_prefix '/' | the door has it"),
        ([model("a"), model("a")], {}, "model_id 'a' | twice"),
    ],
)
def test_mistakes_are_one_sentence(models: list[dict[str, Any]], door: object, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        described(*models, door=door)
    said = str(caught.value)
    assert said.startswith("x") and "\n" not in said
    assert [word for word in words.split(" | ") if word not in said] == [], said


def test_models_on_the_command_line_share_their_options() -> None:
    typed = ["serve", "demo", "demo-llada2", "--api-key", "a", "--replicas", "2"]
    shown = CliRunner().invoke(app, [*typed, "--dtype", "float64", "--print-config"])
    assert shown.exit_code == 0, shown.output
    *models, door = yaml.safe_load(shown.stdout)["applications"]
    assert [each["route_prefix"] for each in models] == ["/demo", "/demo-llada2"]
    for each in models:
        assert each["import_path"] == "diffray.cluster.app:build"
        assert each["args"]["engine_kwargs"] == {"dtype": "float64"}
        assert each["args"]["deployment_config"] == {"num_replicas": 2}
    assert (door["import_path"], door["route_prefix"]) == ("diffray.cluster.app:door", "/")
    config = door_config(door["args"])
    assert config.models == {"demo": "demo", "demo-llada2": "demo-llada2"}
    assert config.num_replicas == 2
    assert config.api_settings({}).api_keys == (key_digest("a"),)


def test_serve_takes_its_options() -> None:
    from ray import serve

    config = door_of(model("a"), model("b"), num_replicas=3, max_ongoing_requests=9).config
    plain: Any = serve.deployment(type("Nothing", (), {}))
    made = plain.options(**door_options(config))
    assert (made.num_replicas, made.max_ongoing_requests) == (3, 9)
