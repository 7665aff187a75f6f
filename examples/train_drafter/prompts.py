"""Prompts for answers to learn from: documentation of the standard library, and everyday topics."""

import importlib
import inspect
import json
import random
from collections.abc import Iterable
from pathlib import Path

from diffray.cluster.cli.datasets import read_rows

_MODULES = (
    "os os.path json re math random itertools functools collections pathlib shutil subprocess "
    "threading datetime statistics string textwrap csv sqlite3 socket urllib.parse http.client "
    "logging argparse tempfile glob fnmatch zipfile tarfile hashlib hmac secrets time calendar "
    "heapq bisect copy pprint enum types operator contextlib abc io struct codecs unicodedata "
    "difflib decimal fractions numbers cmath asyncio queue select html xml.etree.ElementTree "
    "configparser uuid ast dis traceback weakref gc sys platform signal mmap locale pickle bz2 lzma"
).split()
_ABOUT_CODE = (
    "What does `{name}` do in Python?",
    "Explain this documentation in simple words:\n\n{text}",
    "Give a short example of how to use `{name}` in Python.",
    "Summarize the following text in one sentence.\n\n{text}",
    "Write a Python function that uses `{name}`, and explain it.",
)
_TOPICS = {  # each question with each of the words
    (
        "Write a short story about {}.",
        "Write a poem about {}.",
        "Describe {} in three sentences.",
        "Give me five facts about {}.",
    ): "a cat,a dog,a robot,a dragon,the moon,a river,a small town,a lighthouse,winter,the ocean,"
    "a bakery,a train,a garden,a teacher,a spaceship,a library,an old clock,a storm,a mountain",
    (
        "Explain {} to a child.",
        "What is {}?",
        "Why is {} important?",
        "How does {} work?",
        "Give a short summary of {}.",
        "List the main points about {}.",
    ): "photosynthesis,gravity,the water cycle,democracy,inflation,the Roman Empire,DNA,vaccines,"
    "electricity,volcanoes,the internet,machine learning,a hash table,recursion,climate change,"
    "the heart,evolution,the stock market,sleep,antibiotics,magnets,rainbows,the solar system",
    (
        "What is the capital of {}?",
        "Tell me about {}.",
        "What food is {} known for?",
        "Plan a weekend trip to {}.",
    ): "France,Japan,Brazil,Egypt,Canada,India,Italy,Kenya,Norway,Mexico,Spain,Thailand,Greece",
    (
        "How do I {}?",
        "Give me tips to {}.",
        "Write an email to a colleague about how to {}.",
    ): "learn Python,cook rice,sleep better,save money,write a resume,start running,grow tomatoes,"
    "learn a language,prepare for an exam,fix a flat tire,give a presentation,reduce stress",
}


def prompts(files: Iterable[Path] = (), documents: int = 900) -> list[str]:
    """Return all prompts in an order that is always the same."""
    rng, found = random.Random(7), []
    for file in files:
        for line in file.read_text().splitlines():
            item = json.loads(line)
            found.append(str(item.get("question") or item["prompt"]))
    known = _documentation()
    rng.shuffle(known)
    for number, (name, text) in enumerate(known[:documents]):
        found.append(_ABOUT_CODE[number % len(_ABOUT_CODE)].format(name=name, text=text))
    for questions, words in _TOPICS.items():
        found += [each.format(word) for word in words.split(",") for each in questions]
    found = [*dict.fromkeys(found)]  # modules share functions
    rng.shuffle(found)
    tested = {row.prompt for row in read_rows("chat", None, None)}  # the prompts of benchmarks
    return [each for each in found if each not in tested]


def _documentation() -> list[tuple[str, str]]:
    """Return the public functions and classes of the modules, with their documentation."""
    found = []
    for name in _MODULES:
        members = vars(importlib.import_module(name))
        for member, value in sorted(members.items()):
            if not member.startswith("_") and callable(value):
                text = inspect.getdoc(value) or ""
                if len(text) > 60:
                    found.append((f"{name}.{member}", text[:500]))
    return found
