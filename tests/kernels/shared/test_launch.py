"""`PreparedKernel` starts the compiled variant for such tensors, and asks Triton for all others.

It is prepared anew for another tile.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatfsdp.kernels import activation
from flatfsdp.kernels.attention import join, rope
from flatfsdp.kernels.cast import cast, column_sum
from flatfsdp.kernels.shared.tiles import Tile
from flatfsdp.kernels.shared.triton import PreparedKernel, triton, variant_of


@dataclass
class OnGPU:
    """The parts of a tensor that `PreparedKernel` uses."""

    address: int
    dtype: torch.dtype = torch.float32
    device: int = 0
    is_cuda: bool = True

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return self.device


@dataclass
class Kernel:
    """A stand-in for a Triton kernel that records how it, and its compiled variant, is called."""

    compiles: bool = True
    calls: list[Any] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            self.calls.append(("triton", grid, args, options))
            return _Compiled(self) if self.compiles else None

        return call


@dataclass
class _Compiled:
    kernel: Kernel
    function: int = 1
    packed_metadata: str = "packed"

    def run(self, x: int, y: int, z: int, stream: int, function: int, metadata: str, *rest: Any) -> None:
        """Its arguments follow metadata and two hooks of the launch."""
        assert (function, metadata, rest[:3]) == (1, "packed", (None, None, None))
        self.kernel.calls.append(("compiled", (x, y, z), rest[3:], stream))

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, stream: self.kernel.calls.append(("with hooks", grid, args, stream))


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device 0 is current, its stream is 7; other devices have streams 8, 9, .."""
    current = [0]

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7 + index, raising=False)


@pytest.mark.usefixtures("one_gpu")
def test_a_second_call_starts_what_the_first_has_compiled() -> None:
    kernel = Kernel()
    start = PreparedKernel(kernel, (5, 3), 17, "kind", num_warps=8)
    first, second = OnGPU(64), OnGPU(128)
    start(first, None, second)
    start(second, None, OnGPU(16))
    assert kernel.calls == [
        ("triton", (5, 3, 1), (first, None, second, 17, "kind"), {"num_warps": 8}),
        ("compiled", (5, 3, 1), (128, 0, 16, 17, "kind"), 7),
    ]


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_of_launches_are_run(hook: str) -> None:
    """A profiler's hooks may be added and removed."""
    kernel, chain = Kernel(), getattr(triton.knobs.runtime, hook)
    start = PreparedKernel(kernel, (1,))
    for hooked in (False, False, True, False):
        if hooked:
            chain.add(print)
        start(OnGPU(64))
        chain.remove(print)
    assert [who for who, *_ in kernel.calls] == ["triton", "compiled", "with hooks", "compiled"]


@pytest.mark.usefixtures("one_gpu")
@pytest.mark.parametrize(
    "other",
    [(OnGPU(64, torch.float16), OnGPU(128)), (OnGPU(64), OnGPU(128, torch.int8)), (OnGPU(64), None)],
)
def test_other_dtypes_are_another_variant(other: tuple[Any, ...]) -> None:
    kernel = Kernel()
    start = PreparedKernel(kernel, (1,))
    for tensors in ((OnGPU(64), OnGPU(128)), other, other, (OnGPU(64), OnGPU(128))):
        start(*tensors)
    assert [who for who, *_ in kernel.calls] == ["triton", "triton", "compiled", "compiled"]


@pytest.mark.usefixtures("one_gpu")
def test_addresses_between_multiples_of_16_are_other_variants() -> None:
    kernel = Kernel()
    start = PreparedKernel(kernel, (1,))
    aligned, other = OnGPU(64), OnGPU(72)
    pairs = ((aligned, other), (aligned, aligned), (other, aligned), (other, other))
    for tensors in (*pairs, *pairs):
        start(*tensors)
    assert [who for who, *_ in kernel.calls] == ["triton"] * 4 + ["compiled"] * 4


def test_variants_start_as_their_launcher_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of the Triton installed, with its last call recorded."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    monkeypatch.setattr(type(triton.runtime.driver), "active", SimpleNamespace(), raising=False)
    started: list[Any] = []
    launcher = object.__new__(driver.CudaLauncher)
    has_signature = "kernel_signature" in inspect.getsource(driver.CudaLauncher)
    described = {"arg_annotations": "annotations", "kernel_signature": "signature", "gsan_enabled": False}
    vars(launcher).update(
        launch=lambda *args: started.append(args),
        **dict.fromkeys(("global_scratch_size", "profile_scratch_size"), 0),
        **dict.fromkeys(("global_scratch_align", "profile_scratch_align", "num_ctas"), 1),
        launch_cooperative_grid=False,
        launch_pdl=True,
        **(described if has_signature else {}),
    )
    compiled = SimpleNamespace(run=launcher, function=1, packed_metadata="packed")
    launcher(5, 3, 1, 7, 1, "packed", None, None, None, 128, 0, 17)
    for scratch in (0, 16):
        launcher.global_scratch_size = scratch
        found = variant_of(compiled)
        assert (found.launch is launcher) == bool(scratch)
        launcher.global_scratch_size = 0
        arguments = ((128, 0, 17),) if found.is_packed else (128, 0, 17)
        found.launch(5, 3, 1, 7, *found.between, *arguments)
    assert len(started) == 3 and started[0] == started[1] == started[2]


@pytest.mark.usefixtures("one_gpu")
def test_each_device_has_its_own() -> None:
    kernel = Kernel()
    start = PreparedKernel(kernel, (1,))
    for device in (0, 1, 1, 0):
        start(OnGPU(64, device=device))
    assert [(who, rest[-1]) for who, *rest in kernel.calls] == [
        ("triton", {}),
        ("triton", {}),
        ("compiled", 8),
        ("compiled", 7),
    ]


@pytest.mark.usefixtures("one_gpu")
def test_the_interpreter_compiles_nothing() -> None:
    kernel = Kernel(compiles=False)
    start = PreparedKernel(kernel, (1,))
    for tensor in (OnGPU(64), OnGPU(64), OnGPU(64, is_cuda=False)):
        start(tensor)
    assert [who for who, *_ in kernel.calls] == ["triton"] * 3


def _rope(x: Tensor) -> None:
    angles = torch.ones(4, 8, device=x.device)
    rope.launch(torch.empty_like(x), x, angles, angles, False, False, False)


LAUNCHES: dict[Any, Callable[[Tensor], None]] = {
    activation: lambda x: activation.forward_launch(
        x[0, 0], "gelu", False, torch.empty_like(x[0, 0]), *(None,) * 4
    ),
    cast: lambda x: cast.max_abs_launch(x[0, 0], torch.zeros(1, device=x.device)),
    column_sum: lambda x: column_sum.launch(x[0, 0], torch.zeros(16, device=x.device)),
    join: lambda x: join.launch(torch.empty(4, 3, 96, device=x.device), x, x, x, False),
    rope: _rope,
}


@pytest.mark.parametrize("module", LAUNCHES, ids=lambda module: module.__name__)
def test_a_tile_is_looked_up_in_every_call(module: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(4, 3, 2, 16, device=device)
    looked_up: list[str] = []

    def find(kernel: str, *_: Any) -> Tile:
        looked_up.append(kernel)
        return Tile(4, 16, 1)

    for _ in range(2):
        monkeypatch.setattr(module, "find", find)
        LAUNCHES[module](x)
    assert len(looked_up) == 2
