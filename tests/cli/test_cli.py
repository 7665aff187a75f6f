"""The command line says what Python says, and answers mistakes with one sentence."""

import json
import os
import pty
import re
import subprocess
import sys
import termios
import time
from contextlib import nullcontext, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import typer
import yaml
from typer.main import get_command
from typer.testing import CliRunner, Result

import diffray
from diffray import DiffusionLLM, SamplingParams
from diffray.cluster.api.settings import key_digest
from diffray.cluster.cli.commands import printable
from diffray.cluster.cli.generate import print_answer
from diffray.cluster.cli.main import app
from diffray.cluster.serve.app_config import app_config, ingress_config
from diffray.components.decoders.factor import Factor
from diffray.components.decoders.threshold import Threshold
from diffray.components.policy import AnyCache, AnyDecoder, AnyIteration
from tests.helpers.paths import GOLDEN
from tests.helpers.screen import Screen
from tests.helpers.tiny import CHAT_TEMPLATE, EOS_ID, tiny_checkpoint

COMMANDS = "serve chat generate batch doctor info plan convert quantize eval tune bench".split()
BENCHMARKS = ("latency", "throughput")
MASK = "\N{LIGHT SHADE}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("chat") / "model"
    return tiny_checkpoint(folder, "llada2_moe", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="module")
def llm(tiny: str) -> DiffusionLLM:
    return DiffusionLLM(tiny)


def diffray_says(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=stdin)


def complaint(*arguments: str) -> str:
    result = diffray_says(*arguments)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("diffray: ")
    return line


def own_process(*arguments: str, then: str = "pass") -> dict[str, Any]:
    """Return how to run the command in a process of its own, and `then` before it ends."""
    code = (
        "import sys\nfrom diffray.cluster.cli.main import app\nsys.argv[0] = 'diffray'\n"
        f"try:\n    app()\nfinally:\n    {then}"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return {"args": [sys.executable, "-c", code, *arguments], "env": env}


class TestHelp:
    def test_commands_are_listed_by_use(self) -> None:
        assert diffray_says("--version").stdout == f"diffray {diffray.__version__}\n"
        said = diffray_says("-h").stdout.partition("Serve and ask:")[2]
        listed = re.findall(r"^  (\w+) ", said.partition("Options:")[0], re.MULTILINE)
        assert listed == COMMANDS
        said += diffray_says("bench", "--help").stdout.partition("Commands:")[2]
        assert "..." not in said, "a description is cut"
        request = diffray_says("chat", "--help").stdout.partition("Request:")[2]
        assert "[default:" not in request.partition("Diffusion:")[0], "the server's may differ"

    @pytest.mark.parametrize("command", [*COMMANDS, *(f"bench {name}" for name in BENCHMARKS)])
    def test_help_cuts_nothing_and_explains_everything(self, command: str) -> None:
        said = CliRunner(env={"COLUMNS": "80"}).invoke(app, [*command.split(), "--help"]).stdout
        assert "\u2026" not in said
        assert max(map(len, said.splitlines())) <= 80
        options, examples = said.split("Examples:\n")
        words = re.split(r"[\s,]+", options)
        assert all(line.strip().startswith(f"diffray {command}") for line in examples.splitlines())
        assert "list[" not in options and "Options:" in options
        group: Any = get_command(app)
        for name in command.split():
            listed = group.commands[name]
            _, group, _ = group.resolve_command(typer.Context(group), [name])
        assert listed.help == group.get_short_help_str(limit=200)
        for parameter in group.params:
            assert parameter.help, f"{command} {parameter.name}"
            assert parameter.param_type_name == "argument" or parameter.opts[0] in words

    @pytest.mark.parametrize(
        ("command", "heavy"),
        [
            ("--help", "pydantic rich torch"),
            ("serve --help", "torch transformers ray"),
            ("chat --base-url http://127.0.0.1:1", "torch transformers ray"),
        ],
    )
    def test_help_and_clients_import_nothing_heavy(self, command: str, heavy: str) -> None:
        heavy = f"print(sorted({{*{heavy.split()}}} & set(sys.modules)))"
        run = own_process(*command.split(), then=heavy)
        done = subprocess.run(**run, capture_output=True, text=True)
        assert done.stdout.endswith("[]\n"), done.stderr


def completed(line: str) -> list[str]:
    words = line.split(" ")
    asked = {
        "COMP_WORDS": line,
        "COMP_CWORD": str(len(words) - 1),
        "_DIFFRAY_COMPLETE": "complete_bash",
    }
    result = CliRunner(env=asked).invoke(app, [], prog_name="diffray")
    return result.stdout.split()


class TestCompletion:
    def test_commands_flags_and_values(self) -> None:
        assert completed("diffray ge") == ["generate"]
        assert "--install-completion" in completed("diffray --")
        assert completed("diffray bench ") == list(BENCHMARKS)
        assert completed("diffray chat --pa") == ["--pace"]
        assert completed("diffray serve --ten") == ["--tensor-parallel-size"]
        assert completed("diffray serve de") == ["demo", "demo-llada2", "demo-chat"]
        assert completed("diffray serve --kernels t") == ["torch", "triton"]
        unions = {"decoder": AnyDecoder, "cache": AnyCache, "iteration": AnyIteration}
        for name, union in unions.items():
            kinds = {part.model_fields["kind"].default for part in get_args(get_args(union)[0])}
            assert set(completed(f"diffray generate --{name} ")) == kinds


class TestGenerate:
    def test_all_flags_arrive(self, tiny: str) -> None:
        diffusion = {
            "block_length": 16,
            "decoder": {"kind": "hierarchy", "threshold": 0.5, "low_threshold": 0.1},
            "cache": {"kind": "vicinity", "warmup": 1},
            "iteration": {"kind": "soft"},
        }
        sampling: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "top_k": 40, "seed": 3}
        ends: dict[str, Any] = {"min_tokens": 2, "max_tokens": 30, "stop": ("word39", "zz")}
        params = SamplingParams(**sampling, **ends, diffusion=diffusion)
        (output,) = DiffusionLLM(tiny, dtype="float32").generate("Hello", params)
        assert output.outputs[0].finish_reason == "stop"
        flags = (
            "--max-tokens 30 --temperature 0.7 --top-p 0.95 --top-k 40 --seed 3 --stop word39 "
            "--stop zz --set min_tokens=2 --block-length 16 --decoder hierarchy "
            "--set decoder.threshold=0.5 --set decoder.low_threshold=0.1 --cache vicinity "
            "--set cache.warmup=1 --iteration soft --dtype float32 --device cpu"
        )
        result = diffray_says("generate", "Hello", "--model", tiny, *flags.split())
        assert result.exit_code == 0, result.output
        assert (result.stdout, result.stderr) == (output.outputs[0].text + "\n", "")

    def test_an_answer_is_what_the_setting_says(self, tiny: str) -> None:
        setting = 'structured_outputs.json={"type": "integer", "minimum": 5, "maximum": 9}'
        flags = "--max-tokens", "12", "--set", setting
        result = diffray_says("generate", "Hello", "--model", tiny, *flags)
        assert result.exit_code == 0, result.output
        assert re.fullmatch("[5-9]\n", result.stdout)

    def test_stats_are_python_s_and_only_terminals_watch(self, tiny: str) -> None:
        # In another dtype the random model may end its answer sooner.
        flags = ("generate", "Hello", "--model", tiny, "--max-tokens", "24", "--dtype", "float64")
        streamed, measured = diffray_says(*flags, "--watch"), diffray_says(*flags, "--stats")
        assert measured.stdout == streamed.stdout == diffray_says(*flags).stdout
        found = re.match(r"24 tokens, (\d+) forwards, (\S+) tokens per", measured.stderr)
        assert found is not None, measured.stderr
        assert found[2] == f"{24 / int(found[1]):.2f}"

    def test_chat_template_is_used_unless_raw(self, chatty: str) -> None:
        params = SamplingParams(max_tokens=12)
        llm = DiffusionLLM(chatty)
        (chat,) = llm.chat([{"role": "user", "content": "Hello"}], params)
        (plain,) = llm.generate("Hello", params)
        flags = ("generate", "Hello", "--model", chatty, "--max-tokens", "12")
        assert diffray_says(*flags).stdout == chat.outputs[0].text + "\n"
        assert diffray_says(*flags, "--raw").stdout == plain.outputs[0].text + "\n"
        assert chat.outputs[0].text != plain.outputs[0].text

    def test_special_ids_can_be_given(self, tiny: str, llm: DiffusionLLM) -> None:
        (output,) = llm.generate("Hello", SamplingParams(max_tokens=40))
        end = output.outputs[0].token_ids[5]
        flags = ("--max-tokens", "40", "--eos-token-id", str(end), "--eos-token-id", str(EOS_ID))
        result = diffray_says("generate", "Hello", "--model", tiny, *flags)
        assert 0 < len(result.stdout) < len(output.outputs[0].text)

    def test_mistake_in_a_process_is_one_line(self, tiny: str) -> None:
        run = own_process("generate", "Hello", "--model", tiny, "--decoder", "none")
        done = subprocess.run(**run, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (1, "") and len(done.stderr.splitlines()) == 1


class TestWatch:
    @pytest.fixture(autouse=True)
    def terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def test_leaves_the_text_and_counts_forwards(self, llm: DiffusionLLM) -> None:
        (whole,) = llm.generate("Hello", SamplingParams(max_tokens=24))
        stop: dict[str, Any] = {"stop": ["word457"]}
        end: dict[str, Any] = {"stop_token_ids": (whole.outputs[0].token_ids[9],)}
        kept = {"include_stop_str_in_output": True}
        others = [{"block_length": 4}, {"decoder": {"kind": "edit"}}]
        ends: list[dict[str, Any]] = [{}, stop, stop | kept, end, end | kept]
        for more in (*ends, *({"diffusion": each} for each in others)):
            params, screen = SamplingParams(max_tokens=24, **more), Screen()
            with redirect_stdout(screen):
                measured = print_answer(llm, "Hello", params, pace=1000)
            (output,) = llm.generate("Hello", params)
            assert any(MASK * 3 in screen.text_of(state) for state in screen.states)
            assert same(screen, output.outputs[0].text), more
            counts = measured.tokens, measured.forwards
            assert counts == (output.completion_tokens, output.forwards)

    @pytest.mark.slow
    def test_in_a_terminal_of_80_columns(self, tiny: str) -> None:
        flags = ("generate", "Hello", "--model", tiny, "--max-tokens", "40", "--dtype", "float32")
        said = in_terminal(*flags, "--watch", "--pace", "1000")
        screen = Screen()
        screen.write(said.replace("\r\n", "\n"))
        expected = diffray_says(*flags).stdout
        assert MASK in said
        assert same(screen, expected)
        assert max(len(row) for row in screen.rows) < 80 and not screen.is_hidden


def same(screen: Screen, text: str) -> bool:
    return "".join(screen.text.split()) == "".join(printable(text).split())


def in_terminal(*arguments: str) -> str:
    main, tty = pty.openpty()
    termios.tcsetwinsize(tty, (24, 80))
    run = own_process(*arguments)
    run["env"] |= {"TERM": "xterm"}
    for name in ("COLUMNS", "LINES"):
        run["env"].pop(name, None)
    process = subprocess.Popen(**run, stdin=tty, stdout=tty, stderr=tty)
    os.close(tty)
    said = b""
    with suppress(OSError):  # what Linux raises at the end
        while part := os.read(main, 65536):
            said += part
    os.close(main)
    assert process.wait(60) == 0, said
    return said.decode()


class TestInfoAndConvert:
    def test_info_as_table_and_json(self, chatty: str) -> None:
        facts = json.loads(diffray_says("info", chatty, "--json").stdout)
        assert facts["family"] == "LLaDA2" and facts["path"] == chatty
        table = diffray_says("info", chatty).stdout
        assert "LLaDA2" in table
        assert f"{facts['parameters']:,}" in table

    def test_converted_checkpoint_writes_the_same(self, tmp_path: Path) -> None:
        source = tiny_checkpoint(tmp_path / "single", "llada_moe")
        target = str(tmp_path / "fused")
        assert diffray_says("convert", source, target).stdout == f"{target}\n"
        flags = ("generate", "Hello", "--max-tokens", "16", "--model")
        assert diffray_says(*flags, target).stdout == diffray_says(*flags, source).stdout


def test_a_key_without_effect_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("DIFFRAY_API_KEY", "DIFFRAY_OPERATOR_KEY"):
        monkeypatch.setenv(name, "secret")
        assert "no such file" in complaint("batch", str(tmp_path / "a"), "b", "--model", "demo")
        said = complaint("serve", "--config", "a.yaml", "--print-config")
        assert f"{name} has no effect with --config" in said and "secret" not in said
        monkeypatch.delenv(name, raising=False)  # the command has taken it


def test_serve_prints_what_ray_deploys_and_ray_s_builder_reads_it_back() -> None:
    """Flags may have vLLM's names, and numbers alone are those of the default decoder."""
    flags = "--print-config --tp 2 --ep --replicas 1:3 --set decoder.threshold=0.8"
    flags += " --max-model-len 4096 --max-num-seqs 8 --dtype half --enable-prefix-caching"
    flags += " --swap-space 512MiB --kv-cache-memory 1.5GiB"
    flags += " --api-key secret --operator-key secret --no-page"
    flags += " --allowed-origins https://chat.example.com"
    result = diffray_says("serve", "demo-llada2", "--served-model-name", "mine", *flags.split())
    assert result.exit_code == 0, result.stderr
    (found,) = yaml.safe_load(result.stdout)["applications"]
    assert found["import_path"] == "diffray.cluster.app:build"
    config = app_config(found["args"])
    assert (config.model_id, config.model_source) == ("mine", "demo-llada2")
    assert config.engine_kwargs.tensor_parallel_size == 2 and config.engine_kwargs.expert_parallel
    assert config.engine_kwargs.kv_cache_memory == 3 << 29
    assert config.engine_kwargs.swap_space == 0.5
    assert config.diffusion.decoder == Threshold(threshold=0.8)
    assert "secret" not in result.output
    assert found["args"]["api"] == {
        "api_keys": [key_digest("secret")],
        "operator_keys": [key_digest("secret")],
        "cors_origins": ["https://chat.example.com"],
        "page": False,
    }
    scaling = config.deployment_config.autoscaling_config
    assert scaling is not None and (scaling.min_replicas, scaling.max_replicas) == (1, 3)


def test_serve_takes_the_policy_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("# tuned\ndecoder: {kind: factor, factor: 0.5}\ncache: none\n")
    flags = "serve", "demo", "--print-config", "--diffusion", str(path)
    for more, cache in (((), "none"), (("--cache", "prefix"), "prefix")):
        result = diffray_says(*flags, *more)
        assert result.exit_code == 0, result.output
        (found,) = yaml.safe_load(result.stdout)["applications"]
        diffusion = app_config(found["args"]).diffusion
        assert diffusion.decoder == Factor(factor=0.5)
        assert diffusion.cache is not None and diffusion.cache.kind == cache
    for text, said in (
        ("cach: none", "unknown option 'cach'"),
        ("[1]", "expected parts of diffusion"),
        ("decoder: {", "line 1, column 11"),
    ):
        path.write_text(text)
        assert f"--diffusion {path}" in complaint(*flags) or text == "decoder: {"
        assert said in complaint(*flags)


def test_several_models_share_their_options_and_get_an_ingress() -> None:
    flags = "serve demo demo-llada2 --api-key a --replicas 2 --dtype float64 --print-config"
    result = diffray_says(*flags.split())
    assert result.exit_code == 0, result.output
    *models, ingress = yaml.safe_load(result.stdout)["applications"]
    assert [each["route_prefix"] for each in models] == ["/demo", "/demo-llada2"]
    for each in models:
        assert each["args"]["engine_kwargs"] == {"dtype": "float64"}
        assert each["args"]["deployment_config"] == {"num_replicas": 2}
    assert (ingress["import_path"], ingress["route_prefix"]) == ("diffray.cluster.app:ingress", "/")
    config = ingress_config(ingress["args"])
    assert config.models == {"demo": "demo", "demo-llada2": "demo-llada2"}
    assert config.num_replicas == 2 and config.api_settings({}).api_keys == (key_digest("a"),)


# A command, and the parts that its one sentence has. TINY is a model, EMPTY a folder.
MISTAKES = [
    # What a request may be.
    ("generate x --model TINY --decoder best", "'best' | 'threshold' | 'credit'"),
    ("generate x --model TINY --cache exact", "exact | bidirectional"),
    ("generate x --model TINY --set decoder.threshold=7", "threshold | than or equal to 1 | 7"),
    ("generate x --model TINY --set decoder.limit=7", "'limit' | threshold"),
    ("generate x --model TINY --set cache.refresh=7", "cache.refresh | --cache KIND"),
    ("generate x --model TINY --set limit=7", "'limit' | max_tokens"),
    ("generate x --model TINY --seed 1 --set seed=2", "seed | twice"),
    ("generate x --model TINY --set n=2", "n is 2"),
    ("generate x --model TINY --set logprobs=true", "prints no logprobs | in Python | API"),
    ("generate x --model TINY --set decoder=credi", "no kind 'credi', did you mean 'credit'?"),
    ("generate x --model TINY --device tpu", "tpu"),
    ("generate --model TINY -", "the prompt is empty"),
    ("generate --model TINY \udcff", "not valid Unicode"),
    ("generate --pace 2", "--pace has no effect without --watch; drop it"),
    ("chat --no-watch --pace 2", "--pace has no effect with --no-watch; drop it"),
    # Which models and files there are.
    ("generate x --model EMPTY", "config.json"),
    (f"generate x --model {GOLDEN}/llada --mask-token-id 8 --eos-token-id 9", "tokenizer.json"),
    ("generate --model /no/such", "no folder '/no/such'"),
    ("info demo-llada", "demo model 'demo-llada', did you mean 'demo-llada2'?"),
    ("convert TINY EMPTY/fused", "no experts"),
    # What a plan may be for.
    ("plan demo --gpu h2000", "no GPU 'h2000' in the table, did you mean 'H200'? | --gpu-memory"),
    ("plan demo-chat2 --gpu L4", "demo model 'demo-chat2', did you mean 'demo-chat'?"),
    ("plan demo --gpu L4 --tp 3", "cannot be divided over 3 ranks; this model runs on 1, 2, 4, 8"),
    ("plan demo --gpu L4 --context 4096", "exceeds what the model was made for (1024)"),
    ("plan demo --gpu A100-80GB -q fp8", "compute capability 8.9, and this one has 8.0; use int8"),
    ("plan demo --device cpu --gpu L4", "--gpu has no effect with --device cpu; drop it"),
    ("plan demo --gpu-memory 80XB", "'80XB' is not an amount of memory"),
    ("plan demo --gpu L4 --lora a=EMPTY", "adapter_config.json"),
    # What a server and its model may be.
    ("serve demo --model demo", "given twice"),
    ("serve demo demo-llada2 --served-model-name a", "--served-model-name | --config"),
    ("serve --replicas 2:x", "N or MIN:MAX"),
    ("serve --replicas 3:2", "--replicas: min_replicas (3) must not exceed max_rep"),
    ("serve --max-running-requests 0", "--max-running-requests: Input should be"),
    ("serve --tp 3", "runs on 1, 2, 4, 8 ranks"),
    ("serve --max-model-len 4096", "exceeds what the model was made for (1024)"),
    ("serve --kv-cache-memory 4XB", "--kv-cache-memory: | 4XB"),
    ("serve -q int3", "there is no format 'int3', did you mean"),
    ("serve demo-llada2 --prefix-routing", "prefix_routing chooses between replicas"),
    ("serve --enable-prefix-caching", "enable_prefix_caching needs block-causal attention"),
    ("serve demo-llada2 --first-step-caching step0", "share whole prefixes already"),
    ("serve demo --replicas 2 --prefix-routing", "prefix_routing needs block-causal attention"),
    ("serve demo --cache exact", "cache 'exact' does not fit this model"),
    ("serve --set temperature=1", "only the parts of diffusion"),
    # What has no effect.
    ("serve --config a.yaml --tp 1", "--tp has no effect with --config; drop it"),
    ("serve demo --config a.yaml", "MODEL has no effect with --config; drop it"),
    ("serve --print-config --port 8000", "--port has no effect with --print-config; drop it"),
    ("serve --device cuda --cpu-threads 2 --print-config", "cpu_threads has no effect with d"),
    ("serve --address a:1 --dashboard", "--dashboard has no effect with --address; drop it"),
    ("batch a b --base-url http://x --dtype no", "--dtype has no effect with --base-url; drop it"),
    ("batch a b --base-url http://x --lora=a=b", "--lora has no effect with --base-url; drop it"),
    ("batch a b --base-url http://x --no-cuda-graphs", "--no-cuda-graphs has no effect with --bas"),
    ("batch a b --base-url http://x --timeout 0", "--timeout must be above 0"),
    ("batch a b --model demo --timeout -1", "--timeout has no effect without --base-url; drop it"),
    ("batch a b --model demo --api-key x", "--api-key has no effect without --base-url; drop it"),
    ("batch a b", "give --base-url"),
    ("chat --base-url http://127.0.0.1:1", "nothing answers"),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_is_one_sentence_that_names_it_and_what_to_do(
    arguments: str, words: str, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process: `serve` would fork children, whose stderr the runner does not see.
    here = SimpleNamespace(unless_passed=lambda check, then: nullcontext(check()))
    monkeypatch.setattr("diffray.cluster.cli.serve.supervised", lambda: nullcontext(here))
    typed = arguments.replace("TINY", tiny).replace("EMPTY", str(tmp_path)).split()
    said = complaint(*typed)
    assert [part for part in words.split(" | ") if part not in said] == [], said


# A command, and what is suggested instead of it.
TYPOS = [
    ("genrate", "generate"),
    ("generate --model TINY", "stdin"),  # a prompt is needed: this model has no example
    ("serve --gpu_memory_utilization=0.9", "--kv-cache-memory SIZE"),
    ("serve --trust-remote-code", "no code of a checkpoint is run"),
    ("generate --enforce-eager", "--no-cuda-graphs"),
    ("generate demo Hello", "(Hello); the model goes after --model"),
    ("generate --gpu-memory-utilization 1", "No such option"),  # nor --kv-cache-memory
]


@pytest.mark.parametrize(("arguments", "words"), TYPOS)
def test_what_click_refuses_comes_with_a_suggestion(arguments: str, words: str, tiny: str) -> None:
    result = diffray_says(*arguments.replace("TINY", tiny).split())
    assert result.exit_code == 2 and words in result.output
    assert "kv-cache-memory" not in result.output or arguments.startswith("serve")
