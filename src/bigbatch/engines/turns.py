"""Tasks in threads of their own that take turns: one runs at a time, until it waits for the others or ends."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Ended(BaseException):
    """Ends a task whose neighbour has failed, by unwinding its frames; it is never seen outside."""


class Turns:
    """A round of tasks, numbered from zero.

    Attributes:
        ended: the tasks that are through.
        error: what the first of them to fail has raised, or what reached the caller meanwhile (Ctrl-C).

    >>> said = []
    >>> def task(k):
    ...     said.append(f"{k} comes")
    ...     turns.wait(k)
    ...     said.append(f"{k} goes")
    >>> turns = Turns(2)
    >>> turns.run(task)
    >>> said
    ['0 comes', '1 comes', '0 goes', '1 goes']
    """

    def __init__(self, count: int) -> None:
        self.ended: set[int] = set()
        self.error: BaseException | None = None
        self._turn = [threading.Lock() for _ in range(count)]  # a task whose lock is free may go on
        self._threads: list[threading.Thread] = []

    def run(self, task: Callable[[int], Any]) -> None:
        """Runs `task(k)` for every k. The caller waits; when it goes on, no thread is left.

        Raises:
            BaseException: what the first task to fail raised; all others are ended then, each at its next turn.
        """
        self._task = task
        for lock in self._turn:
            lock.acquire()
        begun = False
        while not begun or any(thread.is_alive() for thread in self._threads):
            try:
                if not begun:
                    begun = True
                    self._pass_on(-1)
                for thread in self._threads:  # a task starts the next one, so that the list grows while it is read
                    thread.join()
            except BaseException as error:  # Ctrl-C: tasks end as soon as they look, and are waited for
                self.error = self.error or error
        del self._task
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None  # which knows this frame, which knows it

    def wait(self, k: int) -> None:
        """Lets every other task have its turn; comes back when it is task k's again."""
        if self._pass_on(k) != k:
            self._turn[k].acquire()
        self.refuse_to_go_on()

    def refuse_to_go_on(self) -> None:
        """Ends the task that calls it, if another one has failed."""
        if self.error is not None:
            raise Ended

    def _pass_on(self, k: int) -> int | None:
        """Gives the turn to the next task that is not through, and returns its number."""
        count = len(self._turn)
        for j in ((k + step) % count for step in range(1, count + 1)):
            if j == len(self._threads) and self.error is None:
                thread = threading.Thread(target=self._work, args=(j,), name=f"micro-batch {j}", daemon=True)
                thread.start()
                self._threads.append(thread)
            if j < len(self._threads) and j not in self.ended:
                if j != k:
                    self._turn[j].release()
                return j
        return None

    def _work(self, k: int) -> None:
        self._turn[k].acquire()
        try:
            self._task(k)
        except Ended:
            pass
        except BaseException as error:
            self.error = self.error or error
        self.ended.add(k)
        try:
            self._pass_on(k)
        except RuntimeError as error:  # the system starts no more threads
            self.error = self.error or error
            self._pass_on(k)
