"""How a generation moves from block to block, and what its masks look like to the model."""

from typing import ClassVar, Final, Literal

from pydantic import Field

from diffray.components.config import PolicyPart

_STRIDE: Final = 4  # of I-DLM's adapters, whose models do not say
_CAUSAL: Final = "block_diffusion", "sub_blocks"


class Iteration(PolicyPart):
    """How a generation moves from block to block.

    With `early_stop` it ends at its first end token; without it, all blocks are denoised, but the
    returned text still ends there.
    """

    soft: ClassVar[bool] = False  # masked positions carry soft embeddings
    first_alone: ClassVar[bool] = False  # a block's first step decides its first position alone
    renoises: ClassVar[bool] = False  # masks show noise; a block's tokens become final together
    next_token: ClassVar[bool] = False  # writes what an autoregressive model would
    drafts: ClassVar[bool] = False  # a block's tokens are drafts, which a causal forward verifies
    strided: ClassVar[bool] = False  # the forward that verifies them drafts the next ones too

    kind: str  # subclasses have one value
    early_stop: bool = Field(True, description="End the generation at its first end token.")

    @property
    def adapts_drafts(self) -> bool:
        """Whether a request's adapter acts on drafts alone."""
        return False

    def sub_block(self) -> int:
        """Return the length of sub-blocks, decided from left to right; 0 if there are none."""
        return 0

    def length(self, own: int) -> int:
        """Return the default block length, given the model's own."""
        return own

    def weight(self, step: int) -> float:
        """Return the weight of the soft embedding at this step."""
        return 0.0

    def floor(self, step: int) -> float:
        """Return the lowest threshold that a decoder may use at this step."""
        return 0.0

    def temperature(self, step: int, asked: float) -> float:
        """Return the temperature of a block's step, given the one that the request asks for."""
        return asked


class Blockwise(Iteration):
    """Blocks follow the prompt; all positions see each other, later blocks as masks.

    For bidirectional models.
    """

    kind: Literal["blockwise"] = "blockwise"


class FirstToken(Iteration):
    """Blockwise, but a block's first step decides the block's first position and no other.

    Fast-dLLM runs Dream with its caches this way: where logits are about the next position, the
    forward that fills the cache decides the first of a block, and later ones run only the block.
    """

    first_alone: ClassVar[bool] = True

    kind: Literal["first_token"] = "first_token"


class BlockDiffusion(Iteration):
    """Blocks start at multiples of the block length and see nothing after their own end.

    For block-causal models. The first block may start with the last tokens of the prompt. Those of
    A2D and Nemotron-Labs-Diffusion start at the prompt's end.
    """

    kind: Literal["block_diffusion"] = "block_diffusion"
    context: Literal["causal", "bidirectional"] | None = Field(
        None,
        description="How Nemotron-Labs-Diffusion encodes final tokens: causally (default), or the "
        "prompt and each finished block both ways.",
    )


class SubBlocks(Iteration):
    """Block diffusion in sub-blocks: only the first one that has masks is denoised.

    Fast-dLLM v2 works this way. Where logits are about the next position, as in that model, the
    last position of a finished block decides the first of the next one in the step that stores the
    finished block's K/V: one step of an autoregressive model.
    """

    first_alone: ClassVar[bool] = True

    kind: Literal["sub_blocks"] = "sub_blocks"
    sub_block_length: int = Field(8, ge=1, description="Positions per sub-block.")

    def sub_block(self) -> int:
        return self.sub_block_length


class Autoregressive(Iteration):
    """One token after the other, each from the position before it: blocks of one.

    For autoregressive models.
    """

    first_alone: ClassVar[bool] = True
    next_token: ClassVar[bool] = True

    kind: Literal["autoregressive"] = "autoregressive"

    def length(self, own: int) -> int:
        return 1


class Drafted(Iteration):
    """The tokens of `autoregressive`, several at a time: drafts that a causal forward verifies."""

    next_token: ClassVar[bool] = True
    drafts: ClassVar[bool] = True

    lora: Literal["all", "drafts"] = Field(
        "all",
        description="Where a request's adapter acts: on all tokens, or on those that draft.",
    )

    @property
    def adapts_drafts(self) -> bool:
        return self.lora == "drafts"


class SelfSpeculation(Drafted):
    """The tokens of `autoregressive`, several at a time: drafted by diffusion, verified causally.

    The decoder accepts drafts. Once a block is full of them, a causal forward shows what an
    autoregressive model would write after each: the drafts that equal it are final, and the token
    after them too. The next block starts there.
    """

    kind: Literal["self_speculation"] = "self_speculation"


class Introspective(Drafted):
    """The tokens of `autoregressive`, several at a time, as I-DLM writes them.

    All attention is causal. A forward runs drafts and masks behind them: it shows what follows
    each draft, so those that are right are final, with the token after them; and if all are, the
    masks' tokens are the next drafts. A block is the most tokens that a forward makes final; it is
    shorter where not so many drafts pay.
    """

    strided: ClassVar[bool] = True

    kind: Literal["introspective"] = "introspective"

    def length(self, own: int) -> int:
        return own if own > 1 else _STRIDE


class Soft(Iteration):
    """Iteration smoothing (dInfer): a masked position's input carries what the model expects there.

    The mask embedding gains weight * E[embedding of the token], the expectation under the model's
    last probabilities at that position. The weight grows over the steps of a generation, and the
    threshold decreases from 1 to the decoder's own value.
    """

    soft: ClassVar[bool] = True

    kind: Literal["soft"] = "soft"
    cont_weight_init: float = Field(
        0.15, ge=0, description="The weight of the expected embedding at the first step."
    )
    cont_weight_growth: float = Field(0.02, ge=0, description="What each step adds to that weight.")
    cont_weight: float = Field(0.3, ge=0, description="The largest weight.")
    threshold_decay: float = Field(
        0.02, ge=0, description="How much each step lowers the threshold, starting from 1."
    )

    def weight(self, step: int) -> float:
        return min(self.cont_weight_init + self.cont_weight_growth * step, self.cont_weight)

    def floor(self, step: int) -> float:
        return max(0.0, 1 - self.threshold_decay * step)


class Renoise(Iteration):
    """Denoise a canvas of noise, as DiffusionGemma does: no token is final before all of them are.

    Positions that the decoder accepts show the tokens drawn there, all others fresh random tokens.
    The next step decides all of them anew, and its inputs carry what this step expects at each
    position. The canvas ends as the most probable tokens, once these no longer change and the model
    is sure of them.
    """

    soft: ClassVar[bool] = True
    renoises: ClassVar[bool] = True

    kind: Literal["renoise"] = "renoise"
    max_steps: int = Field(48, ge=1, le=4096, description="The most steps of a canvas.")
    t_min: float = Field(
        0.4, ge=0.01, le=100, description="The temperature that the last step approaches."
    )
    t_max: float = Field(0.8, ge=0.01, le=100, description="The first step's temperature.")
    stability: int = Field(
        1, ge=0, description="End once the best tokens are unchanged for this many steps ..."
    )
    confidence: float = Field(
        0.005, ge=0, description="... and the mean entropy, in nats, is below this."
    )

    def weight(self, step: int) -> float:
        return 1.0

    def temperature(self, step: int, asked: float) -> float:
        """Return the schedule's temperature times the request's."""
        left = (self.max_steps - step) / self.max_steps
        return (self.t_min + (self.t_max - self.t_min) * left) * asked


def decides_otherwise(own: Iteration | None, default: Iteration | None) -> bool:
    """Return whether what decides tokens in one iteration means nothing to the other."""
    if own is None or (default is not None and own.kind == default.kind):
        return False
    return own.next_token or (default is not None and default.next_token)


def attends_otherwise(own: Iteration | None, default: Iteration | None) -> bool:
    """Return whether caches of one iteration do not fit the other, where a model has both."""
    return len({each.kind in _CAUSAL for each in (own, default) if each is not None}) == 2
