"""Answers a file of requests in OpenAI's batch format, and writes one line per answer.

Answers are written as they arrive, so an interrupted batch loses only the requests in flight; the
next run continues with the lines that have no answer yet.
"""

import asyncio
import json
import logging
import sys
from collections.abc import Iterator, Set
from contextlib import AbstractAsyncContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TextIO

from tqdm import tqdm

from diffray.cluster.api.batch_lines import (
    TRIES,
    Answer,
    Done,
    Line,
    Reply,
    answer_lines,
    check_lines,
    read_lines,
)
from diffray.components.config import counted

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0
SHOWN_MISTAKES = 5


def repair(target: Path) -> dict[str, bool]:
    """Return whether each id in `target` was answered; cut off an incomplete last line."""
    if not target.exists():
        return {}
    ids = {}
    with target.open("rb+") as file:
        finished = 0  # bytes
        for number, text in enumerate(file, start=1):
            if not text.endswith(b"\n"):
                log.warning("%s: the last line is incomplete and is replaced", target)
                file.truncate(finished)
                break
            finished += len(text)
            try:
                line = json.loads(text)
                ids[str(line["custom_id"])] = (line.get("response") or {}).get("status_code") == 200
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ValueError(
                    f"{target}, line {number} is not an answer of a batch; give another output"
                ) from None
    return ids


@dataclass(slots=True)
class Summary:
    """The counts of a batch."""

    requests: int
    before: int = 0  # done in an earlier run
    failed_before: int = 0  # those of `before` that failed
    answered: int = 0
    failed: int = 0
    tokens: int = 0  # generated, from the answers' usage
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def left(self) -> int:
        return self.requests - self.before - self.answered - self.failed

    def count(self, reply: Reply | None) -> None:
        """Count a finished request; `reply` is None if it got no answer."""
        if reply is None or reply.status_code != 200:
            self.failed += 1
            return
        self.answered += 1
        match reply.body:
            case {"usage": {"completion_tokens": int(tokens)}}:
                self.tokens += tokens

    def __str__(self) -> str:
        text = (
            f"{counted(self.requests, 'request')}: {self.answered} answered, {self.failed} failed"
        )
        if self.before:
            text += f", {self.before} done before"
        if self.left:
            text += f", {self.left} left (run again to continue)"
        rate = self.tokens / max(self.seconds, 1e-9)
        return (
            text + f"; {counted(self.tokens, 'token')}, {rate:.1f} tokens/s ({self.seconds:.1f} s)"
        )


class Progress:
    """Shows a batch's progress: a bar on a terminal, else a line every `log_seconds`."""

    def __init__(
        self, summary: Summary, file: TextIO | None = None, log_seconds: float = LOG_SECONDS
    ) -> None:
        self._summary, self._file = summary, file or sys.stderr
        self._log_seconds, self._logged = log_seconds, monotonic()
        self._bar = tqdm(
            total=summary.requests,
            initial=summary.before,
            unit="request",
            file=self._file,
            leave=False,
            disable=None,  # tqdm disables the bar if this is no terminal
        )

    def close(self) -> None:
        self._bar.close()

    def count(self, reply: Reply | None) -> None:
        """Count a finished request, as the summary does, and show that it is done."""
        self._summary.count(reply)
        failed, done = self._summary.failed, self._summary.requests - self._summary.left
        if failed:
            self._bar.set_postfix(failed=failed, refresh=False)
        self._bar.update()
        if self._bar.disable and monotonic() - self._logged >= self._log_seconds:
            self._logged = monotonic()
            text = f"{done} of {self._summary.requests} done, {failed} failed"
            print(text, file=self._file, flush=True)


def run_batch(
    source: Path,
    target: Path,
    backend: AbstractAsyncContextManager[Answer],
    *,
    concurrency: int = 64,
    tries: int = TRIES,
) -> Summary:
    """Answer every line of `source` that has no line in `target` yet; append to `target`.

    Nothing is sent if a line of `source` is invalid. Ctrl-C ends the batch and keeps the answers.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1 (given: {concurrency})")
    if not source.is_file():
        raise ValueError(f"no such file: {source}; give one with a request per line")
    if target.exists() and target.samefile(source):
        raise ValueError(f"{target} is the input; give another file for the answers")
    ids = _ids(source)
    done = repair(target)
    before = [done[name] for name in ids & done.keys()]
    summary = Summary(len(ids), before=len(before), failed_before=before.count(False))
    if summary.left == 0:
        return summary
    waiting = (line for line in read_lines(source) if line.custom_id not in done)

    try:
        concurrency = min(concurrency, summary.left)
        asyncio.run(_run(waiting, target, backend, summary, concurrency, tries))
    except KeyboardInterrupt:
        summary.interrupted = True
    return summary


async def _run(
    lines: Iterator[Line],
    target: Path,
    backend: AbstractAsyncContextManager[Answer],
    summary: Summary,
    concurrency: int,
    tries: int,
) -> None:
    with closing(Progress(summary)) as progress:
        async with backend as answer:
            begin = monotonic()  # with the model loaded
            try:
                with appended(target, progress) as done:
                    await answer_lines(lines, answer, done, concurrency, tries)
            finally:
                summary.seconds = monotonic() - begin


@contextmanager
def appended(target: Path, progress: Progress) -> Iterator[Done]:
    """Write each answer when it arrives, and count it."""
    with target.open("a") as out:

        def done(line: str, reply: Reply | None) -> None:
            out.write(line + "\n")
            out.flush()
            progress.count(reply)

        yield done


def _ids(source: Path) -> Set[str]:
    """Return the ids of all requests; raise if any line is invalid."""
    ids, mistakes = check_lines(source)
    if mistakes:
        shown = [str(each) for each in mistakes[:SHOWN_MISTAKES]]
        if more := len(mistakes) - len(shown):
            shown.append(f"and {more} more")
        raise ValueError(f"{source}: {'; '.join(shown)}")
    return ids
