"""A deployment's file means what it says: nothing is ignored, mistakes are one sentence."""

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from diffray.cluster.api.settings import key_digest
from diffray.cluster.cli.main import app
from diffray.cluster.control.engine_config import EngineConfig
from diffray.cluster.serve.app_config import AppConfig, app_config
from diffray.cluster.serve.config_file import (
    Application,
    Applications,
    applications,
    parse_yaml,
    read_applications,
    serve_config,
)
from diffray.components.backend import DTYPES
from diffray.components.decoders.credit import Credit
from tests.helpers.paths import ROOT

DEPLOY = ROOT / "docs/deploy.md"
LOADING = {"model_loading_config": {"model_id": "llada"}}
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


def config(device: str = "cuda", **parts: Any) -> AppConfig:
    engine = {"device": device} | parts.pop("engine_kwargs", {})
    return app_config(LOADING | {"engine_kwargs": engine} | parts)


class TestFile:
    def test_all_parts_arrive(self, tmp_path: Path) -> None:
        (tmp_path / "a.yaml").write_text(FULL)
        (app,) = read_applications(tmp_path / "a.yaml").models
        assert (app.name, app.route_prefix) == ("llada", "/")
        assert (app.config.model_id, app.config.model_source) == ("llada", "/models/llada")
        assert app.config.engine_kwargs.tensor_parallel_size == 4
        assert app.config.diffusion.decoder == Credit()
        assert app.config.generation_defaults.max_tokens == 512

    def test_several_models_get_paths_of_their_own(self) -> None:
        given = [{"model_loading_config": {"model_id": name}} for name in ("a", "org/b")]
        for models in (given, {"llm_configs": given}):
            apps = applications(models, "x")
            assert [app.route_prefix for app in apps.models] == ["/a", "/org-b"]
            assert apps.door is not None and apps.door.route_prefix == "/"
            assert apps.door.config.models == {"a": "a", "org/b": "org-b"}
        (chosen,) = applications(LOADING | {"route_prefix": "/v/llada"}, "x").models
        assert (chosen.route_prefix, chosen.config.model_source) == ("/v/llada", "llada")

    def test_written_for_serve_reads_back_the_same(self) -> None:
        apps = applications(parse_yaml(FULL, "x"), "x")
        (written,) = serve_config(apps)["applications"]
        assert app_config(written["args"]) == apps.models[0].config
        assert written["import_path"] == "diffray.cluster.app:build"

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("", ("expected the options of a model",)),
            ("[]", ("expected the options of a model",)),
            ("- 1", ("expected a mapping", "1")),
            ("llm_configs: 3", ("a list",)),
            ("applications: []", ("Serve's own format", "serve run")),
            ("1: 2", ("option 1", "text")),
            ("engine_kwargs: {}", ("model_loading_config",)),
            ("model_loading_config: {model_id: ''}", ("model_id",)),
            ("model_loading_config: {model_id: a, source: b}", ("'source'", "model_source")),
            ("{model_loading_config: {model_id: a}, lora_config: {}}", ("'lora_config'",)),
            ("{model_loading_config: {model_id: a}, route_prefix: a}", ("route_prefix", "'a'")),
            ("{model_loading_config: {model_id: a}, route_prefix: /a/}", ("route_prefix",)),
            ("{model_loading_config: {model_id: a}, route_prefix: /-/a}", ("route_prefix",)),
            (
                "- model_loading_config: {model_id: x/a}\n- model_loading_config: {model_id: x-a}",
                ("name 'x-a'", "twice"),
            ),
            (
                "- {model_loading_config: {model_id: a}, route_prefix: /x}\n"
                "- {model_loading_config: {model_id: b}, route_prefix: /x}",
                ("route_prefix '/x'", "twice"),
            ),
            (
                "- model_loading_config: {model_id: a}\n- model_loading_config: {model_ic: b}",
                ("model 2", "'model_ic'"),
            ),
        ],
    )
    def test_mistakes_are_one_sentence(
        self, tmp_path: Path, text: str, words: tuple[str, ...]
    ) -> None:
        file = tmp_path / "a.yaml"
        file.write_text(text)
        with pytest.raises(ValueError) as caught:
            read_applications(file)
        said = str(caught.value)
        assert said.startswith(str(file))
        assert "\n" not in said
        for word in words:
            assert word in said


@pytest.mark.skipif(not DEPLOY.exists(), reason="the tests stand alone, without the source tree")
def test_the_documents_files_can_be_read(tmp_path: Path) -> None:
    one, several, serves = re.findall(r"```yaml\n(.*?)```", DEPLOY.read_text(), re.DOTALL)
    (app,) = applications(parse_yaml(one, "one"), "one").models
    assert set(AppConfig.model_fields) == app.config.model_fields_set  # it shows them all
    found = applications(parse_yaml(several, "several"), "several")
    assert [app.route_prefix for app in found.all] == ["/demo", "/other", "/"]
    assert found.door is not None and found.door.config.num_replicas == 2
    given: Any = parse_yaml(serves, "serves")
    assert [app_config(app["args"]).model_id for app in given["applications"]] == ["demo"]


def scaled(scaling: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"deployment_config": {"autoscaling_config": scaling} | others}


SCALING: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"min_replicas": 1}, ("deployment_config.autoscaling_config", "max_replicas", "required")),
    ({"min_replicas": 3, "max_replicas": 2}, ("(3)", "(2)")),
    ({"initial_replicas": 3, "max_replicas": 2}, ("initial_replicas (3)",)),
    ({"max_replicas": 2, "target_requests": 2}, ("'target_requests'",)),
    ({"max_replicas": 2, "target_ongoing_requests": 2, "target_ongoing_tokens": 2}, ("not both",)),
]


class TestArgs:
    @pytest.mark.parametrize(
        ("parts", "words"),
        [
            ({"route_prefix": "/a"}, ("'route_prefix'",)),
            ({"engine_kwargs": {"tensor_parallel": 2}}, ("engine_kwargs", "'tensor_parallel'")),
            ({"accelerator_type": "h200"}, ("'h200'", "H200")),
            ({"accelerator_type": "H200", "engine_kwargs": {"device": "cpu"}}, ("needs GPUs",)),
            ({"deployment_config": {"max_ongoing_request": 2}}, ("'max_ongoing_request'",)),
            ({"deployment_config": {"num_replicas": 0}}, ("num_replicas", "0")),
            ({"deployment_config": {"max_queued_requests": 0}}, ("max_queued_requests", "-1")),
            (
                {
                    "deployment_config": {"num_replicas": 2, "prefix_routing": True},
                    "engine_kwargs": {"enable_prefix_caching": False},
                },
                ("prefix_routing", "enable_prefix_caching"),
            ),
            *((scaled(scaling), words) for scaling, words in SCALING),
            (scaled({"max_replicas": 2}, num_replicas=2), ("num_replicas", "not both")),
            ({"api": {"api_keys": ["sha256:123"]}}, ("64 hexadecimal digits",)),
            ({"api": {"api_keys": ["a"]}, "api_key_env": "B"}, ("api_key_env", "not both")),
            (
                {"api": {"operator_keys": ["a"]}, "operator_key_env": "KEYS"},
                ("api.operator_keys or operator_key_env", "not both"),
            ),
            ({"api": {"cors_origin": ["a"]}}, ("api:", "'cors_origin'")),
            ({"diffusion": {"decoder": {"kind": "best"}}}, ("diffusion.decoder", "'threshold'")),
            ({"placement_group_config": {"strategy": "pack"}}, ("strategy", "STRICT_PACK")),
            (
                {"placement_group_config": {"bundles": [{"GPU": 1}], "bundle_per_worker": {}}},
                ("bundle_per_worker", "bundles", "not both"),
            ),
            (
                {"placement_group_config": {"bundles": [{"GPU": 1}, {"GPU": 1}]}},
                ("2 bundles for 1 rank",),
            ),
            ({"placement_group_config": {"bundle_per_worker": {"GPU": 0}}}, ("GPU", "0")),
        ],
    )
    def test_mistakes_name_the_key(self, parts: dict[str, Any], words: tuple[str, ...]) -> None:
        with pytest.raises(ValueError) as caught:
            app_config(LOADING | parts)
        for word in ("args", *words):
            assert word in str(caught.value)

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
        wish = config("auto", engine_kwargs={"max_num_seqs": 3}, api_key_env="A")
        assert (
            wish.on("cpu").engine_kwargs
            == config("cpu", engine_kwargs={"max_num_seqs": 3}).engine_kwargs
        )
        assert wish.on("cpu").api_key_env == "A"
        with pytest.raises(ValueError, match="needs GPUs"):
            config("auto", accelerator_type="L4").on("cpu")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", ("line 2", "'a'", "twice")),
        ("a:\n\t- 1", ("line 2", "\\t")),
        ("a: [1, 2", ("line 1",)),
        ("a: *b", ("alias",)),
        ("a: 2024-13-45", ("month must be in 1..12",)),
        ("? [a]\n: b", ("unhashable",)),
        ("a: !!python/object/apply:os.system [ls]", ("python/object",)),
        ("a: \x00", ("special characters",)),
        ("[" * 5000, ("recursion",)),
        ("--- a\n--- b", ("document",)),
    ],
    ids=range(10),
)
def test_yaml_that_is_wrong_is_one_sentence(text: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_yaml(text, "a.yaml")
    said = str(caught.value)
    assert said.startswith("a.yaml: ") and "\n" not in said and len(said) < 400
    assert all(word in said for word in words), said


def test_a_few_aliases_are_fine() -> None:
    given = parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}", "x")
    assert given == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}
    assert parse_yaml("", "x") is None


def test_a_file_that_is_not_text_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"a: \xe9")
    for name, words in (
        (".", "cannot be read"),
        ("latin", "not UTF-8 text"),
        ("none", "no such file"),
    ):
        with pytest.raises(ValueError, match=words):
            read_applications(tmp_path / name)


def test_flags_become_digests_and_origins() -> None:
    flags = ["--api-key", "secret", "--allowed-origins", "https://chat.example.com"]
    flags += ["--operator-key", "secret", "--no-page"]
    shown = CliRunner().invoke(app, ["serve", "demo", *flags, "--print-config"])
    assert shown.exit_code == 0, shown.output
    (application,) = yaml.safe_load(shown.stdout)["applications"]
    assert application["args"]["api"] == {
        "api_keys": [key_digest("secret")],
        "operator_keys": [key_digest("secret")],
        "cors_origins": ["https://chat.example.com"],
        "page": False,
    }
    assert "secret" not in shown.output


def test_every_dtype_of_the_engine_may_be_asked_for() -> None:
    for name in ("auto", *DTYPES):
        assert EngineConfig(dtype=name).dtype == name
    for elsewhere, here in (("half", "float16"), ("bf16", "bfloat16"), ("float", "float32")):
        assert EngineConfig(dtype=elsewhere).dtype == here
    with pytest.raises(ValueError, match="dtype: Input should be 'auto', 'float32', "):
        EngineConfig(dtype="float8")
