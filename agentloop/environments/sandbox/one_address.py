"""Leads connections from one address to another. An agent's sandbox, which has no network, runs this file by itself."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def leading(to: Callable[[], Awaitable[Connection]]) -> Callable[..., Awaitable[None]]:
    """What a server does with each of its connections: all that is sent on it goes to one made by `to`, and back."""

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await to()
        except OSError:  # it is refused there, and so it is here
            writer.close()
        else:
            await asyncio.gather(_passed_on(reader, other_writer), _passed_on(other_reader, writer))

    return joined


async def _passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except ConnectionError:
        pass  # either end has gone
    finally:
        writer.close()


async def _run(socket: str, port: str, *words: str) -> int:
    """Run a program while port `port` of this machine leads to a socket in the file system; its exit code."""
    to_socket = leading(lambda: asyncio.open_unix_connection(socket))
    async with await asyncio.start_server(to_socket, "127.0.0.1", int(port)):
        try:
            process = await asyncio.create_subprocess_exec(*words)
        except OSError as problem:
            print(f"{words[0]} must be a program that the sandbox shows, got {problem.strerror}.", file=sys.stderr)
            return 127
        code = await process.wait()
        return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(_run(*sys.argv[1:])))
