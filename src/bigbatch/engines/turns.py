"""Tasks in threads of their own that take turns: one runs at a time, until it waits for the others or ends."""

from __future__ import annotations

import contextvars
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
        self._turn = [threading.Lock() for _ in range(count)]  # released for the task that may go on
        self._begun: dict[int, int] = {}  # in which thread
        self._threads: list[threading.Thread] = []
        self._over, self._all_through = False, threading.Lock()

    def run(self, task: Callable[[int], Any]) -> None:
        """Runs `task(k)` for every k. The caller waits; when it goes on, no thread is left.

        Raises:
            BaseException: what the first task to fail raised, or what reached the caller meanwhile (Ctrl-C); all tasks
                are ended then, each as soon as it looks.
        """
        self._task, self._context = task, contextvars.copy_context()
        for lock in (*self._turn, self._all_through):
            lock.acquire()
        self._wait_for_all()
        del self._task, self._context
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

    def failed(self, error: BaseException) -> BaseException:
        """Notes an error, which so arrives even where the task catches it; returns it, to be raised."""
        self.error = self.error or error
        return error

    def _wait_for_all(self) -> None:
        """Begins with the first task. A signal may interrupt it anywhere: then tasks end, and it goes on waiting.

        A thread that is joined may not be interrupted (it is taken for dead then), so it is joined when it is through.
        """
        while True:
            try:
                if not self._begun:  # perhaps once more, if it was interrupted here: the second one finds the first
                    self._pass_on(-1)
                while not self._over:
                    self._all_through.acquire()
                for thread in self._threads:
                    thread.join()
                return
            except BaseException as error:
                self.error = error

    def _pass_on(self, k: int) -> int | None:
        """Gives the turn to the next task that is not through, and returns its number."""
        count = len(self._turn)
        for j in ((k + step) % count for step in range(1, count + 1)):
            if j in self.ended:
                continue
            if j in self._begun:
                if j != k:
                    self._turn[j].release()
                return j
            if self.error is None or not self._begun:  # the first one begins in any case, and ends all
                try:
                    return self._start(j)
                except RuntimeError as error:  # the system starts no more threads
                    self.failed(error)
        self._over = True
        self._all_through.release()
        return None

    def _start(self, j: int) -> int:
        run = self._context.copy().run
        thread = threading.Thread(target=run, args=(self._work, j), name=f"micro-batch {j}", daemon=True)
        thread.start()
        self._threads.append(thread)
        return j

    def _work(self, k: int) -> None:
        if self._begun.setdefault(k, threading.get_ident()) != threading.get_ident():
            return
        try:
            self.refuse_to_go_on()
            self._task(k)
        except Ended:
            pass
        except BaseException as error:
            self.failed(error)
        self.ended.add(k)
        self._pass_on(k)
