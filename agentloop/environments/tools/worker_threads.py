"""Runs users' code: coroutines on an event loop, plain functions in threads that do not delay the program's exit."""

import asyncio
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from queue import SimpleQueue
from typing import Any, TypeVar

from agentloop.environments.environment import Environment
from agentloop.errors import NotJudged, UserCodeFailed, UserCodeLate, UserError
from agentloop.user_code import users_code

_MOST_ABANDONED = 256
_Result = TypeVar("_Result")
_Calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
_log = logging.getLogger(__name__)


class WorkerThreads:
    """Runs up to `most` calls at once, for the coroutines of one event loop."""

    def __init__(self, most: int, *, keeps_thread: bool = False) -> None:
        """`keeps_thread`: calls wait for a thread whose call goes on behind its deadline, and no other is started."""
        self._places, self._keeps_thread = asyncio.Semaphore(most), keeps_thread
        self._idle: list[_Calls] = []
        self._abandoned = 0
        """Number of calls that still run after their deadline."""

    async def run(self, call: Callable[[], _Result], *, timeout_s: float) -> _Result:
        """Run a call in a thread. Raises TimeoutError, UserCodeFailed, and UserError if too many calls never ended."""
        async with self._places:
            worker = self._idle.pop() if self._idle else _worker()
            done: Future[_Result] = Future()
            worker.put((call, done))
            future = asyncio.wrap_future(done)
            try:
                await asyncio.wait([future], timeout=timeout_s)
            finally:
                self._take_back(worker, future, done)
        if not future.done():
            raise TimeoutError
        return future.result()

    async def ask(self, function: Callable[..., Any], *args: Any, timeout_s: float, setting: str) -> Any:
        """Call a user's function. Raises UserCodeFailed, and UserCodeLate after the time of `setting`."""
        late = UserCodeLate(f"no end within {setting}={timeout_s:g} s")
        if not inspect.iscoroutinefunction(function):
            try:
                return await self.run(partial(function, *args), timeout_s=timeout_s)
            except TimeoutError:
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
        """End the idle threads."""
        while self._idle:
            self._idle.pop().put(None)

    def _take_back(self, worker: _Calls, future: asyncio.Future[Any], done: Future[Any]) -> None:
        if future.done():
            future.exception()  # reading it keeps asyncio from logging it when the caller is cancelled
            self._idle.append(worker)
            return
        if self._keeps_thread:
            self._idle.append(worker)  # the next call waits behind this one
            if done.cancel():
                return  # the call had not begun
        else:
            worker.put(None)  # ends the thread after its call
        self._abandoned += 1
        if self._abandoned > _MOST_ABANDONED:
            raise UserError(
                f"tools must end, got {self._abandoned} calls that went on behind their deadline. Give the tools "
                "deadlines of their own."
            )
        future.add_done_callback(self._ended_late)

    def _ended_late(self, future: asyncio.Future[Any]) -> None:
        self._abandoned -= 1
        future.exception()  # reading it keeps asyncio from logging it


def _worker() -> _Calls:
    """Start a daemon thread and return its queue of calls; None ends the thread."""
    calls: _Calls = SimpleQueue()
    threading.Thread(target=_work, args=(calls,), name="tool", daemon=True).start()
    return calls


def _work(calls: _Calls) -> None:
    while (item := calls.get()) is not None:
        call, done = item
        if not done.set_running_or_notify_cancel():
            continue
        try:
            with users_code():
                result = call()
        except BaseException as error:  # noqa: BLE001  raised again where the result is awaited
            done.set_exception(error)
        else:
            done.set_result(result)


def run_coroutine(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Run a coroutine to its result. The calling thread may already run an event loop, as notebooks do."""
    results: list[_Result] = []
    interrupts: list[BaseException] = []
    cancels: list[Callable[[], object]] = []

    async def stored() -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        cancels.append(partial(loop.call_soon_threadsafe, task.cancel))
        try:
            # After Ctrl-C asyncio prints the value that a coroutine returned, which is slow for many episodes.
            results.append(await coroutine)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            interrupts.append(interrupt)  # asyncio would log that nobody retrieved the exception

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(stored())
    else:
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(asyncio.run, stored())
            try:
                ended.result()
            except (KeyboardInterrupt, SystemExit):  # a signal interrupts this thread only
                for cancel in cancels:
                    cancel()
                raise
    if interrupts:
        raise interrupts[0]
    return results[0]


def run_hook(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a method of the user's class in this thread; the method may be `async def`."""
    with users_code():
        return run_coroutine(hook(*args)) if inspect.iscoroutinefunction(hook) else hook(*args)


def close_now(environment: Environment, where: str) -> None:
    """Close an instance that played no episode; a failure is logged once."""
    try:
        run_hook(environment.close)
    except (NotJudged, UserCodeFailed, UserError) as problem:
        _warn_of_close(where, str(problem))  # the instance has done its work, so nothing else is lost


@cache
def _warn_of_close(where: str, problem: str) -> None:
    _log.warning("%s.close must free what an episode holds, got %s. Mend it.", where, problem)
