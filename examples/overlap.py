"""Computation and copies, one after the other and at the same time: the use of a second CUDA stream.

FlatFSDP gathers the next layer's parameters and reduces the last layer's gradients on separate streams, while
the compute stream continues.  This example shows the same with two simpler ingredients: matrix
multiplications, and copies from the GPU to the host and back.  Without a GPU a worker thread copies memory
beside the main thread's multiplications; PyTorch releases Python's lock during both.

python examples/overlap.py                      # on the GPU, if there is one
python examples/overlap.py --device cpu
python examples/overlap.py --mib 512 --width 4096 --out out/overlap
"""

from __future__ import annotations

import statistics
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from flatfsdp.comm.launch import Device

MIB = 2**20

Work = Callable[[], None]


@dataclass(frozen=True)
class Bar:
    """One operation in the picture: its stream or thread, its name, and its time in milliseconds."""

    lane: str
    kind: str
    start: float
    end: float


class Lab(ABC):
    """Something to compute, something to copy, and two ways to run both.

    Args:
        width: width of the square matrices that are multiplied.
        mib: size of the buffer that is copied away and back.
    """

    title: str

    def __init__(self, width: int, mib: int, device: str, dtype: torch.dtype) -> None:
        self.a, self.b = (torch.randn(width, width, device=device, dtype=dtype) for _ in range(2))
        self.product = torch.empty_like(self.a)
        self.source = torch.randint(256, (mib * MIB,), device=device, dtype=torch.uint8)
        self.target = torch.zeros_like(self.source)
        self.matmuls = 1

    def compute(self) -> None:
        """Runs all matmuls."""
        for _ in range(self.matmuls):
            self.matmul()

    def in_sequence(self) -> None:
        """Computes, then copies."""
        self.compute()
        self.copy()

    @abstractmethod
    def overlapped(self) -> None:
        """Computes and copies at the same time."""
        ...

    @abstractmethod
    def matmul(self) -> None:
        """Runs one multiplication."""
        ...

    @abstractmethod
    def copy(self) -> None:
        """Copies the source to another memory and back to the target."""

    @abstractmethod
    def wait(self) -> None:
        """Waits until everything that was started is done."""

    @abstractmethod
    def trace(self, work: Work) -> list[Bar]:
        """Runs `work` once and returns what ran when."""


class Gpu(Lab):
    """Two CUDA streams.  A copy runs beside the kernels only if the host's memory is pinned."""

    def __init__(self, width: int, mib: int) -> None:
        super().__init__(width, mib, "cuda", torch.bfloat16)
        self.title = f"{torch.cuda.get_device_name()}, a second stream for copies"
        self.host = torch.empty(self.source.shape, dtype=torch.uint8, pin_memory=True)
        self.side = torch.cuda.Stream()

    def matmul(self) -> None:
        """Starts one multiplication on the current stream."""
        torch.mm(self.a, self.b, out=self.product)

    def copy(self) -> None:
        """Starts both copies on the current stream."""
        self.host.copy_(self.source, non_blocking=True)
        self.target.copy_(self.host, non_blocking=True)

    def overlapped(self) -> None:
        """Copies on the side stream while the main stream computes."""
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)  # what is copied has to be there
        with torch.cuda.stream(self.side):
            self.copy()
        self.compute()
        main.wait_stream(self.side)  # who comes next may read the copy

    def wait(self) -> None:
        """Waits for all streams."""
        torch.cuda.synchronize()

    def trace(self, work: Work) -> list[Bar]:
        """Profiles `work`."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            work()
            self.wait()
        kinds = {"Memcpy DtoH": "copy to the host", "Memcpy HtoD": "copy back"}
        return [
            Bar(
                f"stream {event.device_resource_id}",
                kinds.get(event.name[: len("Memcpy DtoH")], "matmul"),
                event.time_range.start / 1e3,
                event.time_range.end / 1e3,
            )
            for event in recorded.events()
            if event.device_type == DeviceType.CUDA
        ]


class Cpu(Lab):
    """Two threads, with a core each if the machine has two free."""

    def __init__(self, width: int, mib: int) -> None:
        torch.set_num_threads(1)
        super().__init__(width, mib, "cpu", torch.float32)
        self.title = "no GPU: a second thread for copies, which needs a free core"
        self.elsewhere = torch.empty_like(self.source)
        self.pool = ThreadPoolExecutor(1)
        self.bars: list[Bar] = []

    def matmul(self) -> None:
        """Runs one multiplication."""
        with self._bar("matmul"):
            torch.mm(self.a, self.b, out=self.product)

    def copy(self) -> None:
        """Copies away and back."""
        with self._bar("copy away"):
            self.elsewhere.copy_(self.source)
        with self._bar("copy back"):
            self.target.copy_(self.elsewhere)

    def overlapped(self) -> None:
        """Copies in the worker thread while this one computes."""
        copied = self.pool.submit(self.copy)
        self.compute()
        copied.result()

    def wait(self) -> None:
        """Does nothing: a call returns when its work is done."""

    def trace(self, work: Work) -> list[Bar]:
        """Records the bars of `work`."""
        self.bars.clear()
        work()
        return list(self.bars)

    @contextmanager
    def _bar(self, kind: str) -> Iterator[None]:
        is_main = threading.current_thread() is threading.main_thread()
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        self.bars.append(Bar("main thread" if is_main else "copy thread", kind, 1e3 * start, 1e3 * end))


def milliseconds(lab: Lab, work: Work, repeats: int) -> float:
    """Median wall time of `work`, after one run to warm up."""
    times = []
    for _ in range(1 + repeats):
        lab.wait()
        start = time.perf_counter()
        work()
        lab.wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def balance(lab: Lab, repeats: int) -> None:
    """Chooses the number of matmuls that takes about the time of the copy: then there is most to gain."""
    lab.matmuls = max(1, round(milliseconds(lab, lab.copy, repeats) / milliseconds(lab, lab.matmul, repeats)))


def show(lab: Lab, times: dict[str, float]) -> None:
    """Prints the times, and how much of what could be hidden was."""
    compute, copy, in_sequence, overlapped = times.values()
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("ms", justify="right")
    for name, ms in times.items():
        table.add_row(name, f"{ms:.2f}")
    console = Console()
    console.print(f"[bold]{lab.title}[/]", table, sep="\n", highlight=False)
    hidden = (in_sequence - overlapped) / min(compute, copy)
    console.print(
        f"Speed-up {in_sequence / overlapped:.2f}: {hidden:.0%} of the shorter part hides behind the other.",
        highlight=False,
    )


COLORS = {"matmul": "#4e79a7", "copy to the host": "#f28e2b", "copy away": "#f28e2b", "copy back": "#76b7b2"}


def draw(lab: Lab, traces: dict[str, list[Bar]], path: Path) -> None:
    """Draws one panel per trace, one row per stream or thread, on one scale of time."""
    lanes = list(dict.fromkeys(bar.lane for bars in traces.values() for bar in bars))
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(len(traces), 1, sharex=True)
    for panel, (name, bars) in zip(panels, traces.items(), strict=True):
        draw_panel(panel, name, bars, lanes)
    panels[-1].set_xlabel("ms")
    kinds = dict.fromkeys(bar.kind for bars in traces.values() for bar in bars)
    patches = [panels[0].barh(0, 0, color=COLORS[kind], label=kind) for kind in kinds]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(kinds), frameon=False)
    figure.suptitle(lab.title, fontsize=11)
    figure.savefig(path, dpi=150)


def draw_panel(panel: Axes, name: str, bars: list[Bar], lanes: list[str]) -> None:
    begin = min(bar.start for bar in bars)
    for bar in bars:
        span = [(bar.start - begin, bar.end - bar.start)]
        panel.broken_barh(span, (lanes.index(bar.lane) - 0.4, 0.8), color=COLORS[bar.kind], edgecolor="white")
    panel.set_yticks(range(len(lanes)), lanes)
    panel.set_ylim(len(lanes) - 0.5, -0.5)
    panel.set_title(name, loc="left", fontsize=10)
    panel.spines[["top", "right"]].set_visible(False)


def main(
    mib: Annotated[int | None, typer.Option(min=1, help="To copy; 256 on a GPU, 64 on a CPU.")] = None,
    width: Annotated[
        int | None, typer.Option(min=1, help="Of matrices; 8192 on a GPU, 512 on a CPU.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs; the median counts.")] = 10,
    device: Annotated[Device, typer.Option(help="auto takes the GPU if there is one.")] = Device.auto,
    out: Annotated[Path, typer.Option(help="Folder for overlap.png.")] = Path("out"),
) -> None:
    """Times compute and copy alone, in sequence and overlapped, and draws both from a trace.

    For example:

    python examples/overlap.py --device cpu

    python examples/overlap.py --mib 512 --width 4096 --out out/overlap
    """
    if device is Device.cuda and not torch.cuda.is_available():
        raise typer.BadParameter("--device cuda needs a GPU; leave it out to see two threads instead")
    on_gpu = device is not Device.cpu and torch.cuda.is_available()
    lab = Gpu(width or 8192, mib or 256) if on_gpu else Cpu(width or 512, mib or 64)
    balance(lab, repeats)
    ways: dict[str, Work] = {
        "compute alone": lab.compute,
        "copy alone": lab.copy,
        "in sequence": lab.in_sequence,
        "overlapped": lab.overlapped,
    }
    show(lab, {name: milliseconds(lab, work, repeats) for name, work in ways.items()})
    assert torch.equal(lab.source, lab.target), "the copy that came back is another one"
    out.mkdir(parents=True, exist_ok=True)
    draw(lab, {name: lab.trace(ways[name]) for name in ("in sequence", "overlapped")}, out / "overlap.png")
    typer.echo(f"Written: {out / 'overlap.png'}")


if __name__ == "__main__":
    typer.run(main)
