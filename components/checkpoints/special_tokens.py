"""Finds the mask token and the end tokens in a checkpoint's files."""

from collections.abc import Sequence as Items
from itertools import chain
from pathlib import Path
from typing import Final, Literal

from diffray.components.checkpoints.folder import DRAFTER, CheckpointError, read_json
from diffray.components.models.fields import Config, shown

Kind = Literal["mask", "eos"]
NO_MASK: Final = -1  # the mask token of models that have none

# Most published configs do not name the mask; the tokenizers do: LLaDA2's, LLaDA-MoE's, Fast-dLLM
# v2's and, the last two, SDAR's.
_KNOWN_NAMES: Final[dict[Kind, tuple[str, ...]]] = {
    "mask": ("<|mask|>", "<|mdm_mask|>", "|<MASK>|", "<|MASK|>", "<MASK>"),
    "eos": (),
}


def special_ids(
    path: Path,
    config: Config,
    *,
    mask_token_id: int | None = None,
    eos_token_id: int | Items[int] | None = None,
    masked: bool | None = True,
) -> tuple[int, tuple[int, ...]]:
    """Return the mask id and the end ids; given values take precedence over the files.

    Models that are not `masked` have no mask; where it is None, an adapter may have one.
    """
    masks = _as_ids(mask_token_id, "mask_token_id")
    if masks and masked is False:
        raise CheckpointError(f"mask_token_id is {masks[0]}, but this model has none; leave it out")
    masks = masks or (find_ids(path, config, "mask") if masked else (NO_MASK,))
    ends = _as_ids(eos_token_id, "eos_token_id") or find_ids(path, config, "eos")
    for kind, found in (("mask", masks), ("eos", ends)):
        if not found:
            raise CheckpointError(
                f"neither config.json, generation_config.json nor the tokenizer in {path} names "
                f"the {kind} token; pass {kind}_token_id=..."
            )
    if len(masks) > 1 or masks[0] in ends:
        raise CheckpointError(
            f"there must be one mask token, which is not an end token: mask {masks}, eos {ends}; "
            f"pass mask_token_id=... or eos_token_id=..."
        )
    return masks[0], ends


def find_ids(path: Path, config: Config, kind: Kind) -> tuple[int, ...]:
    """Return the ids of a kind of token from the configs, else from the tokenizer, or nothing.

    The mask is taken from the first config that names it, end tokens from all of them: only
    generation_config.json may name the token that ends a chat model's answers.
    """
    key = f"{kind}_token_id"
    text = config.get("text_config")
    inner = [each for each in (text, config.get(DRAFTER)) if isinstance(each, dict)]
    configs = config, *inner, _read(path, "generation_config.json")
    named = [ids for source in configs if (ids := _as_ids(source.get(key), key))]
    if named:
        return named[0] if kind == "mask" else tuple(dict.fromkeys(chain(*named)))
    tokenizer_config = _read(path, "tokenizer_config.json")
    own = tokenizer_config.get(f"{kind}_token")
    if isinstance(own, dict):
        own = own.get("content")
    names = (own, *_KNOWN_NAMES[kind]) if isinstance(own, str) else _KNOWN_NAMES[kind]
    added = _added_tokens(path, tokenizer_config)
    return next(((added[name],) for name in names if name in added), ())


def _added_tokens(path: Path, tokenizer_config: Config) -> dict[str, int]:
    """Return the ids of the tokens that were added to the vocabulary by name."""
    ids: dict[str, int] = {}
    added = _read(path, "tokenizer.json").get("added_tokens")
    for token in added if isinstance(added, list) else []:
        number = token.get("id") if isinstance(token, dict) else None
        _add(ids, path / "tokenizer.json", "added_tokens", token, number)
    decoder = tokenizer_config.get("added_tokens_decoder")
    for text, token in decoder.items() if isinstance(decoder, dict) else ():
        number = int(text) if text.isdecimal() and len(text) < 10 else None
        _add(ids, path / "tokenizer_config.json", "added_tokens_decoder", token, number)
    return ids


def _add(ids: dict[str, int], file: Path, key: str, token: object, number: object) -> None:
    """Store an added token; refuse an invalid entry."""
    content = token.get("content") if isinstance(token, dict) else None
    if not isinstance(content, str) or type(number) is not int:
        raise CheckpointError(
            f"{file}: {key!r} holds {shown(token)}; expected a token with its content and id"
        )
    ids[content] = number


def _as_ids(value: object, key: str) -> tuple[int, ...]:
    """Return one id or several as a tuple; None gives an empty one."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    if items == [None]:
        return ()
    ids = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if len(ids) < len(items) or any(item < 0 for item in ids):
        raise CheckpointError(f"{key} is {shown(value)}; expected a token id or a list of them")
    return tuple(ids)


def _read(path: Path, name: str) -> dict[str, object]:
    return read_json(path / name) if (path / name).is_file() else {}
