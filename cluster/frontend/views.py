"""Shows an output: a picture of its denoising in notebooks, the denoising itself in terminals."""

import sys
import time
from base64 import b64encode
from html import escape
from importlib import import_module
from typing import Any

from diffray.cluster.frontend.output import CompletionOutput, RequestOutput
from diffray.cluster.frontend.picture import picture
from diffray.components.config import counted

# These keep an output in a notebook within a few hundred kilobytes.
_MOST_PICTURES = 4
_MOST_TOKENS = 512
_MASK = "\N{LIGHT SHADE}"
# Control characters would move the cursor that draws the next frame.
_CONTROLS = dict.fromkeys({*range(32), 127} - {ord("\n")}, " ")


def as_html(output: RequestOutput) -> str:
    """Return a picture of each choice's denoising, and its text, which can be selected.

    The pictures are images, so that their styles cannot change the page.
    """
    parts = [_figure(output.prompt or "", each) for each in output.outputs[:_MOST_PICTURES]]
    for choice in output.outputs[_MOST_PICTURES:]:
        parts.append(_plain(choice))
    return f"<div>{''.join(parts)}</div>"


def _figure(prompt: str, choice: CompletionOutput) -> str:
    if not choice.visible or len(choice.visible) > _MOST_TOKENS:
        return _plain(choice)
    drawn = b64encode(picture(prompt, choice.visible).encode()).decode()
    return (
        f'<img src="data:image/svg+xml;base64,{drawn}" alt="The denoising of the text below" '
        f'style="width: 100%; max-width: 700px">{_plain(choice)}'
    )


def _plain(choice: CompletionOutput) -> str:
    text = choice.text if choice.tokens else str(choice.token_ids)
    return (
        f'<pre style="white-space: pre-wrap">{escape(text)}</pre>'
        f"<p><small>{escape(summary(choice))}</small></p>"
    )


def summary(choice: CompletionOutput) -> str:
    """Return a one-line summary of an answer."""
    tokens, forwards = len(choice.token_ids), choice.forwards
    rate = tokens / max(forwards, 1)
    ended = f", {choice.finish_reason}" if choice.finish_reason else ""
    counts = f"{counted(tokens, 'token')} in {counted(forwards, 'forward')}"
    return f"{counts}, {rate:.1f} tokens per forward{ended}"


def show(output: RequestOutput, pace: float) -> None:
    """Show an output in a notebook, a terminal or as plain text; only a terminal has a pace."""
    if not pace > 0:
        raise ValueError(f"pace is the steps per second, above 0 (given: {pace:g})")
    if (display := _notebook()) is not None:
        display(output)
        return
    for choice in output.outputs:
        if sys.stdout.isatty() and choice.visible:
            _play(choice, pace)
        print(choice.text if choice.tokens else choice.token_ids)
        print(summary(choice))


def _notebook() -> Any:
    """Return the function that displays an object in this notebook; None outside one."""
    shell = sys.modules.get("IPython")
    running = None if shell is None else shell.get_ipython()
    if running is None or not hasattr(running, "kernel"):  # in a terminal IPython has none
        return None
    return import_module("IPython.display").display


def _play(choice: CompletionOutput, pace: float) -> None:
    """Draw every step in place, then remove the drawing."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), auto_refresh=False, transient=True) as live:
        for step in range(1 + max(step for _, step in choice.visible)):
            live.update(frame(choice.visible, step), refresh=True)
            time.sleep(1 / pace)


def frame(tokens: list[tuple[str, int]], step: int) -> Any:
    """Return the canvas after a step, counted from 0: its new tokens are bright, masks dim."""
    from rich.text import Text

    masked = sum(final > step for _, final in tokens)
    text = Text(f"step {step + 1}, {masked} masked of {len(tokens)}\n")
    for content, final in tokens:
        shown = content.translate(_CONTROLS)
        if final > step:
            text.append(_MASK * max(len(shown), 1), style="dim")
        else:
            text.append(shown, style="bold green" if final == step else "")
    return text
