"""A thread in every rank that sees what the training loop can't: a dead launcher, a dead or failed rank, a hang."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.errors import HangError, MegatronLiteError
from launcher.console import show
from launcher.process_tree import Link, Process, alive, broken
from launcher.run_folder import RunFolder, read_json
from launcher.stopping import StopFlag

POLL_S = 0.5
GRACE_S = 1.5  # for a dying rank to say why, before another says that it died


class FailureMark:
    """`failed.json` of an attempt: the first rank that fails writes it, and only that rank's error is shown."""

    def __init__(self, folder: RunFolder, *, rank: int) -> None:
        self._folder, self._rank = folder, rank

    @property
    def path(self) -> Path:
        return self._folder.attempt_folder / "failed.json"

    def read(self) -> dict[str, Any]:
        return read_json(self.path)

    def claim(self, code: int, message: str, details: str = "") -> bool:
        """Whether this rank is the first: then the failure is on disk, in status.json too, and shown."""
        temporary = self.path.with_name(f".failed-{self._rank}")
        record = {"rank": self._rank, "code": code, "message": message, "details": details, "time": time.time()}
        try:
            temporary.write_text(json.dumps(record), encoding="utf-8")
            os.link(temporary, self.path)
        except FileExistsError:
            return False
        except OSError as error:  # the folder can't be written: then every rank shows its own
            show(f"rank {self._rank}: can't write {self.path}: {error}", error=True)
        finally:
            temporary.unlink(missing_ok=True)
        self.to_status()
        show(f"\nrank {self._rank} failed: {message}\n{details}", error=True)
        return True

    def to_status(self) -> None:
        """Put the failure into status.json, if there is one."""
        failure = self.read()
        if failure:
            self._folder.write_status("failed", code=failure["code"], message=failure["message"], failed_rank=failure["rank"])


class Watchdog:
    """Polls twice a second until leave(). Ends the process itself, with the first failure's code, when another rank failed:
    the main thread may be waiting for that rank in a collective for ever."""

    def __init__(
        self,
        *,
        rank: int,
        stop: StopFlag,
        mark: FailureMark,
        siblings: dict[int, Process],
        hang_timeout_s: float,
        log_file: Path,
        chain: list[Link],
        on_stopping: Callable[[], None],
    ) -> None:
        self._rank, self._stop, self._mark, self._siblings = rank, stop, mark, siblings
        self._timeout_s, self._log_file, self._on_stopping = hang_timeout_s, log_file, on_stopping
        self._chain = chain
        self._beat, self._doing = time.monotonic(), "starting"
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def beat(self, doing: str) -> None:
        """The training loop got further; `doing` is what it does next."""
        self._beat, self._doing = time.monotonic(), doing

    def leave(self) -> None:
        """From here on other ranks may end."""
        self._left.set()

    def _watch(self) -> None:
        told = False
        while not self._left.wait(POLL_S):
            link = broken(self._chain)
            if link is not None and not self._stop.requested:
                self._stop.request(f"{link.name} (process {link.parent.pid}) died")
            if self._stop.requested and not told:
                told = True
                with contextlib.suppress(OSError):  # a full disk must not end the watch
                    self._on_stopping()
            self._end_if_a_rank_failed()
            self._end_if_hung()

    def _end_if_a_rank_failed(self) -> None:
        dead = next((rank for rank, process in self._siblings.items() if not alive(process)), None)
        if dead is not None:
            self._left.wait(GRACE_S)
        failure = self._mark.read()
        if self._left.is_set() or (dead is None and (not failure or failure.get("rank") == self._rank)):
            return
        if not failure:
            message = f"rank {dead} died without a word (killed, or out of memory?) while this rank was {self._doing}"
            self._mark.claim(1, message)
            failure = self._mark.read()
        if failure.get("code") == HangError.exit_code:
            self._dump_stacks("a rank hangs")
        self._end(int(failure.get("code", 1)), f"rank {self._rank} ends: {failure.get('message')}")

    def _end_if_hung(self) -> None:
        silent_s = time.monotonic() - self._beat
        if silent_s < self._timeout_s:
            return
        self._dump_stacks(f"no progress for {silent_s:.0f} s while {self._doing}")
        message = (
            f"no progress for {silent_s:.0f} s while {self._doing}; where each rank stands is in {self._log_file.parent}. "
            "Raise run.hang_timeout_s if the step is that slow"
        )
        self._mark.claim(HangError.exit_code, message)
        # The others see the mark at their next poll and say where they stand. Were this process gone before, their
        # collectives would fail, and their stacks would show that failure's handling in place of the wait.
        time.sleep(2 * POLL_S)
        self._end(HangError.exit_code, message)

    def _dump_stacks(self, why: str) -> None:
        with open(self._log_file, "a", encoding="utf-8") as log:
            log.write(f"{why}; every thread stands here:\n")
            log.flush()
            faulthandler.dump_traceback(log, all_threads=True)

    def _end(self, code: int, message: str) -> None:
        with open(self._log_file, "a", encoding="utf-8") as log:
            log.write(message + "\n")
        if self._rank == 0:
            self._mark.to_status()  # the rank that failed may have been overtaken by a status of ours
        os._exit(code)


def explain(error: BaseException) -> tuple[int, str, str]:
    """(exit code, message, details): the user's errors speak for themselves, ours come with their traceback."""
    if isinstance(error, MegatronLiteError):
        return error.exit_code, str(error), ""
    if type(error).__name__ == "OutOfMemoryError":
        remedy = (
            "lower training.micro_batch_size, or set training.activation_checkpointing=full, a higher parallel.zero_stage or parallel.tp"
        )
        return 1, f"out of memory ({error}): {remedy}", "".join(traceback.format_exception(error))
    if isinstance(error, KeyboardInterrupt):
        return 1, "interrupted", ""
    return 1, f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because a peer went away, by the words of gloo and NCCL."""
    words = ("gloo", "NCCL", "Connection reset", "Connection closed", "Broken pipe", "Socket")
    named = any(kind.__name__ == "DistError" for kind in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and any(word in str(error) for word in words))
