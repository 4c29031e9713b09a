"""Messages that have come from another rank, until somebody asks for them."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pymoe.pipe.distributed.message import Key, Message

__all__ = ["Inbox", "ReadInbox"]


class Inbox:
    """Takes messages when they are asked for."""

    def __init__(self, peer: int, take: Callable[[], Message]) -> None:
        """``take`` waits for the next message of rank ``peer``."""
        self._peer = peer
        self._take = take
        self._box: dict[Key, Message] = {}

    def expect(self, count: int) -> None:
        """So many messages are about to come."""

    def get(self, key: Key) -> Message:
        """The message with this key.

        Raises:
            RuntimeError: it cannot come any more.
        """
        while key not in self._box:
            self._look(key)
            message = self._take()
            self._box[message.key] = message
        return self._box.pop(key)

    def _look(self, wanted: Key) -> None:
        """Forget what belongs to a step that has failed. What is of a later step comes after all of this one."""
        for key in [key for key in self._box if key.step < wanted.step]:
            del self._box[key]
        later = {key.step for key in self._box if key.step > wanted.step}
        if later:
            raise RuntimeError(f"rank {self._peer} is in step {min(later)}, and this one in step {wanted.step}")


class ReadInbox(Inbox):
    """A thread takes messages as soon as they are expected, while this rank computes."""

    def __init__(self, peer: int, take: Callable[[], Message]) -> None:
        super().__init__(peer, take)
        self._changed = threading.Condition()
        self._expected = 0
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def expect(self, count: int) -> None:
        """So many messages are about to come."""
        with self._changed:
            self._expected += count
            if self._thread is None:
                name = f"pymoe-pipe-from-{self._peer}"
                self._thread = threading.Thread(target=self._read, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def get(self, key: Key) -> Message:
        """The message with this key."""
        with self._changed:
            while key not in self._box:
                self._look(key)
                if self._error is not None:
                    raise self._error
                if not self._expected:
                    self.expect(1)
                self._changed.wait()
            return self._box.pop(key)

    def _read(self) -> None:
        while True:
            with self._changed:
                while not self._expected:
                    self._changed.wait()
            try:
                message = self._take()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._expected -= 1
                self._box[message.key] = message
                self._changed.notify_all()
            del message
