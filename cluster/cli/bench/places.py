"""Where results go, looked at before the work begins: nobody measures for hours to lose it."""

from pathlib import Path


def check_place(path: Path | None, flag: str) -> None:
    """Refuse a file that could not be written, if one was named."""
    if path is None:
        return
    if path.is_dir():
        raise ValueError(f"{flag} {path} is a folder; name a file in it")
    if not path.parent.is_dir():
        raise ValueError(f"{flag} {path}: there is no folder {path.parent}; make it first")
