"""Work through many trainings, several at once, until they are done or time is up."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType

import torch

from anywidth.app.data.decoding_workers import available_cores
from anywidth.app.interrupts import handled_by, note_signal
from anywidth.app.studies.trainings import Job, free_memory, work_on
from anywidth.errors import AnywidthError
from anywidth.files import make_folder
from anywidth.measuring.heartbeat import working


class Stopped(BaseException):
    """Raised by Ctrl-C, SIGTERM or the deadline, wherever the program is at that moment.

    Only the training loop handles these signals itself, and saves a checkpoint.
    """


def work_through(
    jobs: Sequence[Job],
    parallel: int = 1,
    deadline: float | None = None,
    report: Callable[[str], None] = print,
) -> bool:
    """Train and measure everything that is missing; false if it was stopped before the end.

    Finished trainings are kept; others continue from their last checkpoint the next time.

    If several jobs run at once, each has its own process, an even share of the CPU cores, and a
    file in `logs/` for its output. `deadline` is the `time.time()` at which to stop; `report` gets
    a line when a job starts or ends.
    """
    for job in jobs:
        job.settings.check()
    waiting = [job for job in jobs if job.missing()]
    for folder in dict.fromkeys(job.out for job in waiting):
        make_folder(folder)
    trainings = "1 training" if len(jobs) == 1 else f"{len(jobs)} trainings"
    report(f"{trainings}, {len(jobs) - len(waiting)} of them done")
    reporter = _Reporter(report, len(jobs), len(jobs) - len(waiting))
    try:
        with _stopped_by_signals(deadline):
            if parallel > 1:
                said = f"training {parallel} at once; their output is in the folder logs"
                with working(said), _without_working_folder():
                    return _in_processes(waiting, parallel, reporter)
            return _one_by_one(waiting, deadline, reporter)
    except Stopped:
        return False


@dataclass
class _Reporter:
    """Counts finished jobs and reports them."""

    write: Callable[[str], None]
    total: int
    done: int

    def begin(self, job: Job) -> float:
        """Returns when it began, for `end`."""
        self.write(f"{job.name}: started")
        return time.monotonic()

    def end(self, job: Job, began: float) -> None:
        self.done += 1
        seconds = time.monotonic() - began
        self.write(f"{job.name}: done in {seconds:.0f} s, {self.done} of {self.total}")


def _one_by_one(waiting: list[Job], deadline: float | None, reporter: _Reporter) -> bool:
    for job in waiting:
        if deadline is not None and time.time() >= deadline:
            return False
        began = reporter.begin(job)
        try:
            is_done = work_on(job)
        except AnywidthError as error:
            raise _failure(job, str(error)) from error
        if not is_done:
            return False
        reporter.end(job, began)
        free_memory()
    return True


@contextlib.contextmanager
def _stopped_by_signals(deadline: float | None) -> Iterator[None]:
    """Ctrl-C, SIGTERM and the deadline raise `Stopped`."""

    def handle(number: int, frame: FrameType | None) -> None:
        note_signal(number)
        raise Stopped

    with handled_by(handle), terminated_at(deadline):
        yield


@contextlib.contextmanager
def terminated_at(deadline: float | None) -> Iterator[None]:
    """Send SIGTERM to this process at the deadline, which stops the training loop."""
    if deadline is None:
        yield
        return
    wait = max(0.0, deadline - time.time())
    alarm = threading.Timer(wait, os.kill, (os.getpid(), signal.SIGTERM))
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


# ---- several at once -----------------------------------------------------------------------------


@contextlib.contextmanager
def _without_working_folder() -> Iterator[None]:
    """Processes that start meanwhile import nothing from the working folder, which may be anyone's.

    A new Python would look for its modules there first.
    """
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = before or "1"
    try:
        yield
    finally:
        del os.environ["PYTHONSAFEPATH"]
        if before is not None:
            os.environ["PYTHONSAFEPATH"] = before


def _in_processes(waiting: list[Job], parallel: int, reporter: _Reporter) -> bool:
    context = multiprocessing.get_context("spawn")
    threads = max(1, available_cores() // parallel)
    running: dict[Connection, tuple[Job, SpawnProcess, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < parallel:
                job = waiting.pop(0)
                answer, question = context.Pipe(duplex=False)
                process = context.Process(target=_work_alone, args=(job, threads, question))
                running[answer] = (job, process, reporter.begin(job))
                process.start()
                question.close()
            for ready in multiprocessing.connection.wait(list(running)):
                assert isinstance(ready, Connection)
                job, process, began = running.pop(ready)
                try:
                    is_done, problem = ready.recv()
                    process.join()
                except EOFError:
                    process.join()
                    is_done, problem = False, f"its process ended with code {process.exitcode}"
                if problem is not None:
                    raise _failure(job, problem)
                if not is_done:
                    raise Stopped
                reporter.end(job, began)
        return True
    finally:
        processes = [process for _, process, _ in running.values() if process.pid is not None]
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _work_alone(job: Job, threads: int, answer: Connection) -> None:
    """One job in its own process, which ends together with its parent."""
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # Ctrl-C only reaches the parent, which then stops its children
    torch.set_num_threads(min(threads, torch.get_num_threads()))
    log = job.out / "logs" / f"{job.name}.txt"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
    except OSError as error:
        answer.send((False, f"{log}: cannot be written ({error.strerror or error})"))
        return
    with open(log, "a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        is_done, problem = False, None
        try:
            with _stopped_by_signals(None):
                threading.Thread(target=_follow_parent, daemon=True).start()
                is_done = work_on(job)
        except Stopped:
            pass
        except AnywidthError as error:
            problem = str(error)
        except Exception as error:
            traceback.print_exc()
            sys.stderr.flush()
            problem = f"{type(error).__name__}: {error}; the traceback is in {log}"
        with contextlib.suppress(OSError):  # the parent may be gone
            answer.send((is_done, problem))


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _failure(job: Job, text: str) -> AnywidthError:
    return AnywidthError(
        f"{job.name}: {text}. Finished trainings are kept; the same command continues the others"
    )
