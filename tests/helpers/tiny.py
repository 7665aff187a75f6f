"""A tiny checkpoint with a tokenizer: a golden model's random weights, and byte-level tokens."""

import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.helpers.paths import GOLDEN

MASK_ID, EOS_ID = 510, 511
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}"
    "{% endfor %}assistant:"
)


def tiny_checkpoint(folder: Path, family: str = "llada", chat_template: str | None = None) -> str:
    """Write the checkpoint and return its path; a byte is a token, the rest are made-up words."""
    shutil.copytree(GOLDEN / family, folder, ignore=shutil.ignore_patterns("golden.json"))
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [f"word{number}" for number in range(len(tokens), MASK_ID)]
    vocab = {token: number for number, token in enumerate([*tokens, "<|mask|>", "<|end|>"])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        mask_token="<|mask|>",
        eos_token="<|end|>",
        chat_template=chat_template,
    )
    fast.save_pretrained(folder)
    return str(folder)
