"""The number of threads follows the load of the machine."""

from collections.abc import Callable, Iterator

import pytest
import torch

from diffray import DiffusionLLM, SamplingParams
from diffray.workers.threads import Threads
from tests.helpers.paths import GOLDEN

MOST = 8
Speed = Callable[[int], float]  # seconds of a forward, by the number of threads


def idle(threads: int) -> float:
    return 0.2 + 1 / threads


def slow(threads: int) -> float:
    return 2 * idle(threads)


def busy(threads: int) -> float:
    return 3.0 * threads


def small(threads: int) -> float:
    """Two threads are best: more wait for each other."""
    return 1 / threads + threads / 4


class Machine:
    """A machine on which forwards take what `speed` says, and the threads that each ran with."""

    def __init__(self, start: int, speed: Speed) -> None:
        self.now, self.speed = 0.0, speed
        self.threads = Threads(start, MOST, overhead=10, clock=lambda: self.now)

    def run(self, forwards: int, positions: int = 32) -> list[int]:
        used = []
        for _ in range(forwards):
            with self.threads.forward(positions):
                used.append(torch.get_num_threads())
                self.now += self.speed(used[-1])
        return used


@pytest.fixture(autouse=True)
def threads_of_torch() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(MOST)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("start", [1, 4, 8])
@pytest.mark.parametrize(("speed", "best"), [(idle, 8), (busy, 1), (small, 2)])
def test_it_finds_the_fastest_number_and_hardly_leaves_it(
    start: int, speed: Speed, best: int
) -> None:
    machine = Machine(start, speed)
    assert machine.run(1) == [start]
    machine.run(100)
    used = machine.run(5000)
    assert used.count(best) > 0.98 * len(used)
    for pace in machine.threads.paces.values():  # which keep no times of trials that have ended
        assert len(pace.tried) + len(pace.kept) < 20
    assert torch.get_num_threads() == MOST


def test_it_follows_the_load_soon() -> None:
    machine = Machine(1, idle)
    machine.run(5000)
    for speed, best in ((busy, 1), (idle, 8), (busy, 1)):
        machine.speed = speed
        assert machine.run(200)[-1] == best


def test_noise_of_a_few_percent_moves_nothing() -> None:
    machine = Machine(2, idle)
    noise = iter(range(10**6))
    machine.speed = lambda threads: 1 + 0.04 * (next(noise) * 7 % 11) / 11
    used = machine.run(5000)
    assert used.count(2) > 0.98 * len(used)


def test_phases_of_other_work_cost_little() -> None:
    """Forwards of one size may take twice as long for a while, whatever their threads."""
    machine = Machine(1, idle)
    machine.run(1000)
    used = []
    for phase in range(200):
        machine.speed = slow if phase % 2 else idle
        used += machine.run(12)
    assert used.count(MOST) > 0.8 * len(used)


def test_sizes_differ_and_a_new_one_begins_like_the_nearest() -> None:
    machine = Machine(1, idle)
    machine.run(100, positions=512)
    machine.speed = busy
    machine.run(100, positions=8)
    assert machine.run(1, positions=400) == [8]
    assert machine.run(1, positions=2000) == [8]
    assert machine.run(1, positions=16) == [1]


def test_a_forward_that_fails_gives_the_threads_back() -> None:
    machine = Machine(1, idle)
    with pytest.raises(KeyboardInterrupt), machine.threads.forward(32):
        raise KeyboardInterrupt
    assert torch.get_num_threads() == MOST


@pytest.mark.slow
def test_an_engine_tries_numbers_and_finds_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model begins with one thread; a trial shows that others have been used."""
    monkeypatch.setattr("diffray.components.backend.usable_cores", lambda: 3)
    found = []
    for fixed in (1, None):
        torch.set_num_threads(3)  # a number that is given stays
        with DiffusionLLM(
            str(GOLDEN / "llada"), dtype="float32", mask_token_id=510, eos_token_id=511,
            cpu_threads=fixed,
        ) as llm:  # fmt: skip
            params = SamplingParams(max_tokens=96, ignore_eos=True)
            found.append(llm.generate([[5 + i, 9] for i in range(4)], params, use_tqdm=False))
            threads = llm.engine.threads
            assert (threads is None) == (fixed == 1)
            if threads is not None:
                paces = threads.paces.values()
                assert threads.most == 3 and any(pace.tried or pace.usual for pace in paces)
    ours, theirs = ([o.outputs[0].token_ids for o in outputs] for outputs in found)
    assert ours == theirs
