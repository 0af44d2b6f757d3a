"""Objects behind handles: text that an op carries in a graph in place of the object."""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

from mpcompile.errors import CaptureError

T = TypeVar("T")


class Registry(Generic[T]):
    """Finds objects by their handles, as long as somebody else keeps them."""

    def __init__(self, missing: str, gone: str) -> None:
        """Say what is wrong about a handle that nobody has.

        Args:
            missing: the op and what it does not find, in front of the handle.
            gone: what the graph was compiled for.
        """
        self._missing, self._gone = missing, gone
        self._items: weakref.WeakValueDictionary[str, T] = weakref.WeakValueDictionary()

    def __contains__(self, handle: str) -> bool:
        return handle in self._items

    def add(self, handle: str, item: T) -> None:
        """Give ``item`` the handle ``handle``."""
        self._items[handle] = item

    def find(self, handle: str) -> T:
        """Return what is behind ``handle``.

        Raises:
            CaptureError: nothing is; the graph belongs to something that is gone.
        """
        item = self._items.get(handle)
        if item is None:
            raise CaptureError(
                f"{self._missing} {handle}. The graph was compiled for {self._gone}; compile the "
                "step again."
            )
        return item
