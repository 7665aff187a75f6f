"""The messages between the processes of an engine: requests, rounds, replies, and a rank's start.

They are records of plain values, without torch, which msgspec and pickle serialize as they are.
Others are in `limits.py`, `process.py`, `trainer_orders.py`, `cluster/control/events.py` and,
between replicas, `cluster/serve/desired_state.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, Self, TypeVar

from diffray.components.image import Image
from diffray.components.lora import LoRA
from diffray.workers.process import Process
from diffray.workers.stats import Stats
from diffray.workers.trainer_orders import Received, TrainerOrder

if TYPE_CHECKING:
    from diffray.components.params import SamplingParams
    from diffray.workers.engine_options import EngineOptions


class Progress(NamedTuple):
    """The blocks reported in full, and the denoising steps they took."""

    blocks: int
    steps: int


BEGINNING = Progress(0, 0)


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a request stopped on another engine: enough to continue with the same text.

    It resumes at the start of the current block, so a little work is done twice.
    """

    ids: tuple[int, ...] = ()  # all reported tokens
    progress: Progress = BEGINNING
    forwards: int = 0

    @staticmethod
    def after(updates: Iterable["Update"]) -> "Resume":
        """Return the state after all updates of one request, in order; without any, the start."""
        resume = Resume()
        ids: list[int] = []
        for update in updates:
            ids += update.ids
            resume = Resume((), update.progress, update.forwards)
        return Resume(tuple(ids), resume.progress, resume.forwards)


@dataclass(frozen=True, slots=True)
class Request:
    """One choice to generate; end tokens end the text unless `ignore_eos`.

    With a `suffix` the text is written between prompt and suffix. With `watch` the updates contain
    the canvas after every round. With `resume` it continues from another engine. It shares K/V only
    with requests of the same `cache_salt` and `lora`.
    """

    uid: int
    prompt: tuple[int, ...]
    params: "SamplingParams"
    suffix: tuple[int, ...] = ()
    watch: bool = False
    resume: Resume | None = None
    cache_salt: str = ""
    images: tuple[Image, ...] = ()  # whose soft tokens are in the prompt
    grammar: bytes = b""  # an `Automaton` or a `Template` that the answer follows; empty: none
    lora: LoRA | None = None  # the adapter to answer with
    answer: tuple[int, ...] = ()  # what the answer will be, to learn its log-probabilities ...
    places: tuple[int, ...] = ()  # ... and which of its tokens are on the canvas from the start

    def to_wire(self) -> "WireRequest":
        return WireRequest(
            uid=self.uid,
            prompt=self.prompt,
            params=self.params.model_dump(mode="json"),
            suffix=self.suffix,
            watch=self.watch,
            resume=self.resume,
            cache_salt=self.cache_salt,
            images=self.images,
            grammar=self.grammar,
            lora=self.lora,
            answer=self.answer,
            places=self.places,
        )


@dataclass(frozen=True, slots=True)
class WireRequest:
    """A request as it is sent to the ranks, with its parameters as plain values."""

    uid: int
    prompt: tuple[int, ...]
    params: dict[str, Any]
    suffix: tuple[int, ...] = ()
    watch: bool = False
    resume: Resume | None = None
    cache_salt: str = ""
    images: tuple[Image, ...] = ()
    grammar: bytes = b""
    lora: LoRA | None = None
    answer: tuple[int, ...] = ()
    places: tuple[int, ...] = ()

    @property
    def max_tokens(self) -> int:
        return int(self.params["max_tokens"])

    @property
    def restarts(self) -> bool:
        diffusion = self.params.get("diffusion", {})
        iteration = diffusion.get("iteration") or {}
        return bool(iteration.get("kind") == "soft" or diffusion.get("canvas") == "pinned")

    @property
    def content(self) -> int:
        params = {name: value for name, value in self.params.items() if name != "seed"}
        given = self.suffix, self.images, self.grammar, self.lora, self.answer, self.places
        return hash((self.prompt, repr(params), given))

    def resumed(self, resume: Resume | None) -> Self:
        return replace(self, resume=resume)

    def to_request(self) -> Request:
        from diffray.components.params import SamplingParams  # imports torch

        return Request(
            uid=self.uid,
            prompt=self.prompt,
            params=SamplingParams(**self.params),
            suffix=self.suffix,
            watch=self.watch,
            resume=self.resume,
            cache_salt=self.cache_salt,
            images=self.images,
            grammar=self.grammar,
            lora=self.lora,
            answer=self.answer,
            places=self.places,
        )


class Schedulable(Protocol):
    """What the scheduler must know about a request."""

    @property
    def uid(self) -> int: ...

    @property
    def prompt(self) -> tuple[int, ...]: ...

    @property
    def cache_salt(self) -> str: ...

    @property
    def lora(self) -> LoRA | None: ...

    @property
    def resume(self) -> Resume | None: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def restarts(self) -> bool:
        """Whether a resumed request starts over, as soft generations do."""
        ...

    @property
    def content(self) -> int:
        """A checksum of the request without its uid and seed."""
        ...

    def resumed(self, resume: Resume | None) -> Self:
        """Return the same request, to run from this state or, if None, from its start."""
        ...


R = TypeVar("R", bound=Schedulable)


class Footprint(NamedTuple):
    """The K/V pages a request takes."""

    pages: int  # that its first block needs
    most: int = 0  # that its last block needs
    block: int = 0  # block length if it may share a prefix; 0 if not
    step: int = 1  # the tokens after which it needs more


@dataclass(slots=True)
class Update:
    """What a round added to a request: the new final tokens, without gaps from the left."""

    uid: int
    ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None  # stop | length
    stop_id: int | None = None  # the end token, once found: the last of all ids
    forwards: int = 0  # so far
    progress: Progress = BEGINNING  # what `Resume` needs
    # For each token the most probable ids when it became final; empty unless requested.
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    canvas: list[int | None] | None = None  # with `watch`: the generated part; None: masked
    drafts: int = 0  # of the canvas's tokens: the last ones, which are not verified
    cached_tokens: int = 0  # prompt tokens read from shared pages
    approximate: bool = False  # whether their K/V were computed on another canvas
    # Seconds since its admission, in the first update after it; set by the queue.
    ran: float | None = None
    # Of a pinned canvas: each field's probability, and those of a choice's options.
    fields: dict[str, tuple[float, dict[str, float]]] = field(default_factory=dict)
    version: str = ""  # of the weights that made it; set by the queue

    def extend(self, later: "Update") -> None:
        """Append a later update: tokens add up, the rest is replaced."""
        self.ids += later.ids
        self.steps += later.steps
        self.logprobs += later.logprobs
        self.top_logprobs += later.top_logprobs
        self.finish_reason, self.stop_id = later.finish_reason, later.stop_id
        self.forwards, self.progress = later.forwards, later.progress
        self.canvas, self.drafts = later.canvas, later.drafts
        self.cached_tokens = later.cached_tokens
        self.approximate = self.approximate or later.approximate
        self.fields, self.version = later.fields, later.version


class ControlAddress(NamedTuple):
    """Where ranks connect to the coordinator, and the secret that lets them in."""

    host: str
    port: int
    secret: bytes


class RankPlace(NamedTuple):
    """Where a rank runs; on rank 0 of several `port` is where the others join its mesh."""

    process: Process
    host: str
    port: int = 0


@dataclass(frozen=True, slots=True)
class RankSetup:
    """How a rank joins the mesh and loads its shard."""

    model: str
    options: "EngineOptions"
    expert_parallel: bool
    collective_timeout_s: float
    load_timeout_s: float


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first message."""

    rank: int
    secret: bytes


AWAKE, WITHOUT_KV, WITHOUT_WEIGHTS = 0, 1, 2  # levels of sleep, with vLLM's numbers
ASLEEP = "the model is asleep; wake it up first (wake_up)"


@dataclass(frozen=True, slots=True)
class Change:
    """New weights for a running engine, or a `level` of sleep (0: awake); no request may run then.

    `number` counts the changes; `source` is a folder or Hub id, or empty if the tensors are in the
    engine's process. A change that `restores` brings new ranks to the current weights and level; it
    must not be refused, as the engine would be of no use.
    """

    number: int = 0
    version: str = "0"
    source: str = ""
    restores: bool = False
    level: int | None = None  # None: new weights


@dataclass(slots=True)
class Round(Generic[R]):
    """What an engine does next: the same on all ranks."""

    number: int
    cancel: list[int]
    add: list[R]
    steps: int  # of denoising, at most
    check: bool = False  # whether the ranks compare their canvases
    fresh: bool = False  # whether no round was in flight before it
    now: float = 0.0  # seconds on the scheduler's clock
    change: Change | None = None  # after `cancel` and before `add`
    trainer: TrainerOrder | None = None  # to carry out instead of everything else


@dataclass(slots=True)
class Reply:
    """Rank 0's answer to a round."""

    number: int
    steps: int
    updates: list[Update]
    refused: list[tuple[int, str]]  # uids and reasons
    stats: Stats
    worked: float = 0.0  # seconds that rank 0 has spent in rounds
    waited: float = 0.0  # seconds between rounds while there was work
    unchanged: str = ""  # why the round's change was refused; empty: it was made
    received: Received | None = None  # the outcome of the round's trainer order
