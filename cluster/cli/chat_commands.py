"""The commands of a chat: lines that start with a slash."""

import json
from collections.abc import Generator
from textwrap import fill
from typing import Any, Final, TextIO

from diffray.cluster.cli.conversation import Conversation, News
from diffray.cluster.cli.endpoint import Refused
from diffray.cluster.cli.flags import CACHES, DECODERS, ITERATIONS
from diffray.cluster.cli.request_options import DIFFUSION, put_setting
from diffray.components.spelling import did_you_mean


def _kinds(part: str, kinds: tuple[str, ...]) -> str:
    """Return the kinds of a policy's part, wrapped for a terminal."""
    return fill(", ".join(kinds), 79, initial_indent=f"{part:<10}", subsequent_indent=" " * 10)


HELP: Final = f"""/retry              ask the last message again
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

{_kinds("decoder", DECODERS)}
{_kinds("cache", CACHES)}
{_kinds("iteration", ITERATIONS)}"""
_NAMES: Final = tuple(line.split()[0] for line in HELP.splitlines() if line.startswith("/"))


class Leave(Exception):
    """The user typed /exit."""


def run_command(talk: Conversation, line: str, out: TextIO) -> Generator[News, None, None] | None:
    """Run a line that starts with a slash; return the answer to show, if there is one."""
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
            out.write(HELP + "\n")
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
