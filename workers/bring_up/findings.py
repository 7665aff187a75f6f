"""What bring-up found out about the kernels on a GPU, and the file that stores it."""

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import IO, Final

import torch
from pydantic import Field, ValidationError

from diffray.components.config import Config
from diffray.kernels.trial import Outcome, Selection, choices_of
from diffray.kernels.variants import Choices
from diffray.workers.engine_options import EngineOptions

_NAMES: Final = {"fastest": "fastest", "early": "earliest", "defaults": "default"}
_LOOK_S = 0.2  # between looks at a lock that another process holds


@dataclass(frozen=True, slots=True)
class GraphsOutcome:
    """The outcome of recording steps as CUDA graphs; the seconds are those of all steps."""

    refused: str = ""  # why not; empty if graphs may be used
    launched_s: float | None = None
    replayed_s: float | None = None


@dataclass(frozen=True, slots=True)
class SumsOutcome:
    """The largest size of tensors that the ranks sum in one shot."""

    most_bytes: int = 0
    refused: str = ""  # why no size is
    dtype: str = ""
    one_shot_s: float | None = None  # seconds at the largest size, on rank 0
    group_s: float | None = None  # the same for the group's all-reduce


class Findings(Config):
    """The outcomes of one bring-up."""

    key: dict[str, str] = Field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    selection: Selection = "fastest"  # which variants are used
    conflicts: dict[Selection, str] = Field(default_factory=dict)  # why these fail together
    graphs: GraphsOutcome | None = None  # None: they were not tried
    sums: SumsOutcome | None = None  # None: the ranks tried nothing together
    untried: int = 0  # variants for which there was no time
    cut_off: bool = False  # whether the next start should continue from here
    seconds: float = 0.0
    failed: str = ""  # why only torch's kernels can be used

    @property
    def choices(self) -> Choices:
        return choices_of(self.outcomes, self.selection)

    def recordable_by(self, ranks: int) -> bool:
        """Whether steps are recorded by default: on several ranks only if all of them tried it."""
        refused = self.failed or (self.graphs is not None and self.graphs.refused)
        return not refused and (ranks == 1 or (self.graphs is not None and self.sums is not None))

    def applied_to(self, setup: EngineOptions, ranks: int = 1) -> EngineOptions:
        """Return the options without what was refused as a whole."""
        obstacle = self.failed or (self.graphs.refused if self.graphs is not None else "")
        if not obstacle:
            if setup.cuda_graphs is None and not self.recordable_by(ranks):
                return setup.model_copy(update={"cuda_graphs": False})
            return setup
        if setup.cuda_graphs:
            raise ValueError(f"cuda_graphs cannot be used on this GPU: {obstacle}; leave it out")
        kernels = "torch" if self.failed else setup.kernels
        return setup.model_copy(update={"kernels": kernels, "cuda_graphs": False})

    def lines(self) -> Iterator[str]:
        """Yield a line for each kernel, selection or feature that will not be used."""
        if self.failed:
            yield f"kernels: only torch's are used: {self.failed}"
            return
        for selection, why in self.conflicts.items():
            names = f"the {_NAMES[selection]} variants"
            yield f"kernels: {names} are not used: they fail together: {why}"
        for each in self.outcomes:
            if each.refused:
                where = f"{each.kernel} {each.variant!r}", "x".join(map(str, each.shape.sizes))
                yield f"kernels: {' is refused at '.join(where)}: {each.refused}"
        if self.graphs is not None and self.graphs.refused:
            yield f"cuda_graphs: off: {self.graphs.refused}"
        if self.untried:
            then = "the next start continues" if self.cut_off else "they are skipped"
            yield f"kernels: there was no time for {self.untried} more trials; {then}"

    @property
    def short_of_memory(self) -> bool:
        """Whether a variant was refused because the GPU ran out of memory."""
        name = torch.OutOfMemoryError.__name__
        return any(name in each.refused for each in self.outcomes)

    def summary(self) -> str:
        """Return one sentence that counts the trials."""
        used, refused = len(self.choices.chosen), sum(bool(each.refused) for each in self.outcomes)
        slower = len(self.outcomes) - refused - used
        return (
            f"kernels: {len(self.outcomes)} trials in {self.seconds:.0f} s: {used} fastest, "
            f"{slower} slower, {refused} refused"
        )


class FindingsFile:
    """Where the findings for one key are kept."""

    def __init__(self, key: dict[str, str], folder: Path | None = None) -> None:
        digest = sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
        name = re.sub(r"[^a-z0-9]+", "-", key.get("gpu", "").lower()).strip("-")
        self.key = key
        self.path = (folder or cache_folder()) / f"{name}-{digest}.json"

    def read(self) -> Findings | None:
        """Return the findings for this key; None if there are none or they cannot be read."""
        try:
            found = Findings.model_validate_json(self.path.read_bytes())
        except (OSError, ValidationError, ValueError):
            return None
        return found if found.key == self.key else None

    def write(self, found: Findings) -> None:
        """Write the file atomically, because other processes may be reading it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.name)
        try:
            with os.fdopen(number, "w") as file:
                file.write(found.model_dump_json(indent=1) + "\n")
            os.replace(name, self.path)
        except OSError:
            os.unlink(name)
            raise

    def remove(self) -> None:
        """Remove the file, so that the next start tries again."""
        with suppress(OSError):
            self.path.unlink()

    @contextmanager
    def lock(self, patience_s: float) -> Iterator[None]:
        """Wait while another process tries the same, then make others wait.

        If the folder is not writable, or the wait takes too long, each process tries by itself.
        """
        with ExitStack() as held:
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _take(held.enter_context(self.path.with_suffix(".lock").open("w")), patience_s)
            yield


def _take(file: IO[str], patience_s: float) -> None:
    """Lock a file; raise BlockingIOError if another process holds it for longer than this."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_LOOK_S)


def cache_folder() -> Path:
    """Return the folder for findings in the user's cache."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home, as in some containers
        cache = Path(tempfile.gettempdir()) / f"cache-of-{os.getuid()}"
    return cache / "diffray/kernels"
