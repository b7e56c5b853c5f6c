"""A linear layer and cross-entropy as one operation that never holds the fp32 logits of all rows.

Prior work: Liger Kernel (Hsu et al., "Liger Kernel: Efficient Triton Kernels for LLM Training", arXiv:2410.10989,
2024) computes the gradient with the loss, chunk by chunk; Cut Cross-Entropy (Wijmans et al., "Cut Your Losses in
Large-Vocabulary Language Models", arXiv:2411.09009, 2024) never writes logits to memory at all, with kernels of its
own. Here plain GEMMs and elementwise operations do it, so that it runs on any device.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch

from training_xpu.compiler.loss.chunk import ChunkLoss, Options, chunk_loss
from training_xpu.compiler.loss.weight_gradient import WeightGradient

Reduction = Literal["mean", "sum"]

# fp32 bytes of one chunk's logits, and the fewest rows: below 256 rows the three GEMMs of a head with 128256 entries
# take 1.3 to 1.9 times as long per row (measured on one Sapphire Rapids core, fp32 and bf16).
CHUNK_BYTES = 64 * 2**20
FEWEST_ROWS = 256


class _Settings(NamedTuple):
    options: Options
    ignore_index: int
    rows: int | None
    compute: torch.dtype  # of the GEMMs
    mean: bool
    divisor: torch.Tensor | float | None
    needs: tuple[bool, bool, bool]  # whether hidden, weight and bias get a gradient


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    reduction: Reduction = "mean",
    divisor: torch.Tensor | float | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """`cross_entropy(softcap(logit_scale * linear(hidden, weight, bias)), labels)`, in chunks of rows.

    The gradients are computed together with the loss, so that no GEMM is done twice, from differences of probability
    and target that are not normalised yet: in fp16 they do not vanish. Under autocast the GEMMs run in its dtype, as
    `linear` would, and the rest in fp32. The gradient of a weight in less than fp32 is summed over chunks in fp32.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V] or None.
        labels: [N], int64; rows with `ignore_index` count neither in the loss nor in its mean.
        label_smoothing: share of the target that is spread over all V entries, from 0 to 1.
        z_loss: factor of log(sum(exp(logits))) ** 2, added to each row's loss (Chowdhery et al., "PaLM", 2022).
        softcap: c turns logits x into c * tanh(x / c), after `logit_scale` (Gemma 2).
        reduction: the sum over rows, or that divided by the number of rows that count.
        divisor: what the sum is divided by, whatever `reduction` says, such as the tokens of all micro batches.
        rows: of one chunk; None: chosen from V, H and the dtype.

    Returns:
        The loss, 0-dimensional, in fp32, or fp64 for fp64 logits. As from `torch.nn.functional.cross_entropy`, a mean
        over no rows is nan with zero gradients.

    Raises:
        ValueError: shapes do not fit, or an option is out of range.
        TypeError: labels are not int64.
        IndexError: on CPUs, a label is neither `ignore_index` nor in [0, V).
        RuntimeError: when gradients of the gradients are asked for.
    """
    _check(hidden, weight, bias, labels)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is 'mean' or 'sum', not {reduction!r}")
    if not 0.0 <= label_smoothing <= 1.0:
        raise ValueError(f"label_smoothing is between 0 and 1, not {label_smoothing}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is positive, not {softcap}")
    if rows is not None and rows < 1:
        raise ValueError(f"rows is at least 1, not {rows}")
    device_type = hidden.device.type
    compute = hidden.dtype
    if torch.is_autocast_enabled(device_type) and compute != torch.float64:
        compute = torch.get_autocast_dtype(device_type)
    with_grad = torch.is_grad_enabled()
    settings = _Settings(
        options=Options(label_smoothing, z_loss, softcap, logit_scale),
        ignore_index=ignore_index,
        rows=rows,
        compute=compute,
        mean=reduction == "mean",
        divisor=divisor,
        needs=(
            with_grad and hidden.requires_grad,
            with_grad and weight.requires_grad,
            with_grad and bias is not None and bias.requires_grad,
        ),
    )
    loss: torch.Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, labels, settings)  # type: ignore[no-untyped-call]
    return loss


def _check(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, labels: torch.Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} are no [N, H] and [V, H]")
    if labels.shape != hidden.shape[:1]:
        raise ValueError(f"labels {tuple(labels.shape)} are not one for each of {hidden.shape[0]} rows")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} is not one for each of {weight.shape[0]} entries")
    if labels.dtype != torch.int64:
        raise TypeError(f"labels are int64, not {labels.dtype}")


def rows_per_chunk(count: int, vocabulary: int, width: int, compute: torch.dtype, trained: bool) -> int:
    """Rows of one chunk.

    In fp32 the GEMM of the weight's gradient adds to what is there, so that small chunks cost nothing. In bf16 and fp16
    each chunk costs a pass over an fp32 gradient, as long as the GEMMs of about 325 rows (measured); so chunks have up
    to 2 H rows, with which the buffer, 4 V H bytes, is no larger than that gradient, and which is not needed where all
    rows fit.

    Args:
        count: rows in all.
        trained: whether the weight gets a gradient.
    """
    rows = max(CHUNK_BYTES // (4 * max(vocabulary, 1)), FEWEST_ROWS)
    if trained and compute.itemsize < 4:
        rows = max(rows, 2 * width)
    chunks = max(1, math.ceil(count / rows))
    return max(1, math.ceil(count / chunks))


class _Parts(NamedTuple):
    """What is computed in the forward."""

    losses: torch.Tensor  # sum over rows
    hidden: torch.Tensor | None  # gradient of the sum
    weight: torch.Tensor | None  # the same, already multiplied with `folded`, if that is known
    bias: torch.Tensor | None


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        labels: torch.Tensor,
        settings: _Settings,
    ) -> torch.Tensor:
        valid = labels != settings.ignore_index
        # A fake tensor or an accelerator cannot tell, or only after a wait, how many rows count.
        known = labels.device.type == "cpu" and type(labels) is torch.Tensor
        index = None
        if known:
            chosen = labels[valid] if not bool(valid.all()) else labels
            if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < weight.shape[0]:
                wrong = chosen[(chosen < 0) | (chosen >= weight.shape[0])][0]
                raise IndexError(f"Target {int(wrong)} is out of bounds.")
            if chosen is not labels:
                index = valid.nonzero().flatten()
            targets, mask = chosen, None
        else:
            targets, mask = labels.where(valid, 0), valid
        count: torch.Tensor | float = targets.numel() if known else valid.sum()
        divisor = settings.divisor
        if divisor is None:
            divisor = count if settings.mean else 1.0
        elif isinstance(divisor, torch.Tensor):
            divisor = divisor.detach().to(hidden.device)
        folded = _foldable(divisor)
        with torch.autocast(hidden.device.type, enabled=False):
            parts = _run(hidden, weight, bias, targets, mask, index, settings, folded)
        ctx.device_type = hidden.device.type
        ctx.divisor, ctx.folded, ctx.empty = divisor, folded, known and targets.numel() == 0
        ctx.count = None if known else count
        ctx.weight_dtype = weight.dtype
        ctx.save_for_backward(parts.hidden, parts.weight, parts.bias)
        # A tensor, so that dividing by zero gives nan as it does in torch.
        return parts.losses / divisor if isinstance(divisor, torch.Tensor) else parts.losses / torch.tensor(divisor)

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError("the chunked cross-entropy has no gradients of gradients (create_graph=True)")
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        if ctx.empty:
            return grad_hidden, None if grad_weight is None else grad_weight.to(ctx.weight_dtype), grad_bias, None, None
        scale = grad_output / ctx.divisor
        if ctx.count is not None:
            scale = scale.where(ctx.count > 0, 0.0)
        # In place where nobody can come for these gradients again: the weight's is the largest tensor here.
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        of_weight = grad_output if ctx.folded else scale
        grads = [
            None if g is None else _scaled(g, factor, keep)
            for g, factor in ((grad_hidden, scale), (grad_weight, of_weight), (grad_bias, scale))
        ]
        if grads[1] is not None:
            grads[1] = grads[1].to(ctx.weight_dtype)
        return grads[0], grads[1], grads[2], None, None


def _foldable(divisor: torch.Tensor | float) -> float | None:
    """1 / divisor, where it is known without waiting for a device, and not zero or infinite."""
    if isinstance(divisor, torch.Tensor):
        if divisor.device.type != "cpu" or type(divisor) is not torch.Tensor or divisor.numel() != 1:
            return None
        divisor = float(divisor)
    return 1.0 / divisor if divisor and math.isfinite(divisor) else None


def _scaled(gradient: torch.Tensor, factor: torch.Tensor, keep: bool) -> torch.Tensor:
    if factor.device.type == "cpu" and type(factor) is torch.Tensor and float(factor) == 1.0:
        return gradient
    if keep:
        return torch.mul(gradient, factor.reshape(1)).to(gradient.dtype)
    if factor.device.type == "cpu":
        return gradient.mul_(factor)
    # With one dimension it is not rounded to the gradient's dtype first, as a number from an accelerator would be.
    return torch.mul(gradient, factor.reshape(1), out=gradient)


def _run(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    mask: torch.Tensor | None,
    index: torch.Tensor | None,
    settings: _Settings,
    folded: float | None,
) -> _Parts:
    """Loss and gradients of the rows `index` of hidden, or of all; where `mask` is false a row counts as zero."""
    of_hidden, of_weight, of_bias = settings.needs
    compute = settings.compute
    precise = torch.float64 if compute == torch.float64 else torch.float32
    vocabulary, width = weight.shape
    matrix = weight.to(compute)
    addition = None if bias is None else bias.to(compute)
    count = targets.numel()
    rows = settings.rows or rows_per_chunk(count, vocabulary, width, compute, of_weight)
    rows = max(1, min(rows, count))
    grad_hidden = torch.empty_like(hidden) if index is None else torch.zeros_like(hidden)
    summed = WeightGradient(weight, compute, folded, single=rows >= count) if of_weight else None
    grad_bias = torch.zeros(vocabulary, dtype=precise, device=weight.device) if of_bias else None
    losses = torch.zeros(count, dtype=precise, device=hidden.device)
    buffer = torch.empty(rows, vocabulary, dtype=compute, device=hidden.device)
    chunk = ChunkLoss(settings.options, any(settings.needs), precise)
    for start in range(0, count, rows):
        part = slice(start, min(start + rows, count))
        of = part if index is None else index[part]
        inputs = hidden[of].to(compute)
        logits = buffer[: inputs.shape[0]]
        if addition is None:
            torch.mm(inputs, matrix.t(), out=logits)
        else:
            torch.addmm(addition, inputs, matrix.t(), out=logits)
        chunk_loss(chunk, logits, targets[part], None if mask is None else mask[part], losses[part])
        if of_hidden:
            if grad_hidden.dtype == compute and index is None:
                torch.mm(logits, matrix, out=grad_hidden[of])
            else:
                grad_hidden[of] = torch.mm(logits, matrix).to(grad_hidden.dtype)
        if summed is not None:
            summed.add(logits, inputs)
        if grad_bias is not None:
            grad_bias += logits.sum(0, dtype=precise)
    return _Parts(
        losses.sum(),
        grad_hidden if of_hidden else None,
        None if summed is None else summed.result(),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )
