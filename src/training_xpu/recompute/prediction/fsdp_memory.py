"""Memory of FSDP2 (torch 2.13, distributed/fsdp/_fully_shard): each block a group, the rest one at the root."""

from __future__ import annotations

from training_xpu.recompute.prediction.engine_memory import EngineMemory

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


class FsdpMemory(EngineMemory):
    """Every rank has a slice of each fp32 parameter along its first dimension, padded to equal size.

    A group's parameters are gathered into one flat buffer and copied out of it. In a forward the buffer lives until the
    next group has been gathered; in a backward the group before is gathered while a block runs
    (_fsdp_param_group.py, `unshard`, `wait_for_unshard`, `pre_backward`).
    """

    def set_up(self) -> None:
        weights, setting = self.weights, self.setting
        inside: set[int] = set()
        groups: list[list[int]] = []
        for block in weights.blocks:
            groups.append([i for i in block if i not in inside])
            inside.update(block)
        groups.append([i for i in range(len(weights.all)) if i not in inside])
        self.groups = groups
        self.root = len(groups) - 1
        self.width = setting.element_bytes
        self.casts = setting.dtype != "fp32"
        self.reduce_width = _BYTES[setting.reduce_dtype] if self.casts else 4
        slices = [self._slice(i) for i in range(len(weights.all))]
        self.padded = [sum(slices[i] for i in group) for group in groups]  # elements per rank
        self.trained = [sum(slices[i] for i in group if weights.all[i].trained) for group in groups]
        self.ledger.keep(4 * sum(self.padded))
        self.optimizer = self.optimizer_of([self._local_shape(i) for i in weights.trained])
        self.ledger.keep(self.optimizer.states)
        self.flat: dict[int, int] = {}  # group -> bytes of the buffer it has been gathered into
        self.whole: dict[int, int] = {}  # group -> bytes of its parameters, gathered
        self.held = 0  # the buffer of the last gather in a forward
        self.reducing = 0  # input of the last reduce-scatter
        self.gradients_of: dict[int, int] = {}  # group -> bytes of gradients of the running backward
        self.unreduced: dict[int, int] = {}  # group -> bytes of gradients of earlier micro batches

    def _slice(self, index: int) -> int:
        """Elements of a padded slice (_fsdp_param.py, `_init_sharded_param`)."""
        shape = self.weights.all[index].shape
        if not shape:
            return 1
        rest = self.weights.all[index].numel // max(1, shape[0])
        return -(-shape[0] // self.setting.world_size) * rest

    def _local_shape(self, index: int) -> tuple[int, ...]:
        """Of the first rank, whose slice is full."""
        shape = self.weights.all[index].shape
        return (-(-shape[0] // self.setting.world_size), *shape[1:]) if shape else ()

    def _gather(self, group: int) -> None:
        """`foreach_all_gather`"""
        if group in self.flat or group in self.whole or not self.padded[group]:
            return
        if self.setting.world_size == 1:
            self.flat[group] = 0
            return
        cast = self.width * self.padded[group] if self.casts else 0
        self.ledger.communicate(cast)
        self.flat[group] = self.width * self.padded[group] * self.setting.world_size
        self.ledger.communicate(self.flat[group])
        self.gloo_copies(self.flat[group])
        self.ledger.communicate(-cast)

    def _copy_out(self, group: int, forward: bool) -> None:
        """`wait_for_unshard`"""
        if group not in self.flat:
            return
        if forward:
            self.ledger.communicate(-self.held)
            self.held = 0
        self.whole[group] = self.width * self.padded[group] * self.setting.world_size
        self.ledger.communicate(self.whole[group])
        flat = self.flat.pop(group)
        if forward:
            self.held = flat
        else:
            self.ledger.communicate(-flat)

    def _reshard(self, group: int) -> None:
        self.ledger.communicate(-self.whole.pop(group, 0))

    def start_micro_batch(self, first: bool, last: bool) -> None:
        super().start_micro_batch(first, last)
        self._gather(self.root)
        self._copy_out(self.root, forward=True)

    def before_block(self, index: int) -> None:
        self._gather(index)
        self._copy_out(index, forward=True)

    def after_block(self, index: int) -> None:
        if self.setting.reshard_after_forward:
            self._reshard(index)

    def end_forward(self) -> None:
        self.ledger.communicate(-self.held)
        self.held = 0
        self._gather(self.root)
        self._copy_out(self.root, forward=False)
        if self.root:
            self._gather(self.root - 1)

    def before_block_backward(self, index: int) -> None:
        self._gather(index)
        self._copy_out(index, forward=False)
        if index:
            self._gather(index - 1)

    def after_block_backward(self, index: int) -> None:
        self._after_backward(index)

    def gradient(self, index: int) -> None:
        """Gradients in the compute dtype stay on the gathered parameters until their group's backward has ended."""
        group = next((g for g, members in enumerate(self.groups) if index in members), self.root)
        size = self.weights.all[index].numel * self.width
        if self.width == self.reduce_width and group in self.unreduced and not self.first:
            return  # added to the one that is there
        self.ledger.take_over(size)
        self.gradients_of[group] = self.gradients_of.get(group, 0) + size

    def _after_backward(self, group: int) -> None:
        """`post_backward`, _fsdp_collectives.py `foreach_reduce`"""
        fresh = self.gradients_of.pop(group, 0)
        earlier = self.unreduced.pop(group, 0)
        if not self.last:
            self._reshard(group)
            if self.width == self.reduce_width:
                self.unreduced[group] = earlier + fresh
            elif earlier:
                self.ledger.keep(-fresh)
                self.unreduced[group] = earlier
            else:
                self.unreduced[group] = fresh // self.width * self.reduce_width
                self.ledger.keep(self.unreduced[group])
                self.ledger.keep(-fresh)
            return
        if earlier and fresh and self.width != self.reduce_width:
            self.ledger.keep(-fresh)
            fresh = 0
        self._reshard(group)
        self.ledger.communicate(-self.reducing)
        self.reducing = 0
        if not self.trained[group]:
            return
        self.reducing = self.reduce_width * self.trained[group] * self.setting.world_size
        self.ledger.communicate(self.reducing)
        # A loop variable of `foreach_reduce` holds the last gradient until it returns.
        held = self._last_gradient(group) if earlier or fresh else 0
        self.ledger.keep(-(fresh + earlier) + held)
        reduced = self.reduce_width * self.trained[group]
        self.ledger.keep(reduced)
        self.gloo_copies(self.reducing)
        self.ledger.keep(-held)
        if self.reduce_width != 4:
            self.ledger.keep(4 * self.trained[group])
            self.ledger.keep(-reduced)
            reduced = 4 * self.trained[group]
        self.gradients += reduced

    def _last_gradient(self, group: int) -> int:
        trained = [i for i in self.groups[group] if self.weights.all[i].trained]
        width = self.width if self.setting.gradient_accumulation == 1 else self.reduce_width
        return self.weights.all[trained[-1]].numel * width

    def end_backward(self) -> None:
        for group in range(self.root):  # whose inputs need no gradient
            if group in self.whole or group in self.gradients_of:
                self._after_backward(group)
        self._after_backward(self.root)
        self.ledger.communicate(-self.reducing)
        self.reducing = 0
