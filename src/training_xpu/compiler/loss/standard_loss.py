"""Computes the standard loss of transformers' causal language models in chunks, without the model noticing.

The loss is computed inside the head's forward, where every engine has the head's weight gathered, and leaves it as the
head's output, so that an engine's hooks around that output see it and the weight is there in backward as well. After
these hooks deferred logits take its place. They record what the model does to them until its loss function, which is
replaced on the instance, recognises them and gives the loss that is already there; where anything is not as expected it
gives the plain loss of real logits instead.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from training_xpu.blocks import LOSS, class_names, publish, unwrap, withdraw
from training_xpu.compiler.loss.attached import HeadForward, LossFunction, running, steps
from training_xpu.compiler.loss.deferred import DeferredLogits, Source, scale_and_softcap
from training_xpu.compiler.loss.linear_cross_entropy import linear_cross_entropy
from training_xpu.compiler.loss.recognise import (
    Expected,
    autocast_dtype,
    close,
    guessed,
    not_standard,
    original,
    sharded,
    usable,
    version_of,
)
from training_xpu.instances import ABSENT, Hook

_MISSES = 2
_RARE_READS = 4  # one forward in so many may have its logits read, which costs as much as it saved

_installed: weakref.WeakKeyDictionary[torch.nn.Module, Installed] = weakref.WeakKeyDictionary()


@dataclass
class _Pending:
    source: Source
    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class _Habit:
    """What happened to the deferred logits, in training or in evaluation."""

    forwards: int = 0
    misses: int = 0
    reads: int = 0
    off: str | None = None  # why the plain path is taken

    def missed(self, reason: str) -> None:
        self.misses += 1
        if self.misses >= _MISSES:
            self.off = reason

    def read(self) -> None:
        self.reads += 1
        if self.reads >= _MISSES and self.reads * _RARE_READS >= self.forwards:
            self.off = "its logits are read"


def install(model: torch.nn.Module) -> Installed | str:
    """Has a model compute its loss in chunks from its next forward with labels on, and publishes that as `LOSS`.

    Where a forward turns out not to be as expected, the plain loss is given; after two of them, or where the logits are
    read in more than one of four, the model goes on without chunks (`Installed.off`).

    Logits that are read later are computed by another call of the head. Where an engine has to gather its weight for
    that (ZeRO-3, FSDP2 with a group of the head's own), all ranks have to read them.

    Args:
        model: wrapped by any engine or not; nothing but instances of its modules is changed.

    Returns:
        What can be undone, the same for a model that has it already; or one line with the reason why it does not apply.
    """
    model = unwrap(model)
    if model in _installed:
        return _installed[model]
    made = _attach(model)
    if isinstance(made, Installed):
        _installed[model] = made
        publish(model, LOSS, chunked_forward)
    return made


def chunked_forward(model: torch.nn.Module, **kwargs: Any) -> Any:
    """The output of a model, or of a copy of one, with the loss computed in chunks where that applies to it."""
    made = None if model in _installed else _attach(model)
    try:
        return model(**kwargs)
    finally:
        if isinstance(made, Installed):
            made.uninstall()


def _attach(model: torch.nn.Module) -> Installed | str:
    reason = not_standard(model)
    if reason is not None:
        return reason
    return Installed(model, model.get_output_embeddings())  # type: ignore[operator]


class Installed:
    """The chunked loss of one model."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Module) -> None:
        """
        Args:
            model: unwrapped; one for which `not_standard` is None.
            head: its output embeddings.
        """
        self._model, self._head = weakref.ref(model), weakref.ref(head)
        self._before = model.__dict__.get("_loss_function", ABSENT)
        self._loss = LossFunction(original(model), self._loss_of)
        self._forward = HeadForward(head, self._head_forward)
        self.scale_and_softcap = guessed(model)
        self.habits = {True: _Habit(), False: _Habit()}
        model.__dict__["_loss_function"] = self._loss
        head.__dict__["forward"] = self._forward
        self._first = model.register_forward_pre_hook(Hook(self._before_model), with_kwargs=True)
        self._last = head.register_forward_hook(Hook(self._after_head))
        self._handles = [
            self._first,
            self._last,
            head.register_forward_pre_hook(Hook(self._before_head)),
            model.register_forward_hook(Hook(self._after_model), always_call=True),
        ]
        steps.watch()
        self._leave = weakref.finalize(model, steps.leave)
        self._leave.atexit = False

    @property
    def off(self) -> str | None:
        """Why training goes without chunks by now; None: it does not."""
        return self.habits[True].off

    def uninstall(self) -> None:
        """Gives the model back as it was; a second time nothing happens."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._leave()
        self._forward.gone = True
        model, head = self._model(), self._head()
        for module, name, own, before in (
            (model, "_loss_function", self._loss, self._before),
            (head, "forward", self._forward, self._forward.before),
        ):
            if module is None or module.__dict__.get(name) is not own:
                continue
            if before is ABSENT:
                del module.__dict__[name]
            else:
                module.__dict__[name] = before
        if model is not None and _installed.get(model) is self:
            del _installed[model]
            withdraw(model, LOSS)

    def _before_model(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        running.forward = running.pending = None
        if self.habits[model.training].off is not None:
            return
        if args:
            try:
                given = inspect.signature(type(model).forward).bind_partial(model, *args, **kwargs).arguments
            except TypeError:
                return
            given = {**given.pop("kwargs", {}), **given}
        else:
            given = kwargs
        labels, shifted = given.get("labels"), given.get("shift_labels")
        if not isinstance(labels, torch.Tensor) or (shifted is not None and not isinstance(shifted, torch.Tensor)):
            return
        head = self._head()
        if head is None or (model.get_output_embeddings() is not head and not hasattr(model, "_is_replica")):  # type: ignore[operator]
            return
        # An engine that came later has put its hooks behind.
        for module, handle in ((model, self._first), (head, self._last)):
            hooks = module._forward_pre_hooks if handle is self._first else module._forward_hooks
            if handle.id in hooks:
                hooks.move_to_end(handle.id)  # type: ignore[attr-defined]
        running.forward = Expected(
            labels,
            version_of(labels),
            shifted,
            given.get("num_items_in_batch"),
            given.get("ignore_index", -100),
        )

    def _after_model(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        source = running.pending
        running.forward = running.pending = None
        if isinstance(source, Source) and source.loss is not None:
            source.loss = None
            if output is not None:
                self.habits[model.training].missed("its loss function was not called with its logits")

    def _before_head(self, head: torch.nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            running.head = head

    def _head_forward(self, head: torch.nn.Module, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(*args, **kwargs)
        expected: Expected | None = running.forward
        if expected is not None:
            expected.calls += 1
        if (
            expected is None
            or expected.calls > 1
            or kwargs
            or len(args) != 1
            or not usable(self._model(), head, args[0], expected)
        ):
            return own(*args, **kwargs)
        hidden: torch.Tensor = args[0]
        weight = head.weight
        assert isinstance(weight, torch.Tensor)
        labels = expected.shift_labels
        if labels is None:
            labels = torch.nn.functional.pad(expected.labels, (0, 1), value=expected.ignore_index)[..., 1:]
        scale, softcap = self.scale_and_softcap
        loss = linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]),
            weight,
            head.bias,  # type: ignore[arg-type]
            labels.reshape(-1).to(hidden.device),
            ignore_index=expected.ignore_index,
            logit_scale=scale,
            softcap=softcap,
            divisor=expected.divisor,
        )
        model = self._model()
        habit = self.habits[model is None or model.training]
        habit.forwards += 1
        source = Source(head, hidden, self._staleness(head), autocast_dtype(hidden), functools.partial(sharded, head))
        source.expected = (expected, self.scale_and_softcap)
        source.on_read.append(habit.read)
        shape = torch.Size((*hidden.shape[:-1], weight.shape[0]))
        trained = hidden.requires_grad or any(p.requires_grad for p in head.parameters())
        dtype = source.autocast or hidden.dtype
        running.pending = _Pending(source, shape, dtype, trained and torch.is_grad_enabled())
        return (loss,)

    def _after_head(self, head: torch.nn.Module, args: Any, output: Any) -> Any:
        pending = None if torch.compiler.is_compiling() else running.pending
        if not isinstance(pending, _Pending):
            return None
        running.pending = source = pending.source
        (source.loss,) = output
        return DeferredLogits(source, pending.shape, pending.dtype, requires_grad=pending.requires_grad)

    def _loss_of(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As `ForCausalLMLoss`."""
        source = logits.source if isinstance(logits, DeferredLogits) else None
        if isinstance(logits, DeferredLogits) and source is not None and source.loss is not None:
            expected, used = source.expected
            loss, source.loss = source.loss, None
            done = scale_and_softcap(logits.recorded)
            as_expected = (
                labels is expected.labels
                and version_of(labels) == expected.version
                and shift_labels is expected.shift_labels
                and num_items_in_batch is expected.divisor
                and ignore_index == expected.ignore_index
                and vocab_size == logits.shape[-1]
            )
            if as_expected and done is not None and close(done, used):
                return loss.clone()  # models add to it in place, which what an engine's hook returned does not allow
            model = self._model()
            habit = self.habits[model is None or model.training]
            habit.missed("its loss function was not called as its forward was")
            if as_expected and done is not None:
                self.scale_and_softcap = done
            source.on_read.remove(habit.read)
        return self._loss.original(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)

    def _staleness(self, head: torch.nn.Module) -> Callable[[], bool]:
        model, weight = self._model(), head.weight
        assert isinstance(weight, torch.Tensor)
        # Engines write to the storage behind a weight, which its version does not count.
        managed = any(hasattr(weight, name) for name in ("ds_id", "_hp_mapping")) or any(
            "FSDPModule" in class_names(m) for m in (head, model) if m is not None
        )
        version = None if managed else (weakref.ref(weight), version_of(weight))
        return functools.partial(self._stale, version, steps.done)

    def _stale(self, version: tuple[weakref.ref[torch.Tensor], int | None] | None, done: int) -> bool:
        if version is None:
            changed = steps.done != done
        else:
            weight = version[0]()
            changed = weight is None or version_of(weight) != version[1]
        if changed:
            self.habits[True].off = "its logits are read after its weights have changed"
        return changed
