"""The comparison with peers, without the peers: its runner, requests, counts and refusals."""

import json
import sys
from argparse import Namespace
from functools import partial
from pathlib import Path

import pytest
import torch
from numpy import float32
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from benchmarks import load, paired
from benchmarks.peers import __main__ as peers
from benchmarks.peers import llama_cpp_llada, servers
from benchmarks.peers.offline import BLOCK_LENGTH, gen_length
from benchmarks.peers.process import block_causal
from benchmarks.peers.table import System, table
from diffray.components.checkpoints.checkpoint import load_model
from diffray.components.policy import DiffusionParams
from tests.helpers.fake_endpoint import Answer, Asked, fake_endpoint
from tests.helpers.paths import GOLDEN
from tests.helpers.tiny_checkpoints import full_forward


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["dlmserve"], r"^dlmserve needs --fast-dllm FOLDER; give it, or name"),
        (["diffusers", "--llada2-code", "/gone"], "--llada2-code /gone has no modeling_llada2"),
        (["sampler", "--llada", "HERE"], r"has no generate.py; give a checkout that has it"),
        (["dfastllm", "--fast-dllm", "CODE", "--gen-length", "60"], "multiple of --steps"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], reason: str, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "modeling_llada.py").write_text("")
    places = {"HERE": tmp_path, "CODE": tmp_path / "code"}
    args = peers.parser().parse_args([str(places.get(word, word)) for word in words])
    args.threads = torch.get_num_threads()
    with pytest.raises(ValueError, match=reason):
        peers.run(args)


def test_all_get_the_same_greedy_request_and_the_first_decodes_as_the_peers_do() -> None:
    found = servers.requests(64, 16)
    assert list(found) == ["diffray", servers.CACHED, "dlmserve", "dfastllm"]
    same, cached = (DiffusionParams(**found[name]["diffusion"]) for name in list(found)[:2])
    assert (same.block_length, cached.block_length) == (64, 32)
    assert same.decoder == cached.decoder
    assert same.cache is not None and same.cache.kind == "none"
    assert found["dlmserve"] == {"num_denoising_steps": 16, "block_length": 64}


def test_llama_cpp_gets_the_same_weights_and_its_sampler_decodes_as_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint, file = GOLDEN / "llada", tmp_path / "a.gguf"
    llama_cpp_llada.write_gguf(checkpoint, file, "f32")
    model = load_model(file, dtype="float32", device="cpu")

    def look(ids: list[int], first: int) -> NDArray[float32]:
        return full_forward(model, ids)[first:].numpy()

    args = Namespace(side="diffray", prompt=9, tokens=16, steps=5)
    turn = llama_cpp_llada.ours(args, checkpoint)
    _, prompt = llama_cpp_llada.prompts(args.prompt)
    mask = json.loads((checkpoint / "config.json").read_text())["mask_token_id"]
    assert turn.rows == [llama_cpp_llada.denoise(look, prompt, args.tokens, args.steps, mask)]
    assert turn.forwards == [args.steps]


def test_answers_of_another_length_are_refused() -> None:
    def stream(_: Asked) -> Answer:
        chunks: list[load.Json | str] = [chunk("w1 w2"), "[DONE]"]
        return Answer(chunks=iter(chunks))

    with fake_endpoint(stream) as endpoint:
        server = servers.Server(endpoint.url, "m")
        turn = servers.sender("peer", server, {}, ["w3"] * 3, 2, 2)(0)
        assert turn.rows == [["w1", "w2"]] * 3
        assert endpoint.asked[0].body["temperature"] == 0
        with pytest.raises(ValueError, match=r"peer wrote \[2\] tokens instead of 3"):
            servers.sender("peer", server, {}, ["w3"], 2, 3)(0)


def test_rows_count_equal_tokens_of_the_same_algorithm_only() -> None:
    right, wrong = [["a", "b"], ["c", "d"]], [["a", "b"], ["c", "x"]]
    results = {
        "diffray": [paired.Turn(1.0, right)],
        "diffray, dual cache": [paired.Turn(0.5, wrong)],
        "dlmserve": [paired.Turn(4.0, wrong, [1, 3])],
    }
    systems = [System(name, lambda _: results["diffray"][0], "," not in name) for name in results]
    _, first, cached, peer = table(systems, results)
    assert first == "| diffray | 4.0 | 1 | 2.00 (2.00 to 2.00) |  | 4/4 |"
    assert (
        cached == "| diffray, dual cache | 8.0 | 0.50 (0.50 to 0.50) | 1 |  | another algorithm |"
    )
    assert peer == "| dlmserve | 1.0 | 4.00 (4.00 to 4.00) | 8.00 (8.00 to 8.00) | 1.00 | 3/4 |"
    *_, judged = table(systems, results, lambda rows: f"{len(rows)} right")
    assert judged.endswith("| 2 right |")


def test_a_pipelines_answer_ends_with_a_block() -> None:
    for size in range(1, 70):
        length = gen_length([0] * size, 64)
        assert 64 <= length < 64 + BLOCK_LENGTH
        assert (size + length) % BLOCK_LENGTH == 0


def test_block_causal_shows_a_query_its_own_block_and_those_before() -> None:
    seen = block_causal(6, 2)[0, 0] == 0
    for query in range(6):
        assert seen[query].sum() == 2 * (query // 2 + 1)
        assert seen[query, : 2 * (query // 2 + 1)].all()


@pytest.mark.slow
def test_the_checkpoints_words_are_its_ids(tmp_path: Path) -> None:
    folder, source = tmp_path / "llada", tmp_path / "code"
    source.mkdir()
    for name in ("configuration_llada.py", "modeling_llada.py"):
        (source / name).write_text("")
    servers.write_llada(folder, source, layers=1, hidden=64, seed=1)
    config = json.loads((folder / "config.json").read_text())
    assert (config["mask_token_id"], config["vocab_size"]) == (126336, 126464)
    assert (folder / "modeling_llada.py").is_file() and "AutoModel" in config["auto_map"]
    head = load_file(folder / "model.safetensors")["model.transformer.ff_out.weight"]
    assert not head[servers.ORDINARY :].any() and head[servers.ORDINARY - 1].any()
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [5, 126079, 0, 777]
    assert fast.encode(fast.decode(ids)) == ids
    assert fast.convert_tokens_to_ids("<|mdm_mask|>") == servers.MASK_ID
    chat = [{"role": "user", "content": "w5 w6"}]
    assert fast.apply_chat_template(chat, tokenize=False) == "w5 w6"


def test_turns_alternate_and_the_first_does_not_count() -> None:
    seen: list[str] = []

    def take(name: str, number: int) -> int:
        seen.append(name)
        return number

    found = paired.take_turns({name: partial(take, name) for name in "ab"}, 3)
    assert found == {"a": [1, 2, 3], "b": [1, 2, 3]}
    assert "".join(seen) == "baabbaab"


def test_a_ratio_is_of_turns_that_belong_together() -> None:
    """The machine was half as fast in the second turn: both were."""
    assert paired.ratio([10.0, 5.0], [5.0, 2.5]) == "2.00 (2.00 to 2.00)"
    assert paired.ratio([6.0, 10.0, 8.0], [2.0, 2.0, 4.0]) == "3.00 (2.00 to 5.00)"


def test_a_program_answers_a_line_with_a_line_until_it_ends() -> None:
    code = "import json, os; print(json.dumps([json.loads(input()), os.environ['WORD']]))"
    with paired.answering([sys.executable, "-c", code], {"WORD": "b"}) as send:
        assert send(["a"]) == [["a"], "b"]
        with pytest.raises(ValueError, match="has ended"):
            send("more")


def chunk(text: str) -> load.Json:
    return {"choices": [{"delta": {"content": text}}]}


def test_a_streams_chunks_with_text_are_timed() -> None:
    def stream(_: Asked) -> Answer:
        chunks: list[load.Json | str] = [chunk(""), chunk("a b"), chunk(" c"), {"choices": []}]
        return Answer(chunks=iter([*chunks, "[DONE]"]))

    with fake_endpoint(stream) as endpoint:
        (reply,) = load.answers(endpoint.url, [{"model": "m"}], 1, load.streamed)
        assert endpoint.asked[0].body == {"model": "m", "stream": True}
    assert (reply.text, len(reply.chunks_s)) == ("a b c", 2)
    assert 0 < reply.chunks_s[0] <= reply.chunks_s[1]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(chunks=iter([chunk("a")])), "broke off"),
        (Answer(chunks=iter([{"error": "lost"}])), "lost"),
        (Answer(429, {"error": "full"}), "status 429"),
    ],
)
def test_an_incomplete_answer_is_refused(answer: Answer, message: str) -> None:
    with fake_endpoint(lambda _: answer) as endpoint, pytest.raises(ValueError, match=message):
        load.answers(endpoint.url, [{}], 1, load.streamed)
