"""A checkpoint's folder, on disk or from the Hub, and its JSON files; without torch."""

import json
import re
from functools import partial
from pathlib import Path

from diffray.components.checkpoints.demos import HUB_ID, NAMES, demo_path
from diffray.components.lora import CONFIG
from diffray.components.models.fields import Config, shown
from diffray.components.spelling import did_you_mean

DRAFTER = "drafter"  # the folder of an adapter that comes with a checkpoint
_LARGEST_JSON = 256 << 20  # bytes; tokenizers of hundreds of thousands of tokens take 30 MB
_COMMIT = re.compile(r"([0-9a-f]{40})?")
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message says why and what to do."""


def resolve(path_or_hub_id: str | Path) -> Path:
    """Return the checkpoint's folder: a demo's, a local one, or one downloaded from the Hub.

    A Hub id may end in @ and a commit. A GGUF file is shown as a folder.
    """
    demo = demo_path(str(path_or_hub_id))
    if demo is not None:
        return demo
    path = Path(path_or_hub_id).expanduser()
    if (gguf := _gguf_in(path)) is not None:
        from diffray.components.checkpoints.gguf_folder import gguf_folder

        return gguf_folder(gguf, drafter_of(path))
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the checkpoint's folder, or a GGUF file")
    if path.suffix.lower() == ".gguf":
        raise CheckpointError(f"there is no file {str(path)!r}; give a GGUF file's path")
    name, _, commit = str(path_or_hub_id).partition("@")
    if "/" not in name and (near := did_you_mean(name, NAMES)):
        raise CheckpointError(f"there is no folder or demo model {name!r}{near}")
    if not HUB_ID.fullmatch(name) or not _COMMIT.fullmatch(commit):
        raise CheckpointError(
            f"there is no folder {str(path_or_hub_id)!r}, and it is not a Hub id (OWNER/NAME); "
            "give a checkpoint's folder or its Hub id"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        download = partial(snapshot_download, name, revision=commit or None)
        folder = Path(download(allow_patterns=_FILES))
        if not any(folder.glob("*.safetensors")):
            folder = Path(download(allow_patterns=[*_FILES, "pytorch_model*.bin"]))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise CheckpointError(_why_not(name, error)) from error
    return folder


def pinned(path_or_hub_id: str | Path) -> str:
    """Return a source that keeps leading to the same checkpoint: a path, or a Hub id @ commit."""
    if (gguf := _gguf_in(Path(path_or_hub_id).expanduser())) is not None:
        return str(gguf.absolute())
    folder = resolve(path_or_hub_id)
    if folder.parent.name != "snapshots" or Path(path_or_hub_id).expanduser().is_dir():
        return str(folder.resolve())
    return f"{str(path_or_hub_id).partition('@')[0]}@{folder.name}"


def _gguf_in(path: Path) -> Path | None:
    """Return the GGUF file at this path: the file itself, or all that a folder has of a model."""
    if path.suffix.lower() == ".gguf" and path.is_file():
        return path
    found = [*path.glob("*.gguf")] if path.is_dir() else []
    if not found or any(path.glob("*config.json")) or any(path.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise CheckpointError(
            f"{path} has several GGUF files ({listed([each.name for each in found])}); name one"
        )
    return found[0]


def _why_not(name: str, error: Exception) -> str:
    """Return why a checkpoint could not be downloaded, and what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    match error:
        case LocalEntryNotFoundError() | OfflineModeIsEnabled():
            return (
                f"{name!r} was not downloaded before, and the Hugging Face Hub cannot be reached; "
                "give a checkpoint's folder, connect this machine to the internet, or set HF_HOME "
                "to a folder with downloads"
            )
        case GatedRepoError():
            return (
                f"{name!r} needs its owner's permission; ask for it at "
                f"https://huggingface.co/{name} and set HF_TOKEN"
            )
        case RepositoryNotFoundError():
            return (
                f"the Hugging Face Hub shows no {name!r}; give a checkpoint's folder, its Hub id, "
                f"or one of: {', '.join(NAMES)}, and for a private model set HF_TOKEN"
            )
        case _:
            reason = next(iter(str(error).split("\n")), "").strip()
            return f"{name!r} could not be downloaded ({type(error).__name__}: {reason})"


def read_config(path: Path) -> Config:
    """Read the checkpoint's config.json; under DRAFTER is that of its drafter, if it has one."""
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} has no config.json; give the folder of a checkpoint")
    config = read_json(path / "config.json")
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{path / 'config.json'}: 'architectures' is {shown(names)}; expected a list of names"
        )
    config.pop(DRAFTER, None)
    if (drafter := drafter_of(path)) is not None:
        config[DRAFTER] = read_json(drafter / CONFIG)
    return config


def drafter_of(path: Path) -> Path | None:
    """Return a checkpoint's own adapter for drafts, if it has one."""
    folder = path / DRAFTER
    return folder if (folder / CONFIG).is_file() else None


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object; refuse duplicate keys with different values."""
    try:
        if path.stat().st_size > _LARGEST_JSON:
            raise CheckpointError(
                f"{path} has more than {_LARGEST_JSON >> 20} MiB, too much for JSON"
            )
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_no_twins)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except CheckpointError:
        raise
    except RecursionError as error:
        raise CheckpointError(f"{path} is nested too deeply; download it again") from error
    except ValueError as error:
        reason = reason_of(error)
        raise CheckpointError(f"{path} is not valid JSON ({reason}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    made = dict(pairs)
    if len(made) < len(pairs):
        for name, value in pairs:
            if made[name] != value:
                raise ValueError(f"the key {shown(name)} occurs twice with different values")
    return made


def reason_of(error: Exception) -> str:
    """Return the first line of a parser's message, without content of the file."""
    line = next(iter(str(error).splitlines()), "") or type(error).__name__
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in line[:200])


def listed(names: list[str]) -> str:
    """Return the first five names and a count of the rest."""
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    short = (name if name.isprintable() and len(name) <= 200 else shown(name) for name in names[:5])
    return ", ".join(short) + rest
