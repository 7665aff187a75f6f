"""Where a server's numbers are kept: files with the names and keys of `vllm bench serve`."""

import json
from dataclasses import dataclass
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any, Final

from diffray.cluster.cli.bench.places import check_place
from diffray.cluster.cli.bench.serve_flags import Keeping
from diffray.cluster.cli.bench.serving_result import Served

_DETAILS: Final = (
    "input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors",
    "tasks",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Saving:
    """Whether and where to; with details, each request's numbers and texts are kept too."""

    save: bool
    detailed: bool
    append: bool
    folder: Path
    filename: str | None
    label: str
    metadata: dict[str, str]

    @staticmethod
    def of(keeping: Keeping, backend: str) -> "Saving":
        save = keeping.save_result or keeping.append_result
        if (keeping.save_detailed or keeping.result_dir or keeping.result_filename) and not save:
            raise ValueError(
                "--save-detailed, --result-dir and --result-filename need --save-result"
            )
        return Saving(
            save,
            keeping.save_detailed,
            keeping.append_result,
            keeping.result_dir or Path(),
            keeping.result_filename,
            keeping.label or backend,
            pairs(keeping.metadata or [], "--metadata"),
        )

    def check(self, runs: int) -> None:
        """Refuse a sweep whose runs would overwrite each other, and make the files' folder."""
        if self.filename and self.save and not self.append and runs > 1:
            raise ValueError(
                f"{runs} runs would all be written to {self.filename}; "
                "add --append-result, or leave out --result-filename"
            )
        if self.save:
            self.folder.mkdir(parents=True, exist_ok=True)
        if self.save and self.filename:
            check_place(self.folder / self.filename, "--result-filename")

    def write(self, served: Served, said: dict[str, Any], task: str) -> Path | None:
        """Write one run's numbers after what it was told to do; returns the file."""
        if not self.save:
            return None
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        load = served.load
        result = {
            "date": now,
            "endpoint_type": said["backend"],
            **said,
            "label": self.label,
            **self.metadata,
            "request_rate": load.rate if load.rate < inf else "inf",
            "max_concurrency": load.concurrency,
            **served.result,
        }
        if not self.detailed:
            result = {name: value for name, value in result.items() if name not in _DETAILS}
        limit = "" if load.concurrency is None else f"-concurrency{load.concurrency}"
        model = str(said["model_id"]).split("/")[-1]
        name = f"{self.label}-{load.rate}qps{limit}-{model}-{task}-{now}.json"
        path = self.folder / (self.filename or name)
        with path.open("a" if self.append else "w", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        return path


def pairs(typed: list[str], flag: str) -> dict[str, str]:
    """Return the values of NAME=VALUE."""
    found = {}
    for pair in typed:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ValueError(f"{flag} {pair!r} is no NAME=VALUE")
        found[name.strip()] = value.strip()
    return found
