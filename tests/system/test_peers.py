"""The comparison with peers, without the peers: its runner, requests, counts and refusals."""

import asyncio
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from benchmarks import load, paired
from benchmarks.peers import checkpoint, plan, served, servers
from benchmarks.peers.offline import BLOCK_LENGTH, gen_length
from benchmarks.peers.run_diffusers import block_causal
from diffray.components.policy import DiffusionParams
from tests.helpers.fake_endpoint import Answer, Asked, fake_endpoint

SETTING = servers.Setting(Path("/m/llada"), threads=2, gen_length=64, steps=16, batch=8)


def parsed(*words: str) -> Any:
    return plan.parser().parse_args(words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["dlmserve"], r"^dlmserve needs --fast-dllm FOLDER; give it, or name"),
        (["diffusers", "--llada2-code", "/gone"], "--llada2-code /gone is not a folder"),
        (["sampler", "--llada", "HERE"], r"has no generate.py; give a checkout that has them"),
        (["vllm"], "'vllm' is not a peer; choose from dlmserve, dfastllm"),
        (["--gen-length", "60"], "multiple of --steps"),
        (["--block-length", "48"], "must divide"),
        (["--hidden", "100"], "multiple of 64"),
        (["--prompt-length", "9", "8"], "MIN at most MAX"),
        (["--concurrency", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_compared_is_refused(words: list[str], reason: str, tmp_path: Path) -> None:
    plan.check(parsed())
    given = parsed(*(str(tmp_path) if word == "HERE" else word for word in words))
    with pytest.raises(ValueError, match=reason):
        plan.check(given)
        plan.chosen(given)


def test_all_get_the_same_greedy_request_and_the_first_decodes_as_the_peers_do() -> None:
    found = servers.contenders(SETTING, ["dlmserve", "dfastllm"], block_length=32)
    assert [each.server for each in found] == ["diffray", "diffray", "dlmserve", "dfastllm"]
    assert [each.same for each in found] == [True, False, True, True]
    same, cached = (DiffusionParams(**each.body["diffusion"]) for each in found[:2])
    assert (same.block_length, cached.block_length) == (64, 32)
    assert same.decoder == cached.decoder
    assert same.cache is not None and same.cache.kind == "none"
    assert found[2].body == {"num_denoising_steps": 16, "block_length": 64}
    bodies = [served.body(each, "m", "w1 w2", 64) for each in found]
    shared = {"messages", "max_tokens", "temperature", "stream", "model"}
    assert all({key: body[key] for key in shared} == bodies[-1] for body in bodies)
    assert bodies[-1]["temperature"] == 0


def test_answers_of_another_length_are_refused() -> None:
    def stream(_: Asked) -> Answer:
        chunks: list[load.Json | str] = [chunk("w1 w2"), "[DONE]"]
        return Answer(chunks=iter(chunks))

    contender = servers.Contender("peer", "peer", {})
    with fake_endpoint(stream) as endpoint:
        started = {"peer": servers.Server(endpoint.url, "m")}
        turn = served.turn_of(contender, started, ["w3"] * 3, 2, 2)(0)
        assert turn.rows == [["w1", "w2"]] * 3
        with pytest.raises(ValueError, match=r"peer wrote \[2\] tokens instead of 3"):
            served.turn_of(contender, started, ["w3"], 2, 3)(0)


def test_rows_count_equal_tokens_of_the_same_algorithm_only() -> None:
    found = servers.contenders(SETTING, ["dlmserve"], block_length=32)
    right, wrong = [["a", "b"], ["c", "d"]], [["a", "b"], ["c", "x"]]
    results = {
        "diffray": [paired.Turn(1.0, right)],
        "diffray, dual cache": [paired.Turn(0.5, wrong)],
        "dlmserve": [paired.Turn(4.0, wrong)],
    }
    first, cached, peer = served.table_rows(8, found, results)
    assert first == "| 8 | diffray | 4.0 | 1 | 2.00 (2.00 to 2.00) | 4/4 | 2/2 |"
    assert cached.startswith("| 8 | diffray, dual cache | 8.0 | 0.50 (0.50 to 0.50) | 1 | another")
    ratios = "4.00 (4.00 to 4.00) | 8.00 (8.00 to 8.00)"
    assert peer == f"| 8 | dlmserve | 1.0 | {ratios} | 3/4 | 1/2 |"


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
    for name in checkpoint.LLADA_CODE:
        (source / name).write_text("")
    checkpoint.write_llada(folder, source, layers=1, hidden=64, seed=1)
    config = json.loads((folder / "config.json").read_text())
    assert (config["mask_token_id"], config["vocab_size"]) == (126336, 126464)
    assert (folder / "modeling_llada.py").is_file()
    head = load_file(folder / "model.safetensors")["model.transformer.ff_out.weight"]
    assert not head[checkpoint.ORDINARY :].any() and head[checkpoint.ORDINARY - 1].any()
    fast = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = [5, 126079, 0, 777]
    assert fast.encode(fast.decode(ids)) == ids
    assert fast.convert_tokens_to_ids("<|mdm_mask|>") == checkpoint.MASK_ID
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


async def replies(url: str, bodies: list[load.Json], at_once: int) -> list[load.Reply]:
    async with load.client(url) as http:
        return await load.all_of(bodies, at_once, partial(load.streamed, http))


def chunk(text: str) -> load.Json:
    return {"choices": [{"delta": {"content": text}}]}


def test_a_streams_chunks_with_text_are_timed() -> None:
    def stream(_: Asked) -> Answer:
        chunks: list[load.Json | str] = [chunk(""), chunk("a b"), chunk(" c"), {"choices": []}]
        return Answer(chunks=iter([*chunks, "[DONE]"]))

    with fake_endpoint(stream) as endpoint:
        (reply,) = asyncio.run(replies(endpoint.url, [{"model": "m"}], 1))
        assert endpoint.asked[0].body == {"model": "m", "stream": True}
    assert (reply.text, len(reply.chunks_s)) == ("a b c", 2)
    assert 0 < reply.headers_s < reply.chunks_s[0] <= reply.chunks_s[1] <= reply.end_s


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
        asyncio.run(replies(endpoint.url, [{}], 1))
