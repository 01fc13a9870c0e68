"""Tables and JSON that all plans share: memory, traffic and time of one rank."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from flatfsdp.engine.whole.memory import GIB
from flatfsdp.plan import Machine, Sent
from flatfsdp.plan.memory import StepMemory
from flatfsdp.plan.time import StepTime
from flatfsdp.plan.traffic import named


def table(title: str, *columns: str) -> Table:
    """Makes an empty table; the first column is text, and so is the last of three."""
    found = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False)
    for number, column in enumerate(columns):
        is_text = not number or (number == 2 and len(columns) == 3)
        found.add_column(column, justify="left" if is_text else "right")
    return found


def memory_table(memory: StepMemory, whose: str) -> Table:
    """Makes the table of memory, in GiB."""
    found = table(f"Memory of {whose}, at {memory.moment}", "", "GiB", "")
    for line in memory.static:
        found.add_row(line.name, f"{line.nbytes / GIB:.2f}", line.note or "always")
    between = f"{memory.between_steps / GIB:.2f}"
    found.add_row("between steps", between, "", style="bold", end_section=True)
    for line in memory.passing:
        found.add_row(line.name, f"{line.nbytes / GIB:.2f}", line.note)
    found.add_row("at most", f"{memory.peak / GIB:.2f}", "", style="bold")
    return found


def traffic_table(sent: Sent) -> Table:
    """Makes the table of traffic: bytes by kind, in GB."""
    found = table("Sent by one rank in a step", "", "GB")
    for name, nbytes in named(sent):
        if nbytes:
            found.add_row(name, f"{nbytes / 1e9:.2f}")
    found.add_row("together", f"{sent.total / 1e9:.2f}", style="bold")
    return found


def time_table(time: StepTime, title: str, speed: str = "") -> Table:
    """Makes the table of times, in ms.

    Args:
        time: times of a step.
        title: title of the table.
        speed: text before the number of operations a second.
    """
    found = table(title, "", "ms", "share")
    for name, seconds in time.lines.items():
        found.add_row(name, f"{1e3 * seconds:.1f}", f"{seconds / time.seconds:.1%}")
    tflops = f"{time.flops_per_second / 1e12:.0f} TFLOP/s a GPU"
    speed = f"{speed}, {tflops}" if speed else tflops
    found.add_row("together", f"{1e3 * time.seconds:.1f}", speed, style="bold")
    return found


def show_verdict(console: Console, memory: StepMemory, time: StepTime, machine: Machine) -> None:
    """Prints how much communication is overlapped, and whether the memory suffices."""
    if time.hidden_share is not None:
        console.print(
            f"Communication takes {1e3 * time.communication:.1f} ms, {time.hidden_share:.0%} of it beside "
            "computation.",
            highlight=False,
        )
    fits = memory.peak <= machine.usable_memory()
    console.print(
        f"It {'fits' if fits else 'DOES NOT FIT'}: {memory.peak / GIB:.1f} GiB of "
        f"{machine.usable_memory() / GIB:.1f} (a GPU's {machine.gpu_memory / GIB:.1f} less what CUDA, NCCL "
        "and gaps take).",
        style="green" if fits else "bold red",
        highlight=False,
    )


def figures(memory: StepMemory, sent: Sent, time: StepTime, machine: Machine) -> dict[str, Any]:
    """All figures for JSON, in bytes and seconds, by the names of the tables' lines."""
    return {
        "memory": {
            **asdict(memory),
            "static": {line.name: line.nbytes for line in memory.static},
            "passing": {line.name: line.nbytes for line in memory.passing},
            "between_steps": memory.between_steps,
            "peak": memory.peak,
            "usable": machine.usable_memory(),
        },
        "sent": sent._asdict(),
        "seconds": time.lines,
        "communication_seconds": time.communication,
        "hidden_share": time.hidden_share,
    }
