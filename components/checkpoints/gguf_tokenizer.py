"""The tokenizer in a GGUF file's header, as Hugging Face's files; without torch."""

import json
from pathlib import Path
from typing import Any, Final

from diffray.components.checkpoints.folder import CheckpointError
from diffray.components.models.fields import shown

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = [rf"{_ENDINGS}|\p{{N}}{{1,3}}|{_SIGNS}"]
_BAILING: Final = [
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
]
_DIGITS: Final = [r"\p{N}", _GPT2]
# By llama.cpp's name: the patterns that split a text one after the other, before the merges.
_SPLITS: Final = {
    "default": [r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"],
    "gpt-2": [_GPT2],
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": [rf"{_ENDINGS}|\p{{N}}|{_SIGNS}"],
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
    "llada-moe": _BAILING,
}
_CONTROL, _GIVEN = 3, 4  # types of tokens: special ones, and others that are never split
_ROLES: Final = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
    "mask": "mask_token_id",
}


def tokenizer_files(path: Path, fields: dict[str, Any]) -> dict[str, str]:
    """Return the files of the tokenizer; only the ids of the end tokens if there is none."""
    own = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    ends = [own[key] for key in ("eos_token_id", "eot_token_id") if key in own]
    files = {"generation_config.json": json.dumps({"eos_token_id": ends or None})}
    model = own.get("model")
    if model in ("none", "no_vocab"):
        return files
    if model != "gpt2":
        raise CheckpointError(
            f"{path} has a tokenizer of the model {shown(model)}; supported is gpt2, byte-level "
            "BPE: use the original checkpoint"
        )
    tokens = _items(path, own, "tokens", str)
    roles = {role: own[key] for role, key in _ROLES.items() if key in own}
    if any(type(token) is not int or not 0 <= token < len(tokens) for token in roles.values()):
        raise CheckpointError(f"{path}: {shown(roles)} are not all tokens; download it again")
    template = fields.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise CheckpointError(f"{path}: tokenizer.chat_template is no text; download it again")
    named = {f"{role}_token": tokens[token] for role, token in roles.items()}
    about = named | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    files["tokenizer_config.json"] = json.dumps(about)
    return files | {"tokenizer.json": _tokenizer(path, own, tokens, named)}


def _tokenizer(path: Path, own: dict[str, Any], tokens: list[str], named: dict[str, str]) -> str:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as pre
    from tokenizers.processors import TemplateProcessing

    kind = own.get("pre", "default")
    if not isinstance(kind, str) or kind not in _SPLITS:
        raise CheckpointError(
            f"{path} names the pre-tokenizer {shown(kind)}; supported are {', '.join(_SPLITS)}: "
            "use the original checkpoint"
        )
    vocab = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in _items(path, own, "merges", str)]
    fit = all(len(m) == 2 and {*m, "".join(m)} <= vocab.keys() for m in merges)
    types = _items(path, own, "token_type", int)
    if len(vocab) < len(tokens) or len(types) != len(tokens) or not fit:
        raise CheckpointError(
            f"{path}: its tokens, their types and merges do not fit together; download it again"
        )
    is_llama3 = _SPLITS[kind] is _LLAMA3
    made = Tokenizer(models.BPE(vocab, merges, ignore_merges=is_llama3))
    if kind == "qwen2":
        made.normalizer = normalizers.NFC()
    splits = [pre.Split(Regex(pattern), "isolated") for pattern in _SPLITS[kind]]
    made.pre_tokenizer = pre.Sequence(
        [*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    made.decoder = decoders.ByteLevel()
    before, after = (
        [named[f"{role}_token"]]
        if own.get(f"add_{role}_token", is_default) and f"{role}_token" in named
        else []
        for role, is_default in (("bos", is_llama3), ("eos", False))
    )
    if before or after:
        made.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, vocab[token]) for token in {*before, *after}],
        )
    of = zip(tokens, types, strict=True)
    added = [(token, each) for token, each in of if each in (_CONTROL, _GIVEN)]
    made.add_tokens(
        [AddedToken(t, special=each == _CONTROL, normalized=False) for t, each in added]
    )
    return str(made.to_str())


def _items(path: Path, own: dict[str, Any], key: str, kind: type) -> list[Any]:
    found = own.get(key)
    if not isinstance(found, list) or not all(type(each) is kind for each in found):
        raise CheckpointError(f"{path} lacks a list tokenizer.ggml.{key}; download it again")
    return found
