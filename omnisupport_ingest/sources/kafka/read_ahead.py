"""Takes messages from the client in a thread of its own, while earlier ones land.

The client is used by that thread alone: another call waits in the library until a read has returned.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from confluent_kafka import Message


class ReadAhead:
    """The messages that ``consume`` returns, in their order.

    ``most_bytes``: once messages of so many bytes wait, no more are taken from the client until some of them
    are. ``consume`` returns after a while also if there is nothing; what it returns then is empty.
    """

    def __init__(self, consume: Callable[[], Sequence[Message]], most_bytes: int) -> None:
        self._consume, self._most_bytes = consume, most_bytes
        self._waiting: deque[tuple[Sequence[Message], int]] = deque()
        self._tasks: deque[Callable[[], None]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._problem: BaseException | None = None
        self._left = self._ended = False
        self._thread = threading.Thread(target=self._read, name="reads topics ahead", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._left = True
            self._changed.notify_all()
        self._thread.join()

    def take(self) -> Sequence[Message]:
        """Return the next messages. Raises what ``consume`` raised, after all that came before."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._problem is not None)
            if not self._waiting:
                assert self._problem is not None
                raise self._problem
            messages, size = self._waiting.popleft()
            self._bytes -= size
            self._changed.notify_all()
            return messages

    def between(self, task: Callable[[], None]) -> None:
        """Have ``task``, which uses the client, done before the next read; at once if no more is read."""
        with self._changed:
            self._tasks.append(task)
            if self._ended:
                self._do_tasks()
            self._changed.notify_all()

    def _do_tasks(self) -> None:
        while self._tasks:
            self._tasks.popleft()()

    def _read(self) -> None:
        try:
            while not self._left:
                self._do_tasks()
                messages = self._consume()
                size = sum(len(each) for each in messages) + _MESSAGE_BYTES * len(messages)
                with self._changed:
                    self._waiting.append((messages, size))
                    self._bytes += size
                    self._changed.notify_all()
                    # Also what is empty waits to be taken: whoever takes it looks for how long nothing came.
                    while not self._left and (self._bytes >= self._most_bytes or len(self._waiting) >= _MOST):
                        self._do_tasks()
                        self._changed.wait()
        except BaseException as problem:
            self._problem = problem
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
                self._do_tasks()


_MOST = 64
"""Most answers of the client that wait, empty ones among them."""

_MESSAGE_BYTES = 512
"""What a message takes besides its value, by estimate: a tombstone has none."""
