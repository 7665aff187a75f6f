"""The checksum by which ranks find that they have drifted apart."""

import torch

from diffray.kernels.checksum import checksum


def test_any_change_of_any_part_shows() -> None:
    ids = torch.arange(600).view(3, 200)
    masked = ids % 7 == 0
    same = checksum(ids, masked)
    assert torch.equal(checksum(ids.clone(), masked.clone()), same)
    others = []
    for place in ((0, 0), (1, 77), (2, 199)):
        for part in (ids, masked):
            changed = part.clone()
            changed[place] = ~changed[place]
            others.append((changed, masked) if part is ids else (ids, changed))
    swapped = ids.clone()
    swapped[0, :2] = ids[0, :2].flip(0)
    others += [(swapped, masked), (ids + 1, masked), (masked.long(), ids)]
    found = [int(checksum(*parts)) for parts in others]
    assert int(same) not in found
    assert len(set(found)) == len(found)
