"""Many clients that send their request one byte a second, and connect again when they are turned away.

Prints "ready" when all are connected; ends when its input does. Arguments: HOST PORT PATH CLIENTS.
"""

import asyncio
import sys

import uvloop


async def one(host: str, port: int, request: bytes, connected: asyncio.Semaphore) -> None:
    """Be one slow client for ever."""
    first = True
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
            if first:
                connected.release()
                first = False
            for byte in request:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(1)
            writer.close()
        except OSError:
            await asyncio.sleep(1)


async def main(host: str, port: int, path: str, clients: int) -> None:
    """Run all of them until the input ends."""
    request = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
    connected = asyncio.Semaphore(0)
    tasks = []
    for _ in range(clients):
        tasks.append(asyncio.create_task(one(host, port, request.encode() + b"1" * 100, connected)))
        await asyncio.sleep(0.001)  # not all their bytes at the same instant
    for _ in range(clients):
        await connected.acquire()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
