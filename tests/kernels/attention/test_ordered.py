"""The backward of attention whose bits repeat: its formula, its turns, and what cuDNN is asked for."""

from __future__ import annotations

from collections.abc import Iterator
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


class FakePlans:
    """Stands for cuDNN: computes each turn by the reference.

    Attributes:
        asked: the layouts of the turns.
    """

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def __call__(self, device: Any, dtype: Any, layouts: Any, scale: float, is_causal: bool) -> Any:
        self.asked.append(layouts)
        outer = self

        class Plan:
            def run(self, operands: list[Tensor]) -> None:
                assert [tuple(x.shape) for x in operands] == [layout.shape for layout in outer.asked[-1]]
                ordered.reference(*operands, scale, is_causal)  # type: ignore[arg-type]

        return Plan()


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> FakePlans:
    made = FakePlans()
    monkeypatch.setattr(ordered, "_plan", made)
    monkeypatch.setattr(ordered, "_attention_backward", ordered.launch)
    return made


@pytest.mark.parametrize(
    ("groups_that_fit", "turns"), [(0, 6), (1, 6), (2, 3), (3, 2), (5, 2), (6, 1), (9, 1)]
)
def test_heads_take_turns_so_that_scores_fit(
    groups_that_fit: int, turns: int, plans: FakePlans, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_a_group = 2 * 2 * 7 * 7 * 2
    monkeypatch.setattr(ordered, "WORKSPACE", groups_that_fit * bytes_a_group)
    case = Case(12, 6, True)
    case.require(ordered.attention_backward(*case.operands, scale=SCALE, is_causal=True))
    assert len(plans.asked) == turns


def test_a_gradient_of_other_strides_is_copied(plans: FakePlans) -> None:
    """One plan serves gradients of any strides, expanded ones too, of which cuDNN knows nothing."""
    case = Case(4, 2, False)
    case.operands[4] = case.operands[4].transpose(1, 2).contiguous().transpose(1, 2)
    case.require(ordered.attention_backward(*case.operands, scale=SCALE, is_causal=False))
    query, out, grad_out = (plans.asked[0][index] for index in (0, 3, 4))
    assert grad_out == out and query.strides == case.operands[0].stride()


def test_what_cudnn_does_not_have_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "_plan", lambda *args: None)
    monkeypatch.setattr(ordered, "_attention_backward", ordered.launch)
    case = Case(4, 2, False)
    with pytest.raises(RuntimeError, match=r"enable_cudnn_sdp\(False\)"):
        ordered.attention_backward(*case.operands, scale=SCALE, is_causal=False)


class FakeFrontend:
    """cuDNN's frontend, as far as a plan calls it.

    Attributes:
        asked: arguments of `sdpa_backward`.
        made: layouts of the inputs.
    """

    class cudnnGraphNotSupportedError(Exception):  # noqa: N801
        pass

    __version__ = "1.32"

    def __init__(self, is_supported: bool = True) -> None:
        self._is_supported = is_supported
        self.data_type = type("Types", (), {"BFLOAT16": "bf16", "HALF": "fp16", "FLOAT": "fp32"})
        self.heur_mode = type("Modes", (), {"A": 0, "FALLBACK": 1})
        self.asked: dict[str, Any] = {}
        self.made: list[dict[str, Any]] = []

    def pygraph(self, **options: Any) -> FakeFrontend:
        assert options["io_data_type"] == "bf16" and options["compute_data_type"] == "fp32"
        return self

    def create_handle(self) -> str:
        return "handle"

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
        return 0

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


@pytest.fixture
def no_plans_kept() -> Iterator[None]:
    ordered._plan.cache_clear()
    ordered._handle.cache_clear()
    yield
    ordered._plan.cache_clear()
    ordered._handle.cache_clear()


def test_cudnn_is_asked_for_the_ordered_algorithm(
    no_plans_kept: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    frontend = FakeFrontend()
    monkeypatch.setattr(ordered, "bindings", lambda: frontend)
    query = ordered._Layout((2, 4, 7, 8), (224, 8, 32, 1))
    key = ordered._Layout((2, 2, 7, 8), (112, 8, 16, 1))
    statistics = ordered._Layout((2, 4, 7, 1), (28, 7, 1, 1))
    layouts = (query, key, key, query, query, statistics, query, key, key)
    plan = ordered._plan(torch.device("cpu"), torch.bfloat16, layouts, SCALE, True)
    assert plan is not None
    assert frontend.asked["use_deterministic_algorithm"] is True
    assert frontend.asked["use_causal_mask"] is True and frontend.asked["attn_scale"] == SCALE
    assert [each["data_type"] for each in frontend.made] == [*["bf16"] * 5, "fp32"]
    assert [each["stride"] for each in frontend.made] == [list(layout.strides) for layout in layouts[:6]]
    assert [output.strides for output in plan._names[6:]] == [list(layout.strides) for layout in layouts[6:]]
    assert ordered._plan(torch.device("cpu"), torch.bfloat16, layouts, SCALE, True) is plan


def test_no_plan_where_cudnn_has_no_engine(no_plans_kept: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordered, "bindings", lambda: FakeFrontend(is_supported=False))
    layout = ordered._Layout((1, 1, 1, 8), (8, 8, 8, 1))
    assert ordered._plan(torch.device("cpu"), torch.bfloat16, (layout,) * 9, SCALE, True) is None


def test_without_a_gpu_attention_stays_with_torch() -> None:
    query = torch.randn(1, 2, 4, 8, dtype=torch.bfloat16)
    assert not ordered.is_ordered(query, query, query)
