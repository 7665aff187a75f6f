"""The windows of one forward and their keys, in the two forms that attention reads.

Letters: W windows, P pages of a window, B windows of one group, Q queries of a window, K keys.
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Group(NamedTuple):
    """Neighbouring windows of equal shape, from packed query `start` on."""

    start: int
    windows: int
    queries: int
    keys_BK: Tensor | None  # pool slots of the keys; None where the window itself holds every key
    mask_BQK: Tensor | None  # True where a query sees a key; None if it sees all keys
    # The index of each of the group's tokens in its flattened keys; for padding, one past the end.
    own_places: Tensor


class PagedWindows(NamedTuple):
    """Packed windows and where their keys are, as int32 tensors on the device, and two bounds.

    Window w holds the packed queries [first[w], first[w + 1]), at positions from start[w] on. A
    query sees the keys [0, kv_stop[w]); if block[w] is not 0, only up to the end of its own block
    of that length. A window without queries is padding. If pages are quantized, the keys at
    [open[w], stop[w]) are read unrounded, from the window's own tokens.
    """

    first_W: Tensor  # one entry more than there are windows
    start_W: Tensor
    kv_stop_W: Tensor
    block_W: Tensor
    open_W: Tensor
    stop_W: Tensor
    pages_WP: Tensor  # position n is in slot pages[w, n // page_size] * page_size + n % page_size
    page_size: int
    max_queries: int  # the maximum over windows


class Windows(Protocol):
    """The same windows for torch, which gathers each group's keys, and for Triton, which does not.

    Each form is built on demand.
    """

    def __hash__(self) -> int: ...

    @property
    def groups(self) -> tuple[Group, ...]: ...

    def near(self, reach: int) -> tuple[Group, ...]:
        """Return the groups of a layer in which a query sees at most `reach` keys back.

        The reach starts at the query's block, or at its window if that is not block-causal, so all
        queries of a block see equally far back.
        """
        ...

    @property
    def open_T(self) -> Tensor | None:
        """Which tokens this forward reads as they are; None: all of them.

        It reads the others as pages store them, which differs if pages are quantized.
        """
        ...

    @property
    def paged(self) -> PagedWindows: ...
