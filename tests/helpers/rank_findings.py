"""What two ranks do in tests/workers/test_bring_up.py: rank 0 alone knows what is refused."""

from pathlib import Path

from diffray import SamplingParams
from diffray.components.mesh import Mesh
from diffray.kernels.triton import table
from diffray.workers.bring_up.findings import Findings
from diffray.workers.bring_up.start import from_rank_0
from diffray.workers.engine_options import EngineOptions
from diffray.workers.messages import Request
from diffray.workers.setup import build_rank
from tests.helpers import stand_in_kernels
from tests.helpers.toy import run

BROKEN = "rms_norm", "linear_add_norm", "softmax_router", "experts_add_norm", "confidence"
FOUND = Findings(refused=dict.fromkeys(BROKEN, "wrong"))


def tokens_with_rank_0s_findings(mesh: Mesh, folder: Path) -> tuple[Findings, list[int], list[int]]:
    """Return the findings, and the tokens with the stand-ins and with torch's kernels."""

    def find() -> Findings:
        assert mesh.rank == 0, "only rank 0 checks"
        return FOUND

    def tokens(kernels: str, findings: Findings) -> list[int]:
        setup = EngineOptions(
            dtype="float32", device="cpu", mask_token_id=62, eos_token_id=63, kernels=kernels
        )
        engine = build_rank(str(folder), setup, mesh, findings)
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        return run(engine, [Request(0, (5, 6, 7), params)])[0]

    table.KERNELS = stand_in_kernels.KERNELS  # type: ignore[assignment,misc]  # in this process alone
    found = from_rank_0(mesh, find)
    return found, tokens("triton", found), tokens("torch", Findings())
