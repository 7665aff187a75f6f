"""Windows are placed by arithmetic on a whole batch; here it is done position by position."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffray.components.batch import Batch, Window
from tests.helpers.toy import CPU

SIZE = 4  # of a page


@st.composite
def windows(draw: st.DrawFn) -> list[Window]:
    """Return windows sorted by shape; each has pages of its own, one or two more than it needs."""
    found, page = [], 1
    for number in range(draw(st.integers(1, 6))):
        block = draw(st.sampled_from([0, 3, 8]))
        stop = draw(st.integers(1, 30))
        start = draw(st.integers(0, stop - 1))
        kv_stop = stop if block else draw(st.integers(stop, 40))
        pages = draw(st.permutations(range(page, page + -(-kv_stop // SIZE) + 2)))
        page += len(pages)
        found.append(Window(start, stop, kv_stop, block, torch.tensor(pages), 50 * number))
    return sorted(found, key=lambda window: window.shape)


@settings(deadline=None, max_examples=100)
@given(given_windows=windows())
def test_places_and_keys(given_windows: list[Window]) -> None:
    batch = Batch.pack(given_windows, CPU, SIZE)

    def slot(window: Window, position: int) -> int:
        return int(window.pages_P[position // SIZE]) * SIZE + position % SIZE

    tokens = [(w, p) for w in given_windows for p in range(w.start, w.stop)]
    assert batch.positions_T.tolist() == [p for _, p in tokens]
    assert batch.slots_T.tolist() == [slot(w, p) for w, p in tokens]
    assert batch.cells_T.tolist() == [w.canvas + p for w, p in tokens]

    seen, at = [], 0  # of each token: the slots of the keys that it sees
    for group in batch.windows.groups:
        assert group.start == at
        for row in range(group.windows):
            for query in range(group.queries):
                keys = (
                    batch.slots_T[at + row * group.queries :][: group.queries]
                    if group.keys_BK is None
                    else group.keys_BK[row]
                )
                if group.mask_BQK is not None:
                    keys = keys[group.mask_BQK[row, query]]
                seen.append(sorted(keys.tolist()))
        at += group.windows * group.queries
    expected = []
    for window, position in tokens:
        end = window.kv_stop
        if window.block:
            end = min(end, (position // window.block + 1) * window.block)
        expected.append(sorted(slot(window, key) for key in range(end)))
    assert seen == expected

    paged = batch.windows.paged
    assert paged.first_W.tolist()[-1] == len(tokens)
    for number, window in enumerate(given_windows):
        own = paged.pages_WP[number, : len(window.pages_P)]
        assert own.tolist() == window.pages_P.tolist()
