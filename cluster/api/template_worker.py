"""Applies chat templates, which are code that may run forever, in a limited process."""

from typing import Any, Final

from diffray.cluster.control.limited_process import serve

CPU_S: Final = 2.0  # of CPU time, per conversation
LONGEST: Final = 2**24  # characters of a prompt


def answer(given: dict[str, Any]) -> dict[str, Any]:
    """Return the text that `render_jinja_template` makes of its arguments."""
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        made: Any = render_jinja_template(**given)
        text = made[0][0]
        text.encode()
    except MemoryError:
        raise
    except Exception as error:  # a template may raise anything
        number = getattr(error, "lineno", None)
        where = f" (line {number} of the template)" if number else ""
        raise ValueError(f"{error}{where}") from None
    if len(text) > LONGEST:
        raise ValueError(f"it made {len(text)} characters, more than {LONGEST}")
    return {"text": text}


if __name__ == "__main__":
    import transformers.utils.chat_template_utils  # noqa: F401  # before the memory is limited

    serve(answer, CPU_S)
