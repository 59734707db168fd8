# SPDX-License-Identifier: Apache-2.0
"""The far end of the bare ZMQ measurements: a child process.

Arguments: a memory descriptor (inherited), its size, the size of one reply.
Answers its first order with its two endpoints. An empty request is answered by
an empty frame, one that holds a number (8 bytes, little-endian) by that run of
the memory, sent without a copy.
"""

from __future__ import annotations

import mmap
import secrets
import sys
import threading

import zmq

from ec_connector.bench.children import serve_parent


def main() -> None:
    """Answer requests until the parent closes standard input."""
    fd, size, reply = map(int, sys.argv[1:4])
    memory = memoryview(mmap.mmap(fd, size))
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    for option, value in ((zmq.SNDHWM, 0), (zmq.LINGER, 0)):
        router.setsockopt(option, value)
    router.bind("tcp://127.0.0.1:*")
    tcp = router.getsockopt_string(zmq.LAST_ENDPOINT)
    ipc = f"ipc://@ec-connector-bench-{secrets.token_hex(8)}"
    router.bind(ipc)
    threading.Thread(target=_serve, args=(router, memory, reply), daemon=True).start()
    for _, answer in serve_parent():
        answer([tcp, ipc])
    context.term()


def _serve(router: zmq.Socket[bytes], memory: memoryview, reply: int) -> None:
    while True:
        try:
            identity, request = router.recv_multipart()
        except zmq.ContextTerminated:
            router.close()
            return
        if not request:
            router.send_multipart([identity, b""])
            continue
        start = int.from_bytes(request, "little") * reply
        router.send_multipart([identity, memory[start : start + reply]], copy=False)


if __name__ == "__main__":
    main()
