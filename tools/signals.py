"""Signals as a terminal's programs have them."""

import signal


def as_in_a_terminal() -> None:
    """Undo what a run in the background inherits, and would leave to all programs it starts.

    There Ctrl-C is ignored, and under nohup a closed terminal.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
