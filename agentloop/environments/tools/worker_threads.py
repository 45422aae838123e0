"""Threads for plain functions, which nobody waits for when they take too long.

The standard library's pools wait at exit for a thread that hangs, and anyio's threads do too: these are daemons.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from agentloop.environments.tools.silence import silence_this_context
from agentloop.errors import ToolTimeout, UserCodeFailed, UserError
from agentloop.user_code import users_code

_MOST_OVERDUE = 256
_AGAIN_AFTER_S = 0.05
_TRIES = 40
_Result = TypeVar("_Result")


class WorkerThreads:
    """Runs up to `most` calls at once, for coroutines of one event loop that wait for them."""

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)
        self._idle: list[_Worker] = []
        self._overdue: set[_Worker] = set()

    async def run(self, call: Callable[[], _Result], *, timeout_s: float) -> _Result:
        """The result of `call`. Raises ToolTimeout when it takes longer than `timeout_s`, which begins with the call.

        What code of the user's raises in it is a UserCodeFailed.

        Its thread is then left behind and another one takes its place. Python code in it ends by an exception; C code
        that never returns goes on until this program ends.
        """
        async with self._places:
            worker = self._idle.pop() if self._idle else _Worker()
            future = worker.submit(call)
            try:
                await asyncio.wait([future], timeout=timeout_s)
            finally:
                self._take_back(worker, future)
        if not future.done():
            raise ToolTimeout
        return future.result()

    async def ask(self, function: Callable[..., Any], *args: Any, timeout_s: float, setting: str) -> Any:
        """What a function of the user's returns, in one of the threads; one that is `async def` runs on the event loop.

        Raises UserCodeFailed, also where it takes longer than `timeout_s`, which `setting` sets.
        """
        late = UserCodeFailed(f"no end within {setting}={timeout_s:g} s")
        if not inspect.iscoroutinefunction(function):
            try:
                return await self.run(partial(function, *args), timeout_s=timeout_s)
            except ToolTimeout:
                raise late from None
        with users_code():
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    return await function(*args)
            except TimeoutError:
                if limit.expired():
                    raise late from None
                raise

    def close(self) -> None:
        """Ends the threads that have nothing to do."""
        while self._idle:
            self._idle.pop().end()

    def _take_back(self, worker: _Worker, future: asyncio.Future[Any]) -> None:
        if future.done():
            self._idle.append(worker)
            return
        self._overdue.add(worker)
        if len(self._overdue) > _MOST_OVERDUE:
            raise UserError(
                f"tools must end, got {len(self._overdue)} calls that went on behind their deadline. Give the tools "
                "deadlines of their own, or mark them @tool(isolated=True)."
            )
        future.add_done_callback(partial(self._ended_late, worker))
        self._interrupt(worker, future, _TRIES)

    def _ended_late(self, worker: _Worker, future: asyncio.Future[Any]) -> None:
        self._overdue.discard(worker)
        future.exception()  # looked at: nobody else will
        worker.end()

    def _interrupt(self, worker: _Worker, future: asyncio.Future[Any], tries: int) -> None:
        """Raise in the thread, again and again for code that catches it."""
        if tries and not future.done():
            worker.interrupt()
            future.get_loop().call_later(_AGAIN_AFTER_S, self._interrupt, worker, future, tries - 1)


class _Worker:
    """A daemon thread that makes one call after another."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tool", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], _Result]) -> asyncio.Future[_Result]:
        future: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._calls.put((call, future))
        return future

    def end(self) -> None:
        self._calls.put(None)

    def interrupt(self) -> None:
        ident = ctypes.c_ulong(self._thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(ToolTimeout))

    def _work(self) -> None:
        silence_this_context()
        with suppress(ToolTimeout):  # raised just when the call had ended
            while (item := self._calls.get()) is not None:
                call, future = item
                outcome = _outcome(call)
                try:
                    future.get_loop().call_soon_threadsafe(_set_outcome, future, *outcome)
                except RuntimeError:
                    return  # the loop has ended: nobody waits


def _outcome(call: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        with users_code():
            return call(), None
    except BaseException as error:  # noqa: BLE001  raised where the result is waited for
        return None, error


def _set_outcome(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
