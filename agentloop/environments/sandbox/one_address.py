"""Forwards connections from one address to another. An agent's sandbox has no network, and runs this file alone."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def forward(to: Callable[[], Awaitable[Connection]]) -> Callable[..., Awaitable[None]]:
    """Make a server's callback that joins each of its connections to a new one from `to`, in both directions."""

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await to()
        except OSError:  # the other side refuses the connection, so this side does too
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
        pass  # one end has closed
    finally:
        writer.close()


async def _run(socket: str, port: str, *words: str) -> int:
    """Run a program while `port` is forwarded to a socket in the file system, and return the exit code."""
    to_socket = forward(lambda: asyncio.open_unix_connection(socket))
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
