"""linear_cross_entropy against torch's cross_entropy of full logits, in value, gradient and every option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from training_xpu.compiler.loss import chunk
from training_xpu.compiler.loss.linear_cross_entropy import linear_cross_entropy, rows_per_chunk

N, H, V = 37, 16, 101
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def inputs(dtype: torch.dtype, bias: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(N, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).mul_(0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randn(V, generator=generator).to(dtype).requires_grad_() if bias else None


def labels(ignored: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(6)
    drawn = torch.randint(0, V, (N,), generator=generator)
    return drawn.masked_fill(torch.rand(N, generator=generator) < ignored, -100)


def reference(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str = "mean",
    divisor: Any = None,
    **options: Any,
) -> torch.Tensor:
    logits = F.linear(hidden.double(), weight.double(), None if bias is None else bias.double()) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    count = (target != options.get("ignore_index", -100)).sum()
    kept = target != options.get("ignore_index", -100)
    loss = F.cross_entropy(logits, target, reduction="sum", **options)
    loss = loss + z_loss * (torch.logsumexp(logits, 1).square() * kept).sum()
    if divisor is not None:
        return loss / divisor
    return loss / count if reduction == "mean" else loss


def compare(tolerance: float, tensors: Any, target: torch.Tensor, rows: int | None = None, **options: Any) -> None:
    found = linear_cross_entropy(*tensors, target, rows=rows, **options)
    leaves = [t for t in tensors if t is not None and t.requires_grad]
    grads = torch.autograd.grad(found * 3.0, leaves)
    wanted = reference(*tensors, target, **options)
    expected = torch.autograd.grad(wanted * 3.0, leaves)
    assert abs(float(found.detach()) - float(wanted.detach())) <= tolerance * abs(float(wanted.detach()))
    for leaf, grad, right in zip(leaves, grads, expected, strict=True):
        assert grad.dtype == leaf.dtype
        assert float((grad.double() - right.double()).norm()) <= tolerance * float(right.double().norm())


def test_a_case_worked_by_hand() -> None:
    hidden = torch.tensor([[1.0], [2.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [math.log(3.0)]], requires_grad=True)
    # Logits (0, ln 3) and (0, 2 ln 3): probabilities (1/4, 3/4) and (1/10, 9/10).
    loss = linear_cross_entropy(hidden, weight, None, torch.tensor([0, 1]))
    assert float(loss.detach()) == pytest.approx((math.log(4) + math.log(10 / 9)) / 2)
    loss.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.flatten().tolist() == pytest.approx([0.375 * math.log(3), -0.05 * math.log(3)])
    assert weight.grad.flatten().tolist() == pytest.approx([-0.275, 0.275])


@pytest.mark.parametrize("rows", [None, 1, 8, N, 1000])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_dtypes_and_chunks(dtype: torch.dtype, rows: int | None) -> None:
    compare(TOLERANCE[dtype], inputs(dtype, bias=True), labels(), rows)


@pytest.mark.parametrize(
    "options",
    [
        {"label_smoothing": 0.1},
        {"z_loss": 1e-2},
        {"softcap": 2.0},
        {"logit_scale": 0.3},
        {"reduction": "sum"},
        {"divisor": 11},
        {"divisor": torch.tensor(11)},
        {"divisor": torch.tensor([11.0]).squeeze(), "reduction": "sum"},
        {"ignore_index": 7},
        {"label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 3.0, "logit_scale": 0.7, "divisor": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_options(dtype: torch.dtype, options: dict[str, Any]) -> None:
    target = labels()
    if "ignore_index" in options:
        target = target.masked_fill(target == -100, options["ignore_index"])
    compare(TOLERANCE[dtype], inputs(dtype), target, 8, **options)


@pytest.mark.parametrize("ignored", [0.0, 0.95])
def test_share_of_ignored_rows(ignored: float) -> None:
    compare(TOLERANCE[torch.float32], inputs(torch.float32), labels(ignored), 8)


@pytest.mark.parametrize("trained", [(True, False), (False, True)])
def test_only_one_of_both_is_trained(trained: tuple[bool, bool]) -> None:
    hidden, weight, _ = inputs(torch.float32)
    compare(2e-6, (hidden.requires_grad_(trained[0]), weight.requires_grad_(trained[1]), None), labels(), 8)


def test_neither_is_trained() -> None:
    hidden, weight, _ = inputs(torch.float32)
    found = linear_cross_entropy(hidden.detach(), weight.detach(), None, labels())
    assert not found.requires_grad
    with torch.no_grad():
        assert torch.equal(found, linear_cross_entropy(hidden, weight, None, labels()))
    torch.testing.assert_close(found.double(), reference(hidden, weight, None, labels()).detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_computes_in_its_dtype(dtype: torch.dtype) -> None:
    hidden, weight, bias = inputs(torch.float32, bias=True)
    with torch.autocast("cpu", dtype=dtype):
        found = linear_cross_entropy(hidden, weight, bias, labels(), rows=8)
        plain = F.cross_entropy(F.linear(hidden, weight, bias).float(), labels())
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=0)
    wanted = torch.autograd.grad(plain, [hidden, weight])
    for grad, right in zip(torch.autograd.grad(found, [hidden, weight]), wanted, strict=True):
        assert grad.dtype == torch.float32
        assert float((grad - right).norm()) < TOLERANCE[dtype] * float(right.norm())


def test_small_differences_do_not_vanish_in_fp16() -> None:
    hidden, weight, _ = inputs(torch.float16)
    found = linear_cross_entropy(hidden, weight, None, labels(), divisor=2.0**20, rows=8)
    wanted = reference(hidden, weight, None, labels(), divisor=2.0**20)
    for grad, right in zip(
        torch.autograd.grad(found * 2.0**20, [hidden, weight]),
        torch.autograd.grad(wanted * 2.0**20, [hidden, weight]),
        strict=True,
    ):
        assert float((grad.double() - right.double()).norm()) < 3e-3 * float(right.double().norm())


def test_the_weight_of_a_tied_embedding_gets_both_gradients() -> None:
    weight = inputs(torch.float32)[1].detach()
    tokens = torch.randint(0, V, (N,), generator=torch.Generator().manual_seed(1))
    results = []
    for function in (linear_cross_entropy, reference):
        leaf = weight.clone().requires_grad_()
        function(torch.tanh(F.embedding(tokens, leaf)), leaf, None, labels()).backward()
        assert leaf.grad is not None
        results.append(leaf.grad)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("rows", [0, 4])
def test_nothing_counts(rows: int, reduction: str, smoothing: float) -> None:
    target = torch.full((rows,), -100)
    found = []
    for chunked in (True, False):
        hidden = torch.randn(rows, H, requires_grad=True, generator=torch.Generator().manual_seed(1))
        weight = torch.ones(V, H, requires_grad=True)
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
        if chunked:
            loss = linear_cross_entropy(hidden, weight, None, target, **options)
        else:
            loss = F.cross_entropy(F.linear(hidden, weight), target, **options)
        loss.backward()
        found.append([loss.detach(), hidden.grad, weight.grad])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, equal_nan=True)


def test_gradients_can_be_asked_for_twice_but_not_differentiated() -> None:
    hidden, weight, _ = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, None, labels())
    first = torch.autograd.grad(loss * 2, [hidden, weight], retain_graph=True)
    kept = [g.clone() for g in first]
    again = torch.autograd.grad(loss * 4, [hidden, weight])
    for one, two, before in zip(first, again, kept, strict=True):
        assert torch.equal(one, before)
        torch.testing.assert_close(two, 2 * one)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(loss, [hidden])
    loss = linear_cross_entropy(hidden, weight, None, labels())
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        torch.autograd.grad(loss, [hidden], create_graph=True)


def test_wrong_input_is_named() -> None:
    hidden, weight, _ = inputs(torch.float32)
    right = labels()
    for target in (torch.tensor([V] * N), torch.tensor([-1] * N)):
        with pytest.raises(IndexError, match=r"Target -?\d+ is out of bounds"):
            linear_cross_entropy(hidden, weight, None, target)
    with pytest.raises(TypeError, match="int64"):
        linear_cross_entropy(hidden, weight, None, right.int())
    for arguments in (
        (hidden, weight.t(), None, right),
        (hidden, weight, None, right[1:]),
        (hidden, weight, right, right),
    ):
        with pytest.raises(ValueError):
            linear_cross_entropy(*arguments)
    bad: list[dict[str, Any]] = [{"reduction": "none"}, {"label_smoothing": 2.0}, {"softcap": 0.0}, {"rows": 0}]
    for options in bad:
        with pytest.raises(ValueError):
            linear_cross_entropy(hidden, weight, None, right, **options)


def test_a_mask_does_what_leaving_rows_out_does() -> None:
    """The path of accelerators, where nobody waits to learn how many rows count."""
    logits = torch.randn(N, V, generator=torch.Generator().manual_seed(2))
    target = labels()
    valid = target != -100
    of = chunk.ChunkLoss(chunk.Options(z_loss=0.1, label_smoothing=0.1), True, torch.float32)
    masked, losses = logits.clone(), torch.zeros(N)
    chunk.chunk_loss(of, masked, target.where(valid, 0), valid, losses)
    kept, kept_losses = logits[valid], torch.zeros(int(valid.sum()))
    chunk.chunk_loss(of, kept, target[valid], None, kept_losses)
    assert torch.equal(losses[valid], kept_losses)
    assert torch.equal(masked[valid], kept)
    assert not losses[~valid].any()
    assert not masked[~valid].any()


def test_fake_tensors_take_the_same_path() -> None:
    with FakeTensorMode():
        hidden = torch.empty(N, H, requires_grad=True)
        weight = torch.empty(V, H, requires_grad=True)
        loss = linear_cross_entropy(hidden, weight, None, torch.empty(N, dtype=torch.long))
        loss.backward()
        assert loss.shape == ()
        assert hidden.grad is not None
        assert weight.grad is not None
        assert weight.grad.shape == (V, H)


class LargestTensor(TorchDispatchMode):
    """The most rows any operation has given with this last dimension, the transposed weight aside."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.rows = last, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.ndim == 2 and made.shape[1] == self.last and made.shape[0] != H:
            self.rows = max(self.rows, made.shape[0])
        return made


def test_the_logits_of_all_rows_never_exist() -> None:
    hidden, weight, _ = inputs(torch.float32)
    with LargestTensor(V) as seen:
        linear_cross_entropy(hidden, weight, None, labels(), rows=4).backward()
    assert seen.rows <= 4


def test_chunks_are_bounded() -> None:
    assert rows_per_chunk(10**6, 32000, 4096, torch.float32, True) * 32000 * 4 <= 64 * 2**20
    assert rows_per_chunk(10**6, 128256, 4096, torch.float32, True) <= 256
    assert rows_per_chunk(10**6, 128256, 4096, torch.bfloat16, False) <= 256
    assert 4096 < rows_per_chunk(10**6, 128256, 4096, torch.bfloat16, True) <= 8192
    assert rows_per_chunk(300, 128256, 4096, torch.float32, True) == 150  # even chunks
    assert rows_per_chunk(0, 10, 4, torch.float32, True) == 1
