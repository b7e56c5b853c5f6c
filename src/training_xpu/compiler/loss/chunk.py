"""Loss and gradient of one chunk of logits, in place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

# fp32 bytes that are worked on at once: by one thread of a CPU, so that they stay in its cache over the dozen passes,
# and elsewhere, where each operation costs a launch.
CACHED_BYTES = 2**20
LAUNCHED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Options:
    """See `linear_cross_entropy`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    softcap: float | None = None
    logit_scale: float = 1.0


@dataclass
class ChunkLoss:
    """What is the same for all chunks."""

    options: Options
    with_gradient: bool
    precise: torch.dtype  # of everything but the GEMMs
    _scratch: torch.Tensor | None = None

    def rows_at_once(self, logits: torch.Tensor) -> int:
        row = 4 * max(1, logits.shape[1])
        if (
            logits.device.type != "cpu" or type(logits) is not torch.Tensor
        ):  # fake ones are traced operation by operation
            return max(1, LAUNCHED_BYTES // row)
        return max(1, CACHED_BYTES // row) * torch.get_num_threads()

    def scratch(self, logits: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, V] in fp32 for values that are not to be rounded in between."""
        if self._scratch is None or self._scratch.shape[0] < rows:
            self._scratch = torch.empty(rows, logits.shape[1], dtype=self.precise, device=logits.device)
        return self._scratch[:rows]


def chunk_loss(
    chunk: ChunkLoss, logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None, losses: torch.Tensor
) -> None:
    """Writes each row's loss to `losses`, and over the logits, where gradients are needed, the gradient of their sum.

    Args:
        logits: [rows, V], in the dtype of the GEMMs; destroyed.
        targets: [rows], in [0, V).
        mask: [rows]; rows where it is false have no loss and no gradient. None: all have.
        losses: [rows].
    """
    step = chunk.rows_at_once(logits)
    for start in range(0, logits.shape[0], step):
        part = slice(start, min(start + step, logits.shape[0]))
        few = logits[part]
        if few.dtype == chunk.precise:
            _rows(chunk, few, targets[part], None if mask is None else mask[part], losses[part])
            continue
        values = chunk.scratch(logits, min(step, logits.shape[0]))[: few.shape[0]]
        values.copy_(few)
        _rows(chunk, values, targets[part], None if mask is None else mask[part], losses[part])
        if chunk.with_gradient:
            few.copy_(values)


def _rows(
    chunk: ChunkLoss, x: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None, losses: torch.Tensor
) -> None:
    options, smoothing = chunk.options, chunk.options.label_smoothing
    where = targets.unsqueeze(1)
    if options.logit_scale != 1.0:
        x.mul_(options.logit_scale)
    slope = None
    if options.softcap is not None:
        x.div_(options.softcap).tanh_()
        if chunk.with_gradient:
            slope = torch.square(x).neg_().add_(1.0)
        x.mul_(options.softcap)
    at_target = x.gather(1, where).squeeze(1)
    mean = x.mean(1) if smoothing else None
    largest = x.amax(1, keepdim=True)
    total = x.sub_(largest).exp_().sum(1)  # less passes than log_softmax and exp, measured
    normaliser = total.log().add_(largest.squeeze(1))
    torch.sub(normaliser, at_target, alpha=1.0 - smoothing, out=losses)
    if mean is not None:
        losses.sub_(mean, alpha=smoothing)
    if options.z_loss:
        losses.addcmul_(normaliser, normaliser, value=options.z_loss)
    if mask is not None:
        losses.masked_fill_(~mask, 0.0)
    if not chunk.with_gradient:
        return
    factor = total.reciprocal_()
    if options.z_loss:
        factor.mul_(normaliser.mul_(2.0 * options.z_loss).add_(1.0))
    x.mul_(factor.unsqueeze(1))
    if smoothing:
        x.sub_(smoothing / x.shape[1])
    x.scatter_add_(1, where, x.new_full((), smoothing - 1.0).expand(where.shape))
    if slope is not None:
        x.mul_(slope)
    if options.logit_scale != 1.0:
        x.mul_(options.logit_scale)
    if mask is not None:
        x.masked_fill_(~mask.unsqueeze(1), 0.0)
