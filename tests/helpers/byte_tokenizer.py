"""A tokenizer with a token for each byte."""

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from diffray.cluster.frontend.text import Tokenizer

MASK = "<|mask|>"


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = FastTokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner)
    fast.add_special_tokens({"mask_token": MASK, "eos_token": "<|end|>"})
    fast.chat_template = "{% for m in messages %}[{{ m['content'] }}]<|end|>{% endfor %}"
    return Tokenizer(fast, int(fast.mask_token_id))


TOKENIZER = byte_tokenizer()
