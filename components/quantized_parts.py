"""Find the format of each matrix from a scheme and a model's parts, or refuse the scheme."""

from diffray.components.layers import Parts
from diffray.components.quantization import PATTERN, Scheme
from diffray.components.weight import Weight
from diffray.kernels.formats import Format


def module_of(name: str) -> str:
    """Return the name of the module that a checkpoint's tensor belongs to."""
    return name.removesuffix(".weight")


def chosen_formats(parts: Parts, scheme: Scheme) -> list[tuple[Weight, Format]]:
    """Return the matrices to quantize and their formats, each once."""
    found: dict[int, tuple[Weight, Format | None, str]] = {}
    used = set()
    for name, part in parts.items():
        if part.weight is None:
            continue
        rule = scheme.rule_for(part.weight.part, module_of(name))
        rule_form = None if rule is None else rule.form
        used |= set() if rule is None else {rule.key}
        _, before, first = found.setdefault(id(part.weight), (part.weight, rule_form, name))
        if before != rule_form:
            raise ValueError(
                f"quantization is {scheme.given}: {module_of(first)} would be in "
                f"{_shown(before)} and {module_of(name)} in {_shown(rule_form)}, but both are "
                "parts of one product; give them one format"
            )
        if rule_form is not None:
            here = part.weight.stored.shape[-1]
            what = "number of ranks" if scheme.stored else "format"
            if obstacle := rule_form.obstacle(part.shape[-1], here):
                raise ValueError(
                    f"quantization is {scheme.given}: {module_of(name)} cannot be kept in "
                    f"{rule_form.name}, because {obstacle}; choose another {what} for it"
                )
    _refuse_unused(parts, scheme, used)
    chosen = [(weight, form) for weight, form, _ in found.values() if form is not None]
    if not chosen:
        raise ValueError(
            f"quantization is {scheme.given}, but it matches no matrix of this model; leave it out"
        )
    return chosen


def _refuse_unused(parts: Parts, scheme: Scheme, used: set[str]) -> None:
    if scheme.stored:
        if others := ", ".join(sorted(scheme.stored.keys() - used)[:5]):
            raise ValueError(
                f"the checkpoint stores {others} quantized, which this model does not have, or "
                "keeps in its dtype; use a checkpoint in which only linear layers are quantized"
            )
        return
    for rule in scheme.rules:
        if not rule.asked or rule.key in used:
            continue
        if rule.key.startswith(PATTERN):
            why = f"{rule.key!r} matches no matrix of this model that can be quantized"
        elif rule.key == "head":
            why = "this model's head is its embedding, which is never quantized"
        elif any(p.weight is not None and p.weight.part == rule.key for p in parts.values()):
            continue  # patterns cover all of it
        else:
            why = f"this model has no {rule.key}"
        raise ValueError(f"quantization is {scheme.given}, but {why}; leave it out")


def _shown(form: Format | None) -> str:
    return "the model's dtype" if form is None else form.name
