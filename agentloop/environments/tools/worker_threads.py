"""Where code of the user's runs: coroutines on an event loop, plain functions in threads that no exit waits for."""

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
from agentloop.errors import ToolTimeout, UserCodeFailed, UserCodeLate, UserError
from agentloop.user_code import users_code

_MOST_ABANDONED = 256
_Result = TypeVar("_Result")
_Calls = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
_log = logging.getLogger(__name__)


class WorkerThreads:
    """Runs up to `most` calls at once, for coroutines of one event loop that wait for them."""

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)
        self._idle: list[_Calls] = []
        self._abandoned = 0
        """Calls that go on behind their deadline."""

    async def run(self, call: Callable[[], _Result], *, timeout_s: float) -> _Result:
        """The result of `call`. Raises ToolTimeout, UserCodeFailed, and UserError where too many calls never ended."""
        async with self._places:
            worker = self._idle.pop() if self._idle else _worker()
            done: Future[_Result] = Future()
            worker.put((call, done))
            future = asyncio.wrap_future(done)
            try:
                await asyncio.wait([future], timeout=timeout_s)
            finally:
                self._take_back(worker, future)
        if not future.done():
            raise ToolTimeout
        return future.result()

    async def ask(self, function: Callable[..., Any], *args: Any, timeout_s: float, setting: str) -> Any:
        """What a function of the user's returns. Raises UserCodeFailed, UserCodeLate after a `setting`'s time."""
        late = UserCodeLate(f"no end within {setting}={timeout_s:g} s")
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
            self._idle.pop().put(None)

    def _take_back(self, worker: _Calls, future: asyncio.Future[Any]) -> None:
        if future.done():
            future.exception()  # looked at: its caller may be cancelled
            self._idle.append(worker)
            return
        worker.put(None)  # once the call returns
        self._abandoned += 1
        if self._abandoned > _MOST_ABANDONED:
            raise UserError(
                f"tools must end, got {self._abandoned} calls that went on behind their deadline. Give the tools "
                "deadlines of their own, or mark them @tool(isolated=True)."
            )
        future.add_done_callback(self._ended_late)

    def _ended_late(self, future: asyncio.Future[Any]) -> None:
        self._abandoned -= 1
        future.exception()  # looked at: nobody else will


def _worker() -> _Calls:
    """The calls that a new daemon thread makes one after another; it ends at None."""
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
        except BaseException as error:  # noqa: BLE001  raised where the result is waited for
            done.set_exception(error)
        else:
            done.set_result(result)


def run_coroutine(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine. Whoever calls may have an event loop running, as notebooks do."""
    results: list[_Result] = []
    interrupts: list[BaseException] = []

    async def stored() -> None:
        try:
            # asyncio writes out what a coroutine returns when it gives Ctrl-C back: long work for many episodes.
            results.append(await coroutine)
        except (KeyboardInterrupt, SystemExit) as interrupt:
            interrupts.append(interrupt)  # asyncio would log that nobody asked this task for it

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        asyncio.run(stored())
    else:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(asyncio.run, stored()).result()
    if interrupts:
        raise interrupts[0]
    return results[0]


def run_hook(hook: Callable[..., Any], *args: Any) -> Any:
    """What a method of the user's own returns, which may be `async def`, called here and now."""
    with users_code():
        return run_coroutine(hook(*args)) if inspect.iscoroutinefunction(hook) else hook(*args)


def close_now(environment: Environment, where: str) -> None:
    """Call the `close` of an instance that played no episode of the policy; one that fails is warned of, once."""
    try:
        run_hook(environment.close)
    except (UserCodeFailed, UserError) as problem:
        warn_of_close(where, str(problem))  # what the instance was asked is known: it is not lost for that


@cache
def warn_of_close(where: str, problem: str) -> None:
    _log.warning("%s.close must free what an episode holds, got %s. Mend it.", where, problem)
