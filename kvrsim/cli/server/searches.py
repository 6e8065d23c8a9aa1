"""Searches for answers, each in a process of its own, and the answers that are kept in memory.

Several requests may wait for one answer: that of the page, and those of its frames. A search ends as soon as no request
waits for it: its process is killed, whatever it does. The event loop never waits for a file or a computation.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

MOST_SEARCHES = 2  # processes; further questions wait
MOST_ANSWERS = 64  # largest number of answers in memory
MOST_LINE_BYTES = 2**28  # longest line of a process: the page of an answer
_WAITING = "waiting for another search of this server"
_ENDED = "the process of this question ended early: it was stopped from outside, or the system has too little memory"

Key = tuple[tuple[str, str], ...]  # a question: names and values of its fields, sorted


class Worker:
    """A process of kvrsim/cli/server/worker.py."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._can_go_on = False  # whether it has answered its last question, and can answer another

    async def start(self) -> None:
        """Start the process; it gets ready while the server waits for a question."""
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvrsim.cli.server.worker",
            stdin=pipe,
            stdout=pipe,
            env=environment,
            limit=MOST_LINE_BYTES,
            start_new_session=True,  # Ctrl-C is for the server, which ends the process
        )
        self._can_go_on = True

    async def answer(self, question: Mapping[str, str]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the lines of an answer without its end; an error if the process has ended."""
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._can_go_on = False
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            pass  # there is no answer to read
        while text := await self._process.stdout.readline():
            line: dict[str, Any] = json.loads(text)
            if "end" in line:
                self._can_go_on = line["end"]
                return
            yield line
        yield {"error": _ENDED}

    @property
    def is_free(self) -> bool:
        """Whether the process runs and has no question."""
        return self._process is not None and self._process.returncode is None and self._can_go_on

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def wait(self) -> None:
        """Wait until the process has ended."""
        if self._process is not None:
            await self._process.wait()


@dataclass(eq=False, slots=True)
class RunningSearch:
    """A question, and what is known of its answer."""

    question: dict[str, str]
    lines: list[dict[str, Any]] = field(default_factory=list)  # lines of the answer that are sent to the page
    page: str | None = None  # the answer's own page; None: not yet, or it cannot be drawn
    listeners: int = 0  # requests that wait
    is_over: bool = False
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    task: asyncio.Task[None] | None = None

    def last(self, name: str) -> Any:
        """The value of the last line with this name; None: there is none."""
        return next((line[name] for line in reversed(self.lines) if name in line), None)

    async def add(self, line: dict[str, Any]) -> None:
        """Take in a line of the process; the text of a page is kept, and its readers are told that it is there."""
        async with self.changed:
            if "page" in line:
                self.page = line["page"]
                line = {"page": True}
            self.lines.append(line)
            self.changed.notify_all()

    async def end(self) -> None:
        """Tell the listeners that there are no further lines."""
        async with self.changed:
            self.is_over = True
            self.changed.notify_all()


class Searches:
    """The searches that run, and the last answers."""

    def __init__(self) -> None:
        self._kept: OrderedDict[Key, RunningSearch] = OrderedDict()
        self._turn = asyncio.Semaphore(MOST_SEARCHES)
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._starts: list[asyncio.Task[None]] = []  # processes that are started
        self._is_closed = False

    async def lines(self, question: Mapping[str, str]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the lines of an answer, those that are known first.

        The search ends if it has not ended when the last reader of its lines leaves.
        """
        async with aclosing(self._follow(self._search(question))) as lines:
            async for line in lines:
                yield line

    async def complete(self, question: Mapping[str, str]) -> RunningSearch:
        """Wait for an answer and its page."""
        search = self._search(question)
        async with aclosing(self._follow(search)) as lines:
            async for _ in lines:
                pass
        return search

    async def _follow(self, search: RunningSearch) -> AsyncGenerator[dict[str, Any], None]:
        search.listeners += 1
        told = 0
        try:
            while not search.is_over or told < len(search.lines):
                async with search.changed:
                    while not search.is_over and told == len(search.lines):
                        await search.changed.wait()
                news = search.lines[told:]
                told += len(news)
                for line in news:
                    yield line
        finally:
            search.listeners -= 1
            if not search.listeners and search.task is not None and not search.is_over:
                self._forget(search)
                search.task.cancel()

    async def ready(self) -> None:
        """Start a process, so that the first question need not wait for it."""
        self._idle.append(await self._new_worker())

    def kill(self) -> None:
        """End all processes at once; a signal handler may call this."""
        for worker in list(self._workers):
            worker.kill()

    async def close(self) -> None:
        """End all searches and their processes."""
        self._is_closed = True
        tasks = [search.task for search in self._kept.values() if search.task is not None]
        tasks += self._starts
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.kill()
        await asyncio.gather(*(worker.wait() for worker in self._workers))

    @property
    def num_running(self) -> int:
        """Searches that have not ended."""
        return sum(not search.is_over for search in self._kept.values())

    def _search(self, question: Mapping[str, str]) -> RunningSearch:
        """The search for a question: one that is kept, or a new one."""
        key = tuple(sorted(question.items()))
        if key not in self._kept:
            search = RunningSearch(question=dict(question))
            self._kept[key] = search
            search.task = asyncio.create_task(self._run(search))
            self._drop_old()
        self._kept.move_to_end(key)
        return self._kept[key]

    def _drop_old(self) -> None:
        """Keep at most MOST_ANSWERS answers, the last that were asked for."""
        over = [key for key, search in self._kept.items() if search.is_over and not search.listeners]
        for key in over[: max(0, len(self._kept) - MOST_ANSWERS)]:
            del self._kept[key]

    def _forget(self, search: RunningSearch) -> None:
        key = tuple(sorted(search.question.items()))
        if self._kept.get(key) is search:
            del self._kept[key]

    async def _run(self, search: RunningSearch) -> None:
        """Take the lines of one process; an answer with an error is not kept."""
        try:
            if self._turn.locked():
                await search.add({"progress": _WAITING})
            async with self._turn:
                await self._ask(search)
        finally:
            if search.last("answer") is None or search.last("error") is not None:
                self._forget(search)
            await search.end()

    async def _ask(self, search: RunningSearch) -> None:
        worker = await self._worker()
        try:
            async with aclosing(worker.answer(search.question)) as lines:
                async for line in lines:
                    await search.add(line)
        finally:
            if worker.is_free:
                self._idle.append(worker)
            else:
                self._end(worker)

    def _end(self, worker: Worker) -> None:
        """End a process, and start another in its place, so that the next question need not wait for it."""
        worker.kill()
        self._workers.discard(worker)
        if not self._is_closed:
            self._starts = [start for start in self._starts if not start.done()]
            self._starts.append(asyncio.create_task(self.ready()))

    async def _worker(self) -> Worker:
        """A process without a question."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_free:
                return worker
            self._workers.discard(worker)
        return await self._new_worker()

    async def _new_worker(self) -> Worker:
        worker = Worker()
        self._workers.add(worker)
        await worker.start()
        return worker
