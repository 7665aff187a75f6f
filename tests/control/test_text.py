"""Text that grows: nothing is shown that would have to be taken back, and masks typed are text."""

from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffray.cluster.frontend.output import Job
from diffray.cluster.frontend.text import TextStream, Tokenizer
from diffray.components.params import SamplingParams
from diffray.workers.messages import Update
from tests.helpers.byte_tokenizer import MASK, TOKENIZER


def push_each(stream: TextStream, ids: list[int]) -> list[str]:
    return [stream.push([token]) for token in ids]


# A special token's name is not text.
@given(st.text(max_size=40).filter(lambda text: "<|" not in text), st.integers(1, 7))
def test_pieces_add_up_to_the_text(text: str, size: int) -> None:
    ids = TOKENIZER.encode(text)
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(ids[at : at + size]) for at in range(0, len(ids), size)]
    assert "".join([*pieces, stream.finish()]) == stream.text == text


IDS = st.lists(st.integers(0, len(TOKENIZER.fast) - 1), max_size=40)
TEXTS = st.text(alphabet="ab \u20ac\U0001f600\ufffd", min_size=1, max_size=4)


@given(
    IDS | st.lists(TEXTS, max_size=12).map(lambda parts: TOKENIZER.encode("".join(parts))),
    st.lists(st.integers(1, 9), min_size=1),
    st.lists(TEXTS, max_size=3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0, 1, 4, 15]),
)
def test_many_tokens_at_once_give_the_text_of_each_alone(
    ids: list[int],
    sizes: list[int],
    stop: list[str],
    include_stop: bool,
    skip: bool,
    min_tokens: int,
) -> None:
    """Whatever the bytes are: halves of characters, special tokens, stop strings over borders."""
    given = TOKENIZER, stop, include_stop, skip, min_tokens
    whole, single = TextStream(*given), TextStream(*given)
    at = 0
    for size in sizes * len(ids):
        pieces = push_each(single, ids[at : at + size])
        assert whole.push(ids[at : at + size]) == "".join(pieces)
        assert (whole.text, whole.ids, whole.stopped) == (single.text, single.ids, single.stopped)
        at += size
    assert whole.finish() == single.finish()
    assert whole.text == single.text


def test_what_follows_a_stop_string_is_no_part_of_the_answer() -> None:
    ids = TOKENIZER.encode("abcd")
    job = Job(0, SamplingParams(stop=["b"], logprobs=True), TOKENIZER)
    job.apply(Update(0, ids, steps=[0, 1, 2, 3], logprobs=[-0.5] * 4, forwards=4))
    answer = job.result()
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("a", "stop", "b")
    assert (answer.token_ids, answer.steps, answer.logprobs) == (ids[:2], [0, 1], [-0.5] * 2)


@pytest.mark.parametrize("stop", [[], ["bc"], ["cx", "d\u20ac"], ["never"]])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_tokens_shown_are_those_of_the_text(stop: list[str], ignore_eos: bool) -> None:
    """At each moment of a stream: a stop string may be over several tokens, as a character is."""
    end = TOKENIZER.fast.eos_token_id
    ids = TOKENIZER.encode("ab") + [end] * ignore_eos + TOKENIZER.encode("cd\u20ace") + [end]
    job = Job(0, SamplingParams(stop=stop, logprobs=True), TOKENIZER)
    text, shown = "", list[int]()
    for token in ids:
        last = token == end and len(job.choice.token_ids) > 3
        update = Update(0, [token], [0], [-0.5])
        if last:
            update.finish_reason = "length" if ignore_eos else "stop"
            update.stop_id = None if ignore_eos else end
        job.apply(update)
        if (news := job.news()) is not None:
            text, shown = text + news.text, shown + news.shown
        assert TOKENIZER.decode([ids[at] for at in shown], False) == text == job.choice.text
        if job.finished:
            break
    assert job.finished and shown == job.choice.shown


def test_one_push_decodes_twice_however_many_tokens_there_are() -> None:
    stream = TextStream(TOKENIZER, stop=("never",))
    ids = TOKENIZER.encode("all of these at once")
    with patch.object(Tokenizer, "decode", autospec=True, side_effect=Tokenizer.decode) as decode:
        stream.push(ids)
    assert stream.text == "all of these at once" and decode.call_count == 2


def test_incomplete_characters_are_held_back() -> None:
    stream = TextStream(TOKENIZER)
    assert push_each(stream, TOKENIZER.encode("a\u20acb")) == ["a", "", "", "\u20ac", "b"]
    half = TextStream(TOKENIZER)
    half.push(TOKENIZER.encode("\u20ac")[:2])
    assert half.text == ""
    assert half.finish() == "\ufffd"


def test_a_possible_stop_string_is_held_back_until_it_is_none() -> None:
    stream = TextStream(TOKENIZER, stop=("END",))
    assert push_each(stream, TOKENIZER.encode("xENyE")) == ["x", "", "", "ENy", ""]
    assert stream.finish() == "E"


@pytest.mark.parametrize(("include_stop", "text"), [(False, "one "), (True, "one two")])
def test_the_earliest_stop_string_wins(include_stop: bool, text: str) -> None:
    stream = TextStream(TOKENIZER, ("three", "two", "o t"), include_stop)
    stream.push(TOKENIZER.encode("one two three"))
    assert (stream.stopped, stream.text, len(stream.ids)) == ("two", text, len("one two"))
    assert stream.finish() == ""


@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [(0, ""), (1, ""), (2, "a"), (3, "ab x"), (5, "ab x"), (6, "ab xa"), (9, "ab xab ab")],
)
def test_a_stop_string_counts_only_where_it_ends_after_min_tokens(
    min_tokens: int, text: str
) -> None:
    """A token is a character here; a stop string that began before may end the text."""
    stream = TextStream(TOKENIZER, stop=("ab", "b "), min_tokens=min_tokens)
    stream.push(TOKENIZER.encode("ab xab ab"))
    stream.finish()
    assert stream.text == text and (stream.stopped is None or len(stream.ids) > min_tokens)


def test_special_tokens_are_left_out_unless_requested() -> None:
    ids = TOKENIZER.encode("a<|end|>b")
    for skip, text in ((True, "ab"), (False, "a<|end|>b")):
        stream = TextStream(TOKENIZER, skip_special_tokens=skip)
        stream.push(ids)
        assert stream.text + stream.finish() == text


def test_a_mask_that_somebody_typed_is_text() -> None:
    mask_id = TOKENIZER.fast.mask_token_id
    typed = f"before {MASK} and {MASK}{MASK} after"
    chat = TOKENIZER.encode_chat([{"role": "user", "content": typed}])
    for ids in (TOKENIZER.encode(typed), chat):
        assert mask_id not in ids and MASK in TOKENIZER.decode(ids)
