"""The demo models' tokenizer: byte-level BPE in which every integer from 0 to 199 is one token.

Letters are merged first, and a space joins the first piece of its word last, so a word has the same
pieces with and without a space. A word that is copied into JSON loses its space; with other pieces
it would have to be spelt anew.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.train_demo.tasks import GENERATORS, draw
from examples.train_demo.vocabulary import SPACED

MASK, EOS = "<|mask|>", "<|endoftext|>"
SPECIAL = (
    EOS, MASK, "<|role_end|>", "<role>SYSTEM</role>", "<role>HUMAN</role>", "<role>ASSISTANT</role>"
)  # fmt: skip
# Its lines are joined: they are broken for the reader.
CHAT_TEMPLATE = "".join(
    Path(__file__).with_name("chat_template.jinja").read_text("utf-8").splitlines()
)
# A number up to 199 is one piece, larger ones are several; both include the space before them.
PIECES = r" ?1\d\d| ?\d\d?| ?[A-Za-z]+|\s+| ?[^\sA-Za-z\d]+"
NUMBERS = 200
MERGES = 900  # of letters and signs, without spaces before them


def build_tokenizer(seed: int = 0, sample: int = 30000) -> PreTrainedTokenizerFast:
    """Train the merges on generated text; add numbers as whole tokens, without merges."""
    rng = random.Random(seed)
    names = list(GENERATORS)
    items = [draw(rng, names[i % len(names)]) for i in range(sample)]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = Tokenizer(models.BPE())
    letters.pre_tokenizer = _pieces(PIECES.replace(" ?", ""))
    trainer = trainers.BpeTrainer(
        vocab_size=len(alphabet) + MERGES, initial_alphabet=alphabet, show_progress=False
    )
    digitless = str.maketrans("", "", "0123456789")
    texts = (f"{item.question}\n{item.answer}".translate(digitless) for item in items)
    letters.train_from_iterator(texts, trainer)
    return _with_spaces_and_numbers(letters)


def _pieces(regex: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(regex), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip


def _with_spaces_and_numbers(letters: Tokenizer) -> PreTrainedTokenizerFast:
    model = json.loads(letters.to_str())["model"]
    vocab: dict[str, int] = model["vocab"]
    merges = [tuple(pair) for pair in model["merges"]]
    for piece in sorted(vocab, key=vocab.__getitem__):
        if piece.isascii() and piece.isalpha():  # signs are apart from spaces
            vocab[SPACED + piece] = len(vocab)
            merges.append((SPACED, piece))
    for number in range(NUMBERS):
        for text in (str(number), SPACED + str(number)):
            vocab.setdefault(text, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    tokenizer.pre_tokenizer = _pieces(PIECES)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        pad_token=EOS,
        mask_token=MASK,
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def load_tokenizer(folder: Path, seed: int = 0) -> PreTrainedTokenizerFast:
    """Return the tokenizer in the folder, after building it if there is none."""
    if not folder.exists():
        build_tokenizer(seed).save_pretrained(folder)
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder)
    return tokenizer
