"""The model `diffray` of lm-evaluation-harness, in this process.

`python -m diffray.lm_eval` is the harness's own command with this model registered.
"""

import logging
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from diffray.cluster.control.llm import DiffusionLLM
from diffray.cluster.control.yaml_file import read_yaml
from diffray.cluster.frontend.likelihood import Method, Scorer
from diffray.components.params import SamplingParams
from diffray.components.spelling import did_you_mean

log = logging.getLogger(__name__)

_Asked = tuple[tuple[str, str], list[int], list[int]]
_OWN = "pretrained", "method", "samples", "seed", "max_gen_toks", "diffusion"
_IGNORED = "batch_size", "max_batch_size"  # an engine batches by itself


@register_model("diffray")
class DiffrayLM(TemplateLM):
    """`pretrained` is a model as `diffray serve` takes it, `diffusion` a YAML file of defaults.

    `method`, `samples` and `seed` are those of `DiffusionLLM.loglikelihood`; other arguments are
    options of DiffusionLLM.
    """

    def __init__(
        self,
        pretrained: str = "",
        method: Method | None = None,
        samples: int = 128,
        seed: int = 0,
        max_gen_toks: int = 256,
        diffusion: str | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        own = {name: value for name, value in options.items() if name not in _IGNORED}
        if device == "cpu":  # the harness says cuda:0 where nothing was asked for
            own["device"] = device
        try:
            self.llm = _loaded(pretrained, diffusion, own)
            limits = self.llm.limits
            scorer = Scorer.of(limits.spec, method, samples=samples, seed=seed)
        except (ValueError, OSError) as error:
            raise SystemExit(f"diffray: {error}") from None
        assert self.llm.tokenizer is not None
        self.tokenizer, self._tokenizer = self.llm.get_tokenizer(), self.llm.tokenizer
        self.asked: dict[str, Any] = {"method": method, "samples": samples, "seed": seed}
        self.max_gen_toks, self._name = max_gen_toks, pretrained.replace("/", "__")
        self._left_out = set[str]()
        # A canvas may be rounded up to whole blocks.
        rounding = 0 if scorer.method == "autoregressive" else limits.spec.block_length
        self.room = limits.positions(guided=False) - rounding

    @property
    def tokenizer_name(self) -> str:
        return self._name

    @property
    def eot_token_id(self) -> int:
        return self.llm.limits.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        begins = bool(self.tokenizer.bos_token) and string.startswith(self.tokenizer.bos_token)
        special = not begins if add_special_tokens is None else add_special_tokens
        return self._tokenizer.encode(string, special)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _loglikelihood_tokens(
        self, requests: list[_Asked], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        prompts, answers = [], []
        for _, context, continuation in requests:
            answers.append(continuation[1 - self.room :])
            prompts.append(context[len(answers[-1]) - self.room :])
        found = self.llm.loglikelihood(prompts, answers, use_tqdm=not disable_tqdm, **self.asked)
        return [(each.logprob, bool(each.is_greedy)) for each in found]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        parts, owners = list[_Asked](), list[int]()
        for owner, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.room - 1,
                context_len=1,
            )
            own = [(("", ""), *make_disjoint_window(window)) for window in windows]
            parts, owners = parts + own, owners + [owner] * len(own)
        found = [0.0] * len(requests)
        likely = self._loglikelihood_tokens(parts, disable_tqdm)
        for owner, (logprob, _) in zip(owners, likely, strict=True):
            found[owner] += logprob
        return found

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        prompts, params = [], []
        for request in requests:
            context, given = request.args
            asked = normalize_gen_kwargs(given, self.max_gen_toks)
            most = min(asked.pop("max_gen_toks"), self.room // 2)
            tokens, most = maybe_truncate(self.tok_encode(context), most, self.room)
            prompts.append(tokens)
            until = [text for text in asked.pop("until") if text]
            special = [text for text in until if text in self.tokenizer.get_added_vocab()]
            params.append(
                SamplingParams(
                    max_tokens=most,
                    stop=[text for text in until if text not in special],
                    stop_token_ids=self.tokenizer.convert_tokens_to_ids(special),
                    **self._known(asked),
                )
            )
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        return [output.outputs[0].text for output in outputs]

    def _known(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters; other libraries' options are left out, and named once."""
        left = asked.keys() - SamplingParams.model_fields - {"do_sample"}
        for name in left - self._left_out:
            log.warning("%s=%r is left out: diffray has no such parameter", name, asked[name])
        self._left_out |= left
        return {name: asked[name] for name in asked.keys() & SamplingParams.model_fields}


def _loaded(model: str, diffusion: str | None, options: dict[str, Any]) -> DiffusionLLM:
    for name in options:
        if near := did_you_mean(name, _OWN):
            raise ValueError(f"unknown argument {name!r}{near}")
    if not model:
        raise ValueError("name a model: --model_args pretrained=MODEL")
    policy: Any = None if diffusion is None else read_yaml(Path(diffusion))
    return DiffusionLLM(model, diffusion=policy, **options)


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
