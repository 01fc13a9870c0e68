"""The backward of attention whose bits repeat: its formula, its turns, and what cuDNN is asked for."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from flatfsdp.kernels.attention import ordered

SCALE = 0.3
HEADS = pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (3, 1)])
CAUSAL = pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])


class Case:
    """Random operands of a backward, and their gradients in float64.

    Attributes:
        operands: query, key, value, out, grad_out and logsumexp, FP32.
        expected: gradients of query, key and value.
    """

    def __init__(self, heads: int, groups: int, is_causal: bool, queries: int = 7, keys: int = 7) -> None:
        shapes = ((2, heads, queries, 8), (2, groups, keys, 8), (2, groups, keys, 8))
        leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        query, key, value = leaves
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=SCALE, enable_gqa=True
        )
        grad_out = torch.randn_like(out)
        self.expected = torch.autograd.grad(out, leaves, grad_out)
        scores = SCALE * query @ key.repeat_interleave(heads // groups, 1).transpose(-1, -2)
        if is_causal:
            scores = scores.masked_fill(~torch.ones(queries, keys, dtype=torch.bool).tril(), -torch.inf)
        logsumexp = scores.logsumexp(-1, keepdim=True)
        self.operands = [x.detach().float() for x in (*leaves, out, grad_out, logsumexp)]
        self.is_causal = is_causal

    def require(self, grads: Any) -> None:
        for grad, expected in zip(grads, self.expected, strict=True):
            assert (grad - expected).norm() <= 1e-5 * expected.norm()


@HEADS
@CAUSAL
def test_gradients_against_float64(heads: int, groups: int, is_causal: bool) -> None:
    case = Case(heads, groups, is_causal)
    case.require(ordered.attention_backward(*case.operands, scale=SCALE, is_causal=is_causal))


class FakeContext:
    """Stands for cuDNN on a device: computes each turn by the reference.

    Attributes:
        wanted: what each plan was made for.
        turns: number of turns.
    """

    def __init__(self) -> None:
        self.wanted: list[Any] = []
        self.turns = 0

    def plan(self, wanted: Any) -> Any:
        self.wanted.append(wanted)
        return wanted

    def run(self, plan: Any, operands: list[Tensor]) -> None:
        self.turns += 1
        assert tuple(map(ordered._layout, operands)) == plan.layouts
        ordered.reference(*operands, plan.scale, plan.is_causal)  # type: ignore[arg-type]


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> FakeContext:
    made = FakeContext()
    monkeypatch.setattr(ordered, "_context", lambda device: made)
    monkeypatch.setattr(ordered, "_attention_backward", ordered.launch)
    return made


@pytest.mark.parametrize(
    ("groups_that_fit", "turns"), [(0, 12), (1, 12), (2, 6), (3, 4), (5, 4), (6, 2), (9, 2), (12, 1), (20, 1)]
)
def test_sequences_and_heads_take_turns_so_that_scores_fit(
    groups_that_fit: int, turns: int, context: FakeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_a_group = 2 * 2 * 7 * 7
    monkeypatch.setattr(ordered, "WORKSPACE", groups_that_fit * bytes_a_group)
    case = Case(12, 6, True)
    case.require(ordered.attention_backward(*case.operands, scale=SCALE, is_causal=True))
    assert context.turns == turns and len(context.wanted) == 1


@pytest.mark.parametrize(
    ("shape", "strides", "told"),
    [
        ((2, 4, 7, 8), (224, 8, 32, 1), (224, 8, 32, 1)),
        ((1, 4, 7, 8), (3, 8, 32, 1), (224, 8, 32, 1)),
        ((1, 4, 7, 1), (0, 7, 1, 5), (28, 7, 1, 1)),
        ((2, 1, 7, 1), (7, 3, 1, 1), (7, 7, 1, 1)),
        ((1, 1, 1, 1), (5, 6, 7, 8), (1, 1, 1, 1)),
    ],
)
def test_cudnn_is_told_packed_strides_of_dimensions_of_size_one(
    shape: tuple[int, ...], strides: tuple[int, ...], told: tuple[int, ...]
) -> None:
    assert ordered._layout(torch.empty_strided(shape, strides, device="meta")) == (shape, told)


BHSD, BSHD, SBHD = (0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)


@pytest.mark.parametrize("order", [BHSD, BSHD, SBHD])
@pytest.mark.parametrize(
    ("batch", "heads", "groups", "workspace"),
    [(2, 4, 2, 2**30), (1, 4, 2, 2**30), (2, 4, 2, 1), (1, 1, 1, 1)],
)
@pytest.mark.parametrize("is_view", [False, True])
def test_the_forward_prepares_the_plan_of_the_backward(
    order: tuple[int, ...],
    batch: int,
    heads: int,
    groups: int,
    workspace: int,
    is_view: bool,
    context: FakeContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the strides of the result and of its gradient, which may be expanded."""
    ordered._expected.cache_clear()
    monkeypatch.setattr(ordered, "WORKSPACE", workspace)

    def tensor(n: int) -> Tensor:
        wide = torch.empty_permuted((batch, n, 7, 16 if is_view else 8), order).normal_()
        return wide[..., :8]

    query, key, value = tensor(heads), tensor(groups), tensor(groups)
    layouts = (ordered._Layout(tuple(x.shape), x.stride()) for x in (query, key, value))
    expected = ordered._expected(*layouts, query.dtype)
    out, logsumexp = torch.randn(batch, 7, heads, 8).transpose(1, 2), torch.randn(batch, heads, 7, 1)
    grad = torch.ones(()).expand(out.shape)
    ordered.attention_backward(query, key, value, out, grad, logsumexp, scale=SCALE, is_causal=True)
    assert [wanted.layouts for wanted in context.wanted] == [expected]
    ordered._expected.cache_clear()


@pytest.mark.parametrize(
    ("shape", "strides", "what"),
    [
        ((2, 4, 1, 8), (32, 8, 8, 1), "one query"),
        ((0, 4, 7, 8), (224, 8, 32, 1), "nothing"),
        ((2, 4, 7, 12), (336, 12, 48, 1), "a width that is no multiple of eight"),
        ((2, 4, 7, 136), (3808, 136, 544, 1), "wide heads"),
        ((1, 1, 50_000, 8), (400_000, 8, 8, 1), "too much workspace"),
        ((2, 4, 7, 8), (0, 8, 32, 1), "expanded"),
        ((2, 4, 7, 8), (252, 9, 36, 1), "unaligned"),
        ((2, 4, 7, 8), (224, 56, 1, 7), "transposed"),
    ],
)
def test_what_cudnn_has_no_backward_for(shape: tuple[int, ...], strides: tuple[int, ...], what: str) -> None:
    layout = ordered._Layout(shape, strides)
    assert ordered._expected(layout, layout, layout, torch.bfloat16) is None, what


class FakeFrontend:
    """cuDNN's frontend, as far as a plan calls it.

    Attributes:
        asked: arguments of `sdpa_backward`.
        made: arguments of `tensor`.
        runs: the streams of all runs.
    """

    cudnnGraphNotSupportedError = NotImplementedError  # noqa: N815
    data_type = SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32")
    heur_mode = SimpleNamespace(A=0, FALLBACK=1)

    def __init__(self, is_supported: bool = True) -> None:
        self._is_supported, self._stream, self._is_running = is_supported, None, False
        self.asked: dict[str, Any] = {}
        self.made: list[dict[str, Any]] = []
        self.runs: list[int] = []

    def create_handle(self) -> str:
        return "handle"

    def set_stream(self, *, handle: str, stream: int) -> None:
        self._stream = stream

    def pygraph(self, **options: Any) -> FakeFrontend:
        assert options["io_data_type"] == "bf16" and options["compute_data_type"] == "fp32"
        return self

    def tensor(self, **layout: Any) -> str:
        self.made.append(layout)
        return f"tensor {len(self.made)}"

    def sdpa_backward(self, **arguments: Any) -> list[Any]:
        self.asked = arguments
        return [FakeOutput() for _ in range(3)]

    def check_support(self) -> None:
        if not self._is_supported:
            raise self.cudnnGraphNotSupportedError("no engine")

    def create_execution_plans(self, modes: list[int]) -> None:
        assert modes == [0, 1]

    def get_workspace_size(self) -> int:
        return 64

    def execute(self, tensors: dict[Any, Tensor], workspace: int, *, handle: str) -> None:
        assert len(tensors) == 9 and workspace and handle == "handle"
        assert not self._is_running, "a handle is used by two threads at a time"
        self._is_running, stream = True, self._stream
        time.sleep(0.01)
        assert self._stream == stream, "a run's stream was changed by another one"
        self._is_running = False
        self.runs.append(stream)

    def validate(self) -> None: ...
    def build_operation_graph(self) -> None: ...
    def build_plans(self) -> None: ...


class FakeOutput:
    """A result of a graph; it knows the layout that it was given."""

    def set_output(self, value: bool) -> FakeOutput:
        assert value
        return self

    def set_dim(self, shape: list[int]) -> FakeOutput:
        self.shape = shape
        return self

    def set_stride(self, strides: list[int]) -> FakeOutput:
        self.strides = strides
        return self


QUERY = ordered._Layout((2, 4, 7, 8), (224, 8, 32, 1))
KEY = ordered._Layout((2, 2, 7, 8), (112, 8, 16, 1))
STATISTICS = ordered._Layout((2, 4, 7, 1), (28, 7, 1, 1))
LAYOUTS = (QUERY, KEY, KEY, QUERY, QUERY, STATISTICS, QUERY, KEY, KEY)
WANTED = ordered._Wanted(torch.bfloat16, LAYOUTS, SCALE, True)


class Captures:
    """A device whose stream is captured, or not; each thread has a stream of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, frontend: FakeFrontend) -> None:
        self.is_on = False
        monkeypatch.setattr(ordered, "bindings", lambda: frontend)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_on)
        monkeypatch.setattr(
            torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=threading.get_ident())
        )
        self.context = ordered._Context(torch.device("cpu"))


def test_cudnn_is_asked_for_the_ordered_algorithm(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = FakeFrontend()
    plan = Captures(monkeypatch, frontend).context.plan(WANTED)
    assert plan is not None
    assert frontend.asked["use_deterministic_algorithm"] is True
    assert frontend.asked["use_causal_mask"] is True and frontend.asked["attn_scale"] == SCALE
    assert [each["data_type"] for each in frontend.made] == [*["bf16"] * 5, "fp32"]
    assert [each["stride"] for each in frontend.made] == [list(layout.strides) for layout in LAYOUTS[:6]]
    assert [output.strides for output in plan.names[6:]] == [list(layout.strides) for layout in LAYOUTS[6:]]


def test_a_plan_is_neither_made_nor_first_run_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    captures = Captures(monkeypatch, FakeFrontend())
    context, operands = captures.context, [torch.empty(0)] * 9
    captures.is_on = True
    assert context.plan(WANTED) is None
    captures.is_on = False
    plan = context.plan(WANTED)
    assert plan is not None
    captures.is_on = True
    assert context.plan(WANTED) is None
    captures.is_on = False
    context.run(plan, operands)
    captures.is_on = True
    assert context.plan(WANTED) is plan


def test_threads_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend = FakeFrontend()
    context = Captures(monkeypatch, frontend).context
    plan = context.plan(WANTED)
    assert plan is not None
    threads = [
        threading.Thread(target=context.run, args=(plan, [torch.empty(0)] * 9), daemon=True) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(frontend.runs) == sorted(thread.ident or 0 for thread in threads)


def test_what_cudnn_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward asks before; a backward that gets there all the same says how to go on."""
    context = Captures(monkeypatch, FakeFrontend(is_supported=False)).context
    assert context.plan(WANTED) is None
    monkeypatch.setattr(ordered, "_context", lambda device: context)
    monkeypatch.setattr(ordered, "_attention_backward", ordered.launch)
    operands = [x.bfloat16() for x in Case(4, 2, False).operands]
    with pytest.raises(RuntimeError, match=r"enable_cudnn_sdp\(False\)"):
        ordered.attention_backward(*operands, scale=SCALE, is_causal=False)


def test_without_a_gpu_attention_stays_with_torch() -> None:
    query = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    assert not ordered.is_ordered(query, query, query, scale=SCALE, is_causal=True)
