"""`verify`: trains each configuration with a switch off and on, and compares all bits.

In:   a `VerifyJob`.
Out:  a `Report` with one `Comparison` a configuration, the same on every rank.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table

from flatfsdp.cli.progress import StepBar
from flatfsdp.cli.report import (
    compared_cells,
    comparison_table,
    plot_losses,
    verdict,
)
from flatfsdp.comm.launch import Rank
from flatfsdp.models.text import Sampler
from flatfsdp.parity.evidence import KINDS, Compared, compared
from flatfsdp.profiling.environment import environment
from flatfsdp.profiling.figures import to_json
from flatfsdp.training.choices import Fusion, PrecisionName, Strategy
from flatfsdp.training.gpt import TrainSettings, train


class Switch(str, Enum):
    """Switches, none of which may change a bit.

    flag: `optimize_backward_concat`; in_place: the model sharded in place, or wrapped; fusion: weight
    gradients added in the GEMM, or after it, in FP32; cache: FP8 weights cast in the first microbatch
    only, or in each; storage: weights in FP8 in the flat buffers, or cast by each layer; replay: microbatches
    as CUDA graphs, or eager, both with interruptions between steps, see `Interruptions`.
    """

    flag = "flag"
    in_place = "in-place"
    fusion = "fusion"
    cache = "cache"
    storage = "storage"
    replay = "replay"

    def settings(self, settings: TrainSettings) -> tuple[TrainSettings, TrainSettings]:
        """Returns the settings with the switch off and on."""
        if self is Switch.flag:
            return tuple(replace(settings, optimize_backward_concat=on) for on in (False, True))  # type: ignore[return-value]
        if self is Switch.in_place:
            return replace(settings, in_place=False), replace(settings, in_place=True)
        if self is Switch.fusion:
            return replace(settings, fusion=Fusion.two_pass), replace(settings, fusion=Fusion.fused)
        if self is Switch.cache:
            return replace(settings, caches_weights=False), replace(settings, caches_weights=True)
        if self is Switch.replay:
            eager = replace(settings, caches_weights=False, interrupts=True)
            return eager, replace(eager, replays=True)
        return replace(settings, stores_fp8=False), replace(settings, stores_fp8=True)

    def applies(self, settings: TrainSettings) -> bool:
        """Whether the switch makes a difference to the run."""
        is_stored = settings.precision is PrecisionName.fp8_weights
        if self is Switch.storage:
            return is_stored
        if self is Switch.cache:
            return settings.precision.recipe is not None and not is_stored and settings.microbatches > 1
        return self in (Switch.flag, Switch.in_place, Switch.replay) or settings.precision.has_own_layers

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the two runs, off and on."""
        names = {
            Switch.flag: ("flag off", "flag on"),
            Switch.in_place: ("wrapped", "in place"),
            Switch.fusion: ("two passes", "fused"),
            Switch.cache: ("cast each", "cast once"),
            Switch.storage: ("bf16 weights", "FP8 weights"),
            Switch.replay: ("eager", "replayed"),
        }
        return names[self]


@dataclass(frozen=True)
class VerifyJob:
    """Runs to compare: `settings` with each precision, strategy and setting of a switch.

    Attributes:
        fusions: fusions of weight gradients in rows that switch the flag, for precisions with FlatFSDP's
            layers.
        self_test: damage one bit of one gradient in the runs with the switch on, which `verify` must notice.
    """

    settings: TrainSettings
    precisions: tuple[PrecisionName, ...]
    strategies: tuple[Strategy, ...]
    switches: tuple[Switch, ...] = tuple(Switch)
    fusions: tuple[Fusion, ...] = (Fusion.fused,)
    self_test: bool = False

    def __post_init__(self) -> None:
        # Refuse sizes that do not suit one of the precisions.
        for switch, settings in self.configurations():
            switch.settings(settings)

    def configurations(self) -> list[tuple[Switch, TrainSettings]]:
        """Lists every switch with the settings that it applies to."""
        found = []
        for precision in dict.fromkeys(self.precisions):
            for strategy in dict.fromkeys(self.strategies):
                base = replace(self.settings, precision=precision, strategy=strategy)
                for switch in dict.fromkeys(self.switches):
                    varies = switch is Switch.flag and precision.has_own_layers
                    for fusion in dict.fromkeys(self.fusions) if varies else (Fusion.fused,):
                        if switch.applies(base):
                            found.append((switch, replace(base, fusion=fusion)))
        return found


@dataclass(frozen=True)
class Comparison(Compared):
    """Comparison of one configuration with one switch off and on.

    Attributes:
        fusion: fusion of weight gradients; empty for plain layers, and if it is what is switched.
    """

    precision: str
    strategy: str
    switch: str
    fusion: str

    @property
    def name(self) -> str:
        """The configuration in words."""
        return " ".join(part for part in (self.precision, self.strategy, self.fusion) if part)

    @property
    def ends(self) -> tuple[str, str]:
        """Names of the two runs, off and on."""
        return Switch(self.switch).ends


@dataclass(frozen=True)
class Report:
    """Report of all configurations; `equal` only if every row is."""

    rows: list[Comparison]
    environment: dict[str, Any]
    job: VerifyJob = field(repr=False)

    @property
    def equal(self) -> bool:
        """Whether all rows have equal bits."""
        return all(row.equal for row in self.rows)

    def json(self) -> str:
        """The report as JSON."""
        rows = [{**asdict(row), "equal": row.equal, "falling": row.on.falling} for row in self.rows]
        options = asdict(self.job)
        for varied in (
            "precision",
            "strategy",
            "optimize_backward_concat",
            "fusion",
            "caches_weights",
            "stores_fp8",
            "in_place",
            "replays",
            "interrupts",
        ):
            del options["settings"][varied]
        return to_json(
            {"equal": self.equal, "environment": self.environment, "options": options, "rows": rows}, indent=2
        )

    def write(self, folder: Path) -> list[Path]:
        """Writes the report and a picture of the losses; returns the files."""
        text, picture = folder / "verify.json", folder / "losses.png"
        text.write_text(self.json() + "\n")
        world, settings = self.environment["world_size"], self.job.settings
        plot_losses(
            picture,
            f"Bit for bit the same? World size {world}, {settings.microbatches} microbatches",
            {
                f"{row.name}: {' / '.join(row.ends)}": dict(
                    zip(row.ends, (row.off.losses, row.on.losses), strict=True)
                )
                for row in self.rows
            },
        )
        return [text, picture]

    def table(self) -> Table:
        """Table with one row a configuration; off above on within a cell."""
        result = comparison_table(
            "One switch off and on: the same bits?",
            ("config", "switch", "final loss"),
            (*KINDS, "loss falling"),
        )
        for row in self.rows:
            result.add_row(
                row.name,
                "\n".join(row.ends),
                *compared_cells(row.off, row.on, row.differences),
                verdict(row.on.falling, "yes", "NO"),
                end_section=row is not self.rows[-1],
            )
        return result

    def verdict_lines(self) -> list[str]:
        """Lines that name the differences, or one line that says there are none."""
        if self.equal:
            return [
                f"On equals off, bit for bit, at world size {self.environment['world_size']}: "
                f"{len(self.rows)} configurations, {self.job.settings.steps} steps each."
            ]
        return [line for row in self.rows for line in row.lines(f"{row.name}, {' / '.join(row.ends)}")]


def verify_on_rank(rank: Rank, job: VerifyJob, rows_after: int = 0) -> Report:
    """Runs all configurations; every rank must call it, and all get the same verdicts.

    Args:
        rank: this rank.
        job: the configurations.
        rows_after: number of rows of the same program that come later, and count in its progress.
    """
    sampler, configurations = job.settings.sampler(), job.configurations()
    count = len(configurations) + rows_after
    rows = [
        _compare(rank, switch, settings, sampler, job.self_test, f"{number} of {count}")
        for number, (switch, settings) in enumerate(configurations, start=1)
    ]
    return Report(rows, environment(rank), job)


def _compare(
    rank: Rank, switch: Switch, settings: TrainSettings, sampler: Sampler, self_test: bool, place: str
) -> Comparison:
    precision, strategy = settings.precision, settings.strategy
    is_named = precision.has_own_layers and switch is not Switch.fusion and settings.fusion != Fusion.fused
    fusion = f"wgrad {settings.fusion.value}" if is_named else ""
    label = f"{place}  {precision.value} {strategy.value} {fusion}".rstrip()
    with StepBar(f"{label}: {' / '.join(switch.ends)}", 2 * settings.steps, visible=rank.index == 0) as bar:
        off, on = (partial(train, ends, sampler, rank, bar.advance) for ends in switch.settings(settings))
        found = Comparison(
            **vars(compared(off, on, rank, settings.steps, self_test=self_test)),
            precision=precision.value,
            strategy=strategy.value,
            switch=switch.value,
            fusion=fusion,
        )
        bar.conclude(found)
    return found
