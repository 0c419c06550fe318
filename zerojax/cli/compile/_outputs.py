"""The files that `zerojax compile` writes: looked at before it compiles, written after it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from zerojax.cli.compile._options import CompileOptions
from zerojax.cli.compile._result import Answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outputs:
    """Where the plot, the report and the text of each stage go; None for nowhere."""

    plot: Path | None
    json: Path | None
    hlo: dict[int, Path]

    @classmethod
    def of(cls, options: CompileOptions) -> Outputs:
        """Name the files.

        Raises:
            ValueError: the plot has another ending than .png, or two files have one name.
        """
        plot = options.plot
        if plot is None and options.all_stages:
            plot = Path(f"{options.model}.{options.topology.replace(':', '-')}.png".lower())
        check_png(plot)
        hlo = {}
        if options.hlo is not None:
            hlo = {stage: _of_stage(options.hlo, stage, options) for stage in options.stages}
        named = [path for path in (plot, options.json, *hlo.values()) if path is not None]
        if len(set(named)) < len(named):
            raise ValueError(f"two outputs have one name: {', '.join(map(str, named))}")
        return cls(plot=plot, json=options.json, hlo=hlo)

    def check(self) -> None:
        """See that every file can be written, and leave nothing behind.

        Raises:
            OSError: one can't be.
        """
        named = {"--plot": self.plot, "--json": self.json}
        named |= {f"--hlo (stage {stage})": path for stage, path in self.hlo.items()}
        for option, path in named.items():
            if path is not None:
                check_file(option, path)

    def write(self, answers: Sequence[Answer]) -> list[Path]:
        """Write the files and list them."""
        written = []
        for answer in answers:
            if answer.stage in self.hlo and answer.compilation.program is not None:
                self.hlo[answer.stage].write_text(answer.compilation.program.text)
                written.append(self.hlo[answer.stage])
        if self.json is not None:
            self.json.write_text(json.dumps(_plain(answers), indent=2) + "\n")
            written.append(self.json)
        if self.plot is not None:
            from zerojax.cli.compile._plot import write_stages_plot

            write_stages_plot(answers, self.plot)
            written.append(self.plot)
        return written


def check_png(plot: Path | None) -> None:
    """Refuse a drawing under another ending than .png.

    Raises:
        ValueError: it has one.
    """
    if plot is not None and plot.suffix.lower() != ".png":
        raise ValueError(f"--plot {plot}: give a name that ends in .png")


def _of_stage(path: Path, stage: int, options: CompileOptions) -> Path:
    return path.with_name(f"{path.stem}.stage{stage}{path.suffix}") if options.all_stages else path


def check_file(option: str, path: Path) -> None:
    """See that a file can be written, and leave nothing behind.

    Raises:
        OSError: it can't be.
    """
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise OSError(f"can't write to {option} {path}: {error.strerror}") from error


def _plain(answers: Sequence[Answer]) -> dict[str, object]:
    question = answers[0].question
    options = question.options
    return {
        "model": options.model,
        "num_params": question.layout.num_params,
        "topology": options.topology,
        "mesh": dict(question.layout.mesh.shape),
        "num_examples": question.num_examples,
        "context": question.config.context,
        "scan": options.scan,
        "remat": question.config.remat,
        **dataclasses.asdict(question.residual),
        "precision": options.precision,
        "optimizer": options.optimizer,
        "accumulate": options.accumulate,
        "stages": [answer.to_dict() for answer in answers],
    }
