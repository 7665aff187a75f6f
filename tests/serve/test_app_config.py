"""A deployment's file means what it says: nothing is ignored, mistakes are one sentence."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from diffray.cluster.api.settings import ApiSettings, key_digest
from diffray.cluster.control.yaml_file import parse_yaml
from diffray.cluster.serve.app_config import AppConfig, app_config
from diffray.cluster.serve.config_file import (
    Application,
    Applications,
    IngressApplication,
    applications,
    read_applications,
    serve_config,
)
from diffray.cluster.serve.deployment import MARGIN, ingress_options
from diffray.components.decoders.credit import Credit
from tests.helpers.paths import ROOT

DEPLOY = ROOT / "docs/deploy.md"
FULL = """
model_loading_config: {model_id: llada, model_source: /models/llada}
accelerator_type: H200
engine_kwargs: {tensor_parallel_size: 4, device: cuda, max_num_seqs: 32}
diffusion: {block_length: 64, decoder: {kind: credit}}
generation_defaults: {temperature: 0, max_tokens: 512}
deployment_config:
  autoscaling_config: {min_replicas: 1, max_replicas: 8, upscale_delay_s: 5}
  health_check_period_s: 1
placement_group_config: {strategy: PACK}
api_key_env: KEYS
"""


def model(name: str, **options: Any) -> dict[str, Any]:
    return {"model_loading_config": {"model_id": name}} | options


def config(**parts: Any) -> AppConfig:
    return app_config(model("llada", **parts))


def file_of(*models: dict[str, Any], ingress: object = None) -> str:
    return yaml.safe_dump({"llm_configs": [*models], "ingress": ingress})


TWO = model("a"), model("b")
WITH_KEYS = model("a", api_key_env="A"), model("b", api_key_env="A")
# A file, and parts of the one sentence.
FILES = [
    ("", "expected the options of a model"),
    ("- 1", "expected a mapping | 1"),
    ("llm_configs: 3", "a list"),
    ("applications: []", "Serve's own format | serve run"),
    ("1: 2", "option 1 | text"),
    *((file_of(model("a", route_prefix=path)), "route_prefix") for path in ("a", "/a/", "/-/a")),
    (file_of(model("x/a"), model("x-a")), "name 'x-a' | twice"),
    (file_of(model("a", route_prefix="/x"), model("b", route_prefix="/x")), "'/x' | twice"),
    (file_of(model("a"), model("b", lora_config={})), "model 2 | 'lora_config'"),
    (file_of(model("a"), model("a")), "model_id 'a' | twice"),
    # What an ingress may be.
    ("llm_configs: []\ndoor: {}", "unknown option 'door' | only ingress"),
    (file_of(model("a"), ingress={"num_replicas": 2}), "several models | leave it out"),
    (file_of(model("a"), model("b", api_key_env="B")), "ingress | differ | api_key_env"),
    (file_of(*WITH_KEYS, ingress={"api": {"docs": False}}), "ingress | must, too | api_key_env"),
    (file_of(*TWO, ingress={"api": {"api_keys": ["k"]}, "api_key_env": "A"}), "ingress | not both"),
    (file_of(*TWO, ingress={"models": {"c": "d"}}), "ingress | leave models out"),
    (file_of(*TWO, ingress={"num_replica": 2}), "ingress | 'num_replica' | num_replicas"),
    (file_of(*TWO, ingress={"route_prefix": "all"}), "ingress | route_prefix | 'all'"),
    (file_of(*TWO, ingress=3), ", ingress: expected a mapping"),
    (file_of(model("a", route_prefix="/"), model("b")), "route_prefix '/' | the ingress has it"),
    # What is no YAML.
    ("a: 1\na: 2", "line 2 | 'a' | twice"),
    ("a:\n\t- 1", "line 2 | \\t"),
    ("a: 2024-13-45", "month must be in 1..12"),
    ("? [a]\n: b", "unhashable"),
    ("a: !!python/object/apply:os.system [ls]", "python/object"),
    ("a: \x00", "special characters"),
    ("[" * 5000, "recursion"),
    ("--- a\n--- b", "document"),
    ("a: \xe9", "not UTF-8 text"),
]


class TestFile:
    def test_all_parts_arrive_and_are_written_for_serve(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(FULL)
        found = read_applications(tmp_path / "a.yaml")
        (app,) = found.models
        assert (app.name, app.route_prefix) == ("llada", "/")
        assert (app.config.model_id, app.config.model_source) == ("llada", "/models/llada")
        assert app.config.engine_kwargs.tensor_parallel_size == 4
        assert app.config.diffusion.decoder == Credit()
        assert app.config.generation_defaults.max_tokens == 512
        (written,) = serve_config(found)["applications"]
        assert app_config(written["args"]) == app.config
        assert written["import_path"] == "diffray.cluster.app:build"

    def test_several_models_get_paths_of_their_own(self) -> None:
        given = [model("a"), model("org/b")]
        for models in (given, {"llm_configs": given}):
            apps = applications(models, "x")
            assert [app.route_prefix for app in apps.models] == ["/a", "/org-b"]
        (chosen,) = applications(model("llada", route_prefix="/v/llada"), "x").models
        assert (chosen.route_prefix, chosen.config.model_source) == ("/v/llada", "llada")

    @pytest.mark.parametrize(("text", "words"), FILES)
    def test_mistakes_are_one_sentence(self, tmp_path: Path, text: str, words: str) -> None:
        file = tmp_path / "a.yaml"
        file.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError) as caught:
            read_applications(file)
        said = str(caught.value)
        assert said.startswith(f"{file}") and "\n" not in said and len(said) < 500
        assert [word for word in words.split(" | ") if word not in said] == [], said

    def test_files_that_cannot_be_read(self, tmp_path: Path) -> None:
        for name, words in ((".", "cannot be read"), ("none", "no such file")):
            with pytest.raises(ValueError, match=words):
                read_applications(tmp_path / name)


@pytest.mark.skipif(not DEPLOY.exists(), reason="the tests stand alone, without the source tree")
def test_the_documents_files_can_be_read(tmp_path: Path) -> None:
    one, several, serves = re.findall(r"```yaml\n(.*?)```", DEPLOY.read_text(), re.DOTALL)
    (app,) = applications(parse_yaml(one, "one"), "one").models
    assert set(AppConfig.model_fields) == app.config.model_fields_set  # it shows them all
    found = applications(parse_yaml(several, "several"), "several")
    assert [app.route_prefix for app in found.all] == ["/demo", "/other", "/"]
    assert found.ingress is not None and found.ingress.config.num_replicas == 2
    given: Any = parse_yaml(serves, "serves")
    assert [app_config(app["args"]).model_id for app in given["applications"]] == ["demo"]


def ingress_of(*models: dict[str, Any], **ingress: Any) -> IngressApplication:
    found = applications({"llm_configs": [*models], "ingress": ingress}, "x").ingress
    assert found is not None
    return found


class TestIngress:
    def test_it_follows_from_the_models(self) -> None:
        several = {"autoscaling_config": {"max_replicas": 3}, "graceful_shutdown_timeout_s": 7}
        slots = {"max_num_seqs": 2, "max_queued_requests": 3}
        api = {"cors_origins": ["https://chat.example.com"], "ignore_unknown_fields": True}
        shared = {"api": api, "api_key_env": "KEYS"}
        ingress = ingress_of(
            model("org/a", deployment_config=several, engine_kwargs=slots, **shared),
            model("b", deployment_config={"graceful_shutdown_timeout_s": 5}, **shared),
        )
        assert (ingress.name, ingress.route_prefix) == ("ingress-org-a-b", "/")
        config = ingress.config
        assert config.models == {"org/a": "org-a", "b": "b"} and config.num_replicas == 2
        assert config.max_ongoing_requests == 3 * (5 + MARGIN) + 16 + 256 + MARGIN
        assert config.graceful_shutdown_timeout_s == 7
        assert (config.api, config.api_key_env) == (ApiSettings.model_validate(api), "KEYS")
        assert config.api_settings({"KEYS": "a"}).api_keys == (key_digest("a"),)
        assert ingress_of(*TWO).config.num_replicas == 1

    def test_what_is_given_wins_and_serve_takes_it(self) -> None:
        from ray import serve

        given: dict[str, Any] = {"num_replicas": 4, "max_ongoing_requests": 9, "api_key_env": "K"}
        models = model("a", api={"api_keys": ["one"]}), model("b", api_key_env="B")
        ingress = ingress_of(*models, route_prefix="/all", **given)
        assert ingress.route_prefix == "/all"
        assert (ingress.config.api_key_env, ingress.config.api) == ("K", ApiSettings())
        plain: Any = serve.deployment(type("Nothing", (), {}))
        made = plain.options(**ingress_options(ingress.config))
        assert (made.num_replicas, made.max_ongoing_requests) == (4, 9)


PLACEMENT, DEPLOYMENT = "placement_group_config", "deployment_config"
ROUTED: dict[str, Any] = {DEPLOYMENT: {"num_replicas": 2, "prefix_routing": True}}


def scaled(scaling: dict[str, int], **more: int) -> dict[str, Any]:
    return {DEPLOYMENT: {"autoscaling_config": {"max_replicas": 2} | scaling, **more}}


# Options of a model, and parts of the one sentence.
ARGS: list[tuple[dict[str, Any], str]] = [
    ({"engine_kwargs": {"tensor_parallel": 2}}, "engine_kwargs | 'tensor_parallel'"),
    ({"accelerator_type": "h200"}, "'h200' | H200"),
    ({"accelerator_type": "H200", "engine_kwargs": {"device": "cpu"}}, "needs GPUs"),
    ({DEPLOYMENT: {"max_queued_requests": 0}}, "max_queued_requests | -1"),
    (ROUTED | {"engine_kwargs": {"enable_prefix_caching": False}}, "prefix_routing | enable_pre"),
    (scaled({}, num_replicas=2), "num_replicas | not both"),
    (scaled({"min_replicas": 3}), "(3) | (2)"),
    (scaled({"initial_replicas": 3}), "initial_replicas (3)"),
    (scaled({"target_ongoing_requests": 2, "target_ongoing_tokens": 2}), "not both"),
    ({"api": {"api_keys": ["sha256:123"]}}, "64 hexadecimal digits"),
    ({"api": {"api_keys": ["a"]}, "api_key_env": "B"}, "api_key_env | not both"),
    ({"api": {"operator_keys": ["a"]}, "operator_key_env": "B"}, "operator_key_env | not both"),
    ({PLACEMENT: {"bundles": [], "bundle_per_worker": {}}}, "bundle_per_worker | not both"),
    ({PLACEMENT: {"bundles": [{"GPU": 1}, {"GPU": 1}]}}, "2 bundles for 1 rank"),
]


class TestArgs:
    @pytest.mark.parametrize(("parts", "words"), ARGS)
    def test_mistakes_name_the_key(self, parts: dict[str, Any], words: str) -> None:
        with pytest.raises(ValueError) as caught:
            app_config(model("llada", **parts))
        said = str(caught.value)
        assert [word for word in ("args", *words.split(" | ")) if word not in said] == [], said

    def test_objects_may_be_json(self) -> None:
        """As they are in `serve run module:build model_loading_config='{...}'`."""
        found = app_config({"model_loading_config": '{"model_id": "a"}', "request_timeout_s": "5"})
        assert (found.model_id, found.request_timeout_s) == ("a", 5.0)
        with pytest.raises(ValueError, match="model_loading_config"):
            app_config({"model_loading_config": "{model_id: a}"})

    def test_keys_come_from_the_file_or_the_environment(self) -> None:
        both = (key_digest("a"), key_digest("b"))
        assert config().api_settings({}).api_keys == ()
        assert config(api={"api_keys": ["a", "b"]}).api_settings({}).api_keys == both
        named = config(api_key_env="KEYS", api={"docs": False})
        found = named.api_settings({"KEYS": "a, b,"})
        assert (found.api_keys, found.docs) == (both, False)
        with pytest.raises(ValueError, match="KEYS"):
            named.api_settings({"KEYS": " "})
        operated = config(api={"api_keys": ["a"]}, operator_key_env="KEYS")
        found = operated.api_settings({"KEYS": "b"})
        assert (found.api_keys, found.operator_keys) == (both[:1], both[1:])
        with pytest.raises(ValueError, match="operator_key_env: the variable KEYS holds no key"):
            operated.api_settings({})

    def test_keys_are_held_as_digests_alone(self) -> None:
        keys = ["secret", key_digest("other")]
        made = config(api={"api_keys": keys, "operator_keys": keys})
        assert made.api.api_keys == (key_digest("secret"), key_digest("other"))
        assert made.api.operator_keys == made.api.api_keys
        for text in (repr(made), made.model_dump_json(), str(pickle.dumps(made))):
            assert "secret" not in text
        application = Application("a", "/", made)
        assert "secret" not in yaml.safe_dump(serve_config(Applications((application,))))

    @pytest.mark.parametrize("key", ["top secret", "", "secret\u00e9", "secret\n", "s" * 513])
    def test_a_key_that_no_header_carries_is_refused_unquoted(self, key: str) -> None:
        for where in (
            lambda: config(api={"api_keys": [key]}),
            lambda: config(api={"api_keys": key}),
            lambda: config(api_key_env="A").api_settings({"A": f"{key} {key}"}),
        ):
            with pytest.raises(ValueError, match="key") as caught:
                where()
            assert "secret" not in str(caught.value) and "ssss" not in str(caught.value)

    def test_auto_becomes_a_device(self) -> None:
        wish = config(engine_kwargs={"max_num_seqs": 3}, api_key_env="A")
        made = config(engine_kwargs={"max_num_seqs": 3, "device": "cpu"}, api_key_env="A")
        assert wish.on("cpu") == made
        with pytest.raises(ValueError, match="needs GPUs"):
            config(accelerator_type="L4").on("cpu")


def test_a_few_aliases_are_fine() -> None:
    given = parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}", "x")
    assert given == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
