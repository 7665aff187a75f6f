"""A conversation with an OpenAI-compatible server in the terminal.

Without a terminal each line of the input is a message, and only the answers are written.
"""

import sys
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from typing import Any, TextIO

import httpx2

from diffray.cluster.cli.chat_commands import Leave, run_command
from diffray.cluster.cli.conversation import Conversation, News
from diffray.cluster.cli.endpoint import Endpoint, Refused
from diffray.cluster.cli.flags import PACE
from diffray.cluster.cli.playback import Playback, can_play, without_echo
from diffray.cluster.cli.rows import wrapped

ANSWER_SECONDS = 300.0  # between two pieces of an answer


def chat(
    endpoint: Endpoint,
    *,
    model: str | None = None,
    options: Mapping[str, object] | None = None,
    system: str | None = None,
    watch: bool = True,
    pace: float = PACE,
    source: TextIO | None = None,
    out: TextIO | None = None,
) -> bool:
    """Converse until the input ends; `options` go into the body of every request.

    On a terminal, `watch` shows every step of a diffray server, `pace` steps per second. Return
    False if there is no terminal and a line failed.
    """
    source, out, options = source or sys.stdin, out or sys.stdout, {**(options or {})}
    if options.get("n", 1) != 1:
        raise ValueError(f"a chat shows one answer; leave n out (given: {options['n']!r:.99})")
    with httpx2.Client(**endpoint.options(ANSWER_SECONDS)) as client:
        if source.isatty() and out.isatty():
            about = _about(endpoint, client, model)
            talk = Conversation(client, endpoint, str(about["id"]), options, system)
            talk.default_policy = about.get("diffusion") or {}
            talk.watch = watch and can_play(out) and about.get("owned_by") == "diffray"
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() its editing and history
            out.write(_greeting(endpoint, about))
            _converse(talk, out, pace)
        else:
            talk = Conversation(
                client, endpoint, model or endpoint.first_model(client), options, system
            )
            return _answer_lines(talk, source, out)
    return True


def _answer_lines(talk: Conversation, source: TextIO, out: TextIO) -> bool:
    """Answer each line; report failures on standard error, and return whether there were none."""
    succeeded = True
    with suppress(Leave):
        for line in map(str.strip, source):
            try:
                if line and (answer := _asked(talk, line, out)) is not None:
                    _write(answer, out)
            except ValueError as error:
                print(f"diffray: {error}", file=sys.stderr, flush=True)
                succeeded = False
    return succeeded


def _about(endpoint: Endpoint, client: httpx2.Client, name: str | None) -> dict[str, Any]:
    """Return the server's entry for a model, or only the name if the server does not list it."""
    try:
        models = endpoint.models(client)
    except Refused:
        if name is None:
            raise
        models = []
    if name is None:
        return models[0]
    return next((each for each in models if each["id"] == name), {"id": name})


def _greeting(endpoint: Endpoint, about: Mapping[str, Any]) -> str:
    """Return the model's name, its description and examples to try."""
    lines = [f"{about['id']} at {endpoint.url}; /help lists commands, /clear begins a new chat"]
    if isinstance(said := about.get("description"), str):
        lines += wrapped(said)
    examples = about.get("examples")
    if isinstance(examples, list) and examples:
        lines.append("Try:")
        for each in examples:
            lines += wrapped(str(each), indent="  ")
    return "".join(f"{line}\n" for line in lines)


def _converse(talk: Conversation, out: TextIO, pace: float) -> None:
    """Read and answer messages; an error or Ctrl-C ends only its turn."""
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            out.write("\n")
            return
        except KeyboardInterrupt:
            out.write("\n")
            continue
        try:
            if line and (answer := _asked(talk, line, out)) is not None:
                _play(answer, out, pace)
                if talk.unanswered is not None:
                    out.write("(empty answer)\n")
                if talk.finish_reason == "length":
                    out.write("(max_tokens ended the answer)\n")
                if talk.counts:
                    out.write(f"\x1b[2m({talk.counts})\x1b[0m\n")
        except KeyboardInterrupt:
            out.write("(stopped)\n")
        except (ValueError, ConnectionError) as error:
            out.write(f"diffray: {error}\n")
        except Leave:
            return


def _asked(talk: Conversation, line: str, out: TextIO) -> Generator[News, None, None] | None:
    """Return the answer to a line; None for a command without one."""
    return run_command(talk, line, out) if line.startswith("/") else talk.ask(line)


def _play(answer: Generator[News, None, None], out: TextIO, pace: float) -> None:
    with closing(answer), without_echo(), Playback(out, pace) as shown:
        for news in answer:
            if isinstance(news, str):
                shown.say(news)
            else:
                shown.step(news)
        shown.finish()


def _write(answer: Generator[News, None, None], out: TextIO) -> None:
    with closing(answer):
        begun = False
        try:
            for news in answer:
                if isinstance(news, str):
                    out.write(news)
                    out.flush()
                    begun = True
        except ValueError:
            if begun:
                out.write("\n")
            raise
    out.write("\n")
    out.flush()
