"""Streams and frame links in memory, with delays drawn by seed, back-pressure, and ends that can be cut."""

import random
from collections import deque

import trio


class Lane:
    """One direction: chunks in order, each arriving some time after it was sent."""

    def __init__(self, rng: random.Random, window: int, max_delay_s: float) -> None:
        self._rng = rng
        self._window = window
        self._max_delay_s = max_delay_s
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._size = 0
        self._last_at = 0.0
        self._changed = trio.Event()
        self.is_closed = False  # by its sender: what was sent still arrives
        self.is_cut = False  # nothing arrives any more
        self.is_parted = False  # nothing arrives any more, and nobody is told

    async def send(self, data: bytes) -> None:
        """Returns once there is room for it."""
        await trio.lowlevel.checkpoint()
        while self._size and self._size + len(data) > self._window and not self.is_cut:
            await self._changed.wait()
        if self.is_cut or self.is_closed:
            raise trio.BrokenResourceError("the other end is gone")
        if self.is_parted:
            return
        self._last_at = max(self._last_at, trio.current_time() + self._rng.random() * self._max_delay_s)
        self._chunks.append((self._last_at, data))
        self._size += len(data)
        if len(self._chunks) == 1:  # else the reader waits for the first to arrive
            self._wake()

    async def receive(self) -> bytes | None:
        """The next chunk once it has arrived; None at the end."""
        if self.is_cut or (self._chunks and self._chunks[0][0] <= trio.current_time()):
            await trio.lowlevel.checkpoint()  # every other way leads through a wait
        while not self.is_cut:
            if self._chunks:
                at, data = self._chunks[0]
                if at <= trio.current_time():
                    self._chunks.popleft()
                    self._size -= len(data)
                    self._wake()
                    return data
                with trio.move_on_at(at):
                    await self._changed.wait()
            elif self.is_closed:
                await trio.lowlevel.checkpoint()
                return None
            else:
                await self._changed.wait()
        return None

    def close(self) -> None:
        if not self.is_parted:
            self.is_closed = True
            self._wake()

    def cut(self) -> None:
        if not self.is_parted:  # then nobody would learn of it
            self.is_cut = True
            self._chunks.clear()
            self._wake()

    def part(self) -> None:
        self.is_parted = True
        self._chunks.clear()
        self._size = 0
        self._wake()

    def _wake(self) -> None:
        changed, self._changed = self._changed, trio.Event()
        changed.set()


class End:
    """One end of a pair of lanes; has the methods of a FrameStream, and those of a trio Stream."""

    def __init__(self, out: Lane, inward: Lane, rng: random.Random) -> None:
        self._out = out
        self._in = inward
        self._rng = rng

    async def send(self, frame: bytes) -> None:
        await self._out.send(frame)

    async def receive(self) -> bytes | None:
        return await self._in.receive()

    async def send_all(self, data: bytes) -> None:
        """In pieces, as a socket may: a message can arrive split anywhere."""
        view = bytes(data)
        while view:
            size = self._rng.choice((len(view), len(view), self._rng.randint(1, len(view))))
            await self._out.send(view[:size])
            view = view[size:]

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return await self._in.receive() or b""

    async def wait_send_all_might_not_block(self) -> None:
        await trio.lowlevel.checkpoint()

    async def aclose(self) -> None:
        self._out.close()
        # Nobody reads any more what the other one still sends.
        self._in.cut()
        await trio.lowlevel.checkpoint()

    def cut(self) -> None:
        """Breaks both directions: what was under way is lost."""
        self._out.cut()
        self._in.cut()

    def reset(self) -> None:
        """The way that was parted is open again, and whoever is at an end learns that the connection is lost."""
        for lane in (self._out, self._in):
            lane.is_parted = False
            lane.cut()

    def part(self) -> None:
        """Loses everything in both directions from now on, and what is under way; neither end can see that."""
        self._out.part()
        self._in.part()


def pair(rng: random.Random, *, window: int, max_delay_s: float) -> tuple[End, End]:
    """Two connected ends."""
    there, back = Lane(rng, window, max_delay_s), Lane(rng, window, max_delay_s)
    return End(there, back, rng), End(back, there, rng)
