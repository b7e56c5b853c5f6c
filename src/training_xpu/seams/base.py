"""What all seams share: replaced attributes that can be taken back, and subscribers that cannot break training."""

from __future__ import annotations

import inspect
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

EventT = TypeVar("EventT")
FaultHandler = Callable[[str, str, Exception], None]  # owner, seam, what the owner's callback raised
Places = list[tuple[Any, str]]  # (object, attribute)

lock = threading.RLock()
_thread = threading.local()


def _print_fault(owner: str, seam: str, error: Exception) -> None:
    logging.getLogger("training_xpu").warning("%s left the %s seam: %s: %s", owner, seam, type(error).__name__, error)


_on_fault: FaultHandler = _print_fault


def set_fault_handler(handler: FaultHandler | None) -> None:
    """Who hears of subscribers that raised; None: one line on stderr."""
    global _on_fault
    _on_fault = handler or _print_fault


@contextmanager
def _in_subscriber() -> Iterator[None]:
    before = in_subscriber()
    _thread.in_subscriber = True
    try:
        yield
    finally:
        _thread.in_subscriber = before


def in_subscriber() -> bool:
    """Whether this thread is inside a subscriber's callback, whose own calls are not reported."""
    return getattr(_thread, "in_subscriber", False)


class Patch:
    """One replaced function in every place that holds it; counted, with exactly one owner per attribute."""

    _owners: ClassVar[dict[tuple[int, str], Patch]] = {}

    def __init__(self, find: Callable[[], Places], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """
        Args:
            find: gives the places, all of which hold the same function.
            wrap: makes the replacement from the original.
        """
        self._find = find
        self._wrap = wrap
        self._users = 0
        self._original: Callable[..., Any] | None = None
        self._replacement: Callable[..., Any] | None = None
        self._places: Places = []

    def install(self) -> None:
        """
        Raises:
            RuntimeError: another patch owns one of the attributes.
        """
        with lock:
            self._users += 1
            # Places left over lie under somebody else's patch, see uninstall: the replacement still works there.
            if self._users > 1 or self._places:
                return
            places = self._find()
            if any(Patch._owners.get((id(place), name), self) is not self for place, name in places):
                self._users -= 1
                raise RuntimeError(f"{places[0][1]} already has an owner")
            self._original = inspect.getattr_static(*places[0])
            self._replacement = self._wrap(self._original)
            for place, name in places:
                setattr(place, name, self._replacement)
                Patch._owners[id(place), name] = self
            self._places = places

    def uninstall(self) -> None:
        """Takes the patch back with its last user. Under somebody else's later patch it stays, and does nothing."""
        with lock:
            self._users -= 1
            if self._users > 0:
                return
            buried: Places = []
            for place, name in self._places:
                if inspect.getattr_static(place, name) is self._replacement:
                    setattr(place, name, self._original)
                    Patch._owners.pop((id(place), name), None)
                else:
                    buried.append((place, name))
            self._places = buried


@dataclass(eq=False)
class Subscription(Generic[EventT]):
    """One subscriber at one seam; `cancel` takes it back, twice does no harm."""

    seam: Seam[EventT]
    callback: Callable[[EventT], object]
    owner: str

    def cancel(self) -> None:
        self.seam.remove(self)


class Seam(ABC, Generic[EventT]):
    """A place to subscribe to. With the first subscriber its hooks go in, with the last one they come out."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.subscriptions: tuple[Subscription[EventT], ...] = ()

    def subscribe(self, callback: Callable[[EventT], object], owner: str) -> Subscription[EventT]:
        """Calls `callback(event)` from now on.

        Args:
            owner: who is named when the callback raises.
        """
        subscription = Subscription(self, callback, owner)
        with lock:
            if not self.subscriptions:
                self._install()
            self.subscriptions = (*self.subscriptions, subscription)
        return subscription

    def remove(self, subscription: Subscription[EventT]) -> None:
        with lock:
            if subscription not in self.subscriptions:
                return
            self.subscriptions = tuple(s for s in self.subscriptions if s is not subscription)
            if not self.subscriptions:
                self._uninstall()

    def call(self, subscription: Subscription[EventT], event: EventT) -> tuple[bool, object]:
        """Runs one callback: whether it came through, and what it returned."""
        try:
            with _in_subscriber():
                return True, subscription.callback(event)
        except Exception as error:
            subscription.cancel()
            _on_fault(subscription.owner, self.name, error)
            return False, None

    @abstractmethod
    def _install(self) -> None:
        """Patches what the seam needs; called for the first subscriber."""

    @abstractmethod
    def _uninstall(self) -> None:
        """Takes it back; called after the last one."""
