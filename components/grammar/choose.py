"""Tokens that are chosen together, so that automata accept an answer or the slots of a canvas.

Letters: R rows of the head, N those of a group, G answers or slots, L their positions, C classes.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from diffray.components.grammar.automata import Automata
from diffray.components.grammar.paths import LEFT_OUT, Entry, fill
from diffray.components.logits import Logits
from diffray.components.propose import Chosen, Draws
from diffray.kernels.noise import gumbel


class SlotEnd(NamedTuple):
    """The end token in a slot of a pinned canvas, which marks an unused position."""

    end_id: int
    allowed: bool  # whether the slot is being measured


class Structured(NamedTuple):
    """Rows whose tokens are chosen together, so that automata accept the answers, or slots."""

    automata: Automata
    cells_GL: Tensor  # flat index into [B, L]; here L are the positions of a block or a slot
    entry: Entry
    rows_N: Tensor  # of the head
    places_N: Tensor  # flat index into [G, L]
    draws: Draws | None  # of these rows; None: the best tokens
    end: SlotEnd | None  # of slots
    following_N: Tensor  # the token after each row's slot


def choose_together(chosen: Chosen, group: Structured) -> None:
    """Choose the tokens of a group's rows; outside the answer, keep those chosen before."""
    automata, entry, logits, key = group.automata, group.entry, chosen.logits, None
    ids_GL = chosen.block.ids_BL.flatten()[group.cells_GL]
    sequence_N = group.places_N // ids_GL.shape[1]
    if group.draws is None:
        own, mass_NC = logits.some(group.rows_N), None
        _weigh_ends(own, group)
        score_NC = own.of_classes(automata, sequence_N, drawn=False)
    else:
        key = chosen.key(group.rows_N)
        # In the logits' precision: float64 takes twice as long.
        temperature_Q = group.draws.temperature_Q.to(logits.values_RV)
        draws = group.draws._replace(temperature_Q=temperature_Q)
        own = logits.filtered(*draws, left_out=LEFT_OUT)
        _weigh_ends(own, group)
        # Sums over a block, in which filters leave -1e4 a position: float32 would not be exact.
        mass_NC = own.of_classes(automata, sequence_N, drawn=True).double()
        score_NC = mass_NC + _noise_of_classes(automata, key)
    fixed_GL = (ids_GL != chosen.mask_token_id) & entry.valid_GL
    class_GL = automata.class_AV[automata.automaton_G.unsqueeze(1), ids_GL]

    def spread(values_NC: Tensor) -> Tensor:
        """Write the rows' values at their places; a decided place allows only its token."""
        size = *fixed_GL.shape, values_NC.shape[1]
        found_GLC = values_NC.new_zeros(size).flatten(0, 1).index_copy(0, group.places_N, values_NC)
        classes_C = torch.arange(size[-1], device=values_NC.device)
        own_GLC = class_GL.unsqueeze(-1) == classes_C
        return (
            found_GLC.view(size)
            .masked_fill(fixed_GL.unsqueeze(-1), 0.0)
            .masked_fill(fixed_GL.unsqueeze(-1) & ~own_GLC, -torch.inf)
        )

    mass_GLC = None if mass_NC is None else spread(mass_NC)
    places_N = group.places_N
    class_N = fill(spread(score_NC), mass_GLC, automata, entry).flatten()[places_N]
    if key is None:
        found_N = own.best_in(automata, sequence_N, class_N)
    else:
        found_N = own.draw_in(automata, sequence_N, class_N, key)
    before_N = chosen.ids_R[group.rows_N]
    found_N = torch.where(entry.valid_GL.flatten()[places_N], found_N, before_N)
    found_N = torch.where(fixed_GL.flatten()[places_N], ids_GL.flatten()[places_N], found_N)
    chosen.ids_R = chosen.ids_R.index_copy(0, group.rows_N, found_N)


def _noise_of_classes(automata: Automata, key: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return Gumbel noise for whole classes, from ids beyond the vocabulary.

    The maximum of a class's tokens with noise is distributed like the class's mass with noise, and
    is independent of which token attains it: so classes can be drawn first, then tokens.
    """
    first, device = automata.class_AV.shape[1], automata.class_AV.device
    ids_C = torch.arange(first, first + automata.num_classes, device=device)
    return gumbel(*key, ids_C.unsqueeze(0))


def _weigh_ends(logits: Logits, group: Structured) -> None:
    """Set the logits of the end token in slots, in place.

    A value's end is as probable as the token after the slot is at that position. Unused positions
    after it must not count, wherever the end is: so each end token is worth the difference to the
    next position's.
    """
    if group.end is None:
        return
    end_id, allowed = group.end
    if not allowed:
        logits.put(end_id, torch.full_like(logits.values_RV[:, 0], -torch.inf))
        return
    logits.values_RV.sub_(logits.logsumexp().unsqueeze(1))
    after_N = logits.gather(group.following_N.unsqueeze(1)).squeeze(1).clamp(min=-LEFT_OUT)
    after_GL = after_N.new_zeros(group.cells_GL.shape)
    after_GL.view(-1)[group.places_N] = after_N
    worth_GL = after_GL - torch.nn.functional.pad(after_GL, (0, 1))[:, 1:]
    logits.put(end_id, worth_GL.flatten()[group.places_N])
