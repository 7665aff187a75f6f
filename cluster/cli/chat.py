"""`diffray chat`: a conversation with an OpenAI-compatible server in the terminal.

Without a terminal each line of the input is a message, and only the answers are written.
"""

import json
import sys
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from textwrap import fill
from typing import Annotated, Any, Final, TextIO

import httpx2
import typer
from rich.console import Console
from rich.text import Text

from diffray.cluster.cli import flags
from diffray.cluster.cli.commands import printable, refuse
from diffray.cluster.cli.endpoint import Conversation, Endpoint, Refused
from diffray.cluster.cli.flags import CACHES, DECODERS, DIFFUSION, ITERATIONS, PACE, put_setting
from diffray.cluster.cli.playback import News, can_play, show
from diffray.cluster.serve.address import API_KEY
from diffray.components.spelling import did_you_mean

ANSWER_SECONDS = 300.0  # between two pieces of an answer


def _kinds(part: str, kinds: Iterable[str]) -> str:
    """Return the kinds of a policy's part, wrapped for a terminal."""
    return fill(", ".join(kinds), 79, initial_indent=f"{part:<10}", subsequent_indent=" " * 10)


HELP: Final = """/retry              ask the last message again
/policy             show how answers are denoised
/policy NAME=VALUE  change it, by one or more settings: decoder=KIND,
                    decoder.threshold=0.8, cache=KIND, iteration=KIND,
                    block_length=32, cfg_scale=1.5
/policy default     denoise by the server's default
/seed N             set the sampling seed; without N, a new one each time
/system TEXT        set the system message; without TEXT, remove it
/save FILE          write the request of the last answer as JSON
/clear              begin a new chat, with the same policy, seed and system
/help               show this
/exit               leave, as Ctrl-D does; Ctrl-C stops an answer
"""
_NAMES: Final = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))


class Leave(Exception):
    """The user typed /exit."""


def chat(
    context: typer.Context,
    *,
    base_url: Annotated[
        str, typer.Option(metavar="URL", help="The server's URL, with or without /v1.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model's name on the server; default: the first."),
    ] = None,
    api_key: Annotated[str | None, typer.Option(help=flags.API_KEY_HELP, envvar=API_KEY)] = None,
    watch: Annotated[
        bool, typer.Option(help="Show how masks turn into text, step by step.")
    ] = True,
    pace: flags.Pace = flags.PACE,
    system: Annotated[
        str | None, typer.Option(help="The system message.", rich_help_panel="Request")
    ] = None,
    answer: flags.Answer,
    diffusion: flags.Diffusion,
    settings: flags.Settings = None,
) -> None:
    """Chat with a server, in the terminal or line by line from stdin.

    On a terminal every step of an answer is shown; /help lists commands, such as /policy. From
    stdin, the exit status is 1 if a line had no answer.
    """
    if not watch:
        refuse(context, "with --no-watch", ("pace",))
    options = flags.request_options(answer | diffusion, settings)
    endpoint = Endpoint.at(base_url, api_key)
    succeeded = converse(
        endpoint, model=model, options=options, system=system, watch=watch, pace=pace
    )
    if not succeeded:
        raise typer.Exit(1)


def converse(
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
            talk.accepts = about.get("accepts") or {}
            talk.watch = watch and can_play(out) and about.get("owned_by") == "diffray"
            with suppress(ImportError):
                import readline  # noqa: F401  # gives input() its editing and history
            _greet(endpoint, about, out)
            _take_turns(talk, out, pace)
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
                if line and (answer := _answer(talk, line, out)) is not None:
                    show(answer, out, None)
            except ValueError as error:
                print(printable(f"diffray: {error}"), file=sys.stderr, flush=True)
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


def _greet(endpoint: Endpoint, about: Mapping[str, Any], out: TextIO) -> None:
    """Write the model's name, its description and examples to try."""
    console = Console(file=out)

    def tell(text: str, indent: str = "") -> None:
        for row in Text(printable(text)).wrap(console, max(console.width - 1 - len(indent), 20)):
            out.write(f"{indent}{row.plain.rstrip()}\n")

    name = printable(str(about["id"]))
    out.write(f"{name} at {endpoint.url}; /help lists commands, /clear begins a new chat\n")
    if isinstance(said := about.get("description"), str):
        tell(said)
    examples = about.get("examples")
    if isinstance(examples, list) and examples:
        tell("Try:")
        for each in examples:
            tell(str(each), indent="  ")


def _take_turns(talk: Conversation, out: TextIO, pace: float) -> None:
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
            if line and (answer := _answer(talk, line, out)) is not None:
                show(answer, out, pace)
                if talk.unanswered is not None:
                    out.write("(empty answer)\n")
                if talk.finish_reason == "length":
                    out.write("(max_tokens ended the answer)\n")
                if talk.counts:
                    Console(file=out).print(Text(f"({talk.counts})", "dim"))
        except KeyboardInterrupt:
            out.write("(stopped)\n")
        except (ValueError, ConnectionError) as error:
            out.write(f"diffray: {printable(str(error))}\n")
        except Leave:
            return


def _answer(talk: Conversation, line: str, out: TextIO) -> Generator[News, None, None] | None:
    """Return the answer to a message or a command; None for a command without one."""
    if not line.startswith("/"):
        return talk.ask(line)
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/exit" | "/quit":
            raise Leave
        case "/clear":
            talk.clear()
            _confirm("a new chat", out)
        case "/system":
            talk.system = rest or None
            _confirm(f"the system message is {'set' if rest else 'removed'}", out)
        case "/help":
            kinds = {"decoder": DECODERS, "cache": CACHES, "iteration": ITERATIONS}
            lines = [_kinds(part, talk.accepts.get(part) or kinds[part]) for part in kinds]
            out.write("\n".join([HELP, *lines, ""]))
        case "/policy":
            _policy(talk, rest, out)
        case "/seed":
            _seed(talk, rest, out)
        case "/save":
            _save(talk, rest, out)
        case "/retry":
            return talk.retry()
        case _:
            raise Refused(
                f"there is no command {name}{did_you_mean(name, _NAMES) or '.'} /help lists them"
            )
    return None


def _confirm(text: str, out: TextIO) -> None:
    """Confirm a command on a terminal; a file gets only answers."""
    if out.isatty():
        out.write(text + "\n")


def _policy(talk: Conversation, given: str, out: TextIO) -> None:
    """Change the policy of the next answers, or show it; the server validates the change."""
    if given == "default":
        talk.options.pop("diffusion", None)
    elif given:
        changed = _changed(talk.options.get("diffusion", {}), given.split())
        talk.try_options(talk.options | {"diffusion": changed})
    if not given or out.isatty():
        policy = _as_settings(talk.options.get("diffusion", {}))
        default = f"the server's default policy {_as_settings(talk.default_policy)}".rstrip()
        out.write((policy or default) + "\n")


def _changed(policy: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return the policy with these settings; naming a part's kind drops its old settings."""
    wanted: dict[str, Any] = {}
    for each in settings:
        put_setting(wanted, each)
    for name in wanted:
        if name != "diffusion":
            allowed = ", ".join(DIFFUSION)
            raise Refused(f"{name!r} is not a part of a policy; its parts are {allowed}")
    made = {**policy}
    for name, value in wanted["diffusion"].items():
        if isinstance(value, dict) and "kind" not in value:
            if name not in made:
                first = next(iter(value))
                raise Refused(f"{name}.{first} needs a kind: {name}=KIND {name}.{first}=...")
            value = made[name] | value
        made[name] = value
    return made


def _as_settings(policy: dict[str, Any]) -> str:
    """Return a policy in the form in which users type it."""
    parts = []
    for name, value in policy.items():
        if not isinstance(value, dict):
            parts.append(f"{name}={json.dumps(value)}")
            continue
        settings = [f"{name}.{n}={v}" for n, v in value.items() if n != "kind"]
        parts += [f"{name}={value['kind']}"] * ("kind" in value) + settings
    return " ".join(parts)


def _seed(talk: Conversation, given: str, out: TextIO) -> None:
    if not given:
        talk.options.pop("seed", None)
        _confirm("each answer gets a new seed", out)
        return
    try:
        talk.options["seed"] = int(given)
    except ValueError:
        raise Refused(f"a seed is a whole number (given: {given!r:.40})") from None
    _confirm(f"the seed is {talk.options['seed']}", out)


def _save(talk: Conversation, file: str, out: TextIO) -> None:
    """Write the request of the last answer, without that answer."""
    if not file:
        raise Refused("/save needs the name of a file, such as /save chat.json")
    if not talk.turns:
        raise Refused("nothing was said yet")
    body = talk.request()
    del body["messages"][-1]
    try:
        with open(file, "x", encoding="utf-8") as target:
            json.dump(body, target, indent=2, ensure_ascii=False)
            target.write("\n")
        _confirm(f"saved to {file}", out)
    except FileExistsError:
        raise Refused(f"{file} exists already; give another name") from None
    except OSError as error:
        raise Refused(f"{file} cannot be written: {error.strerror}") from None
