"""PyTorch's profiler around the engine's steps, on demand."""

import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from tiercel.core.errors import UserError


class Profiler:
    """Runs at most once at a time."""

    def __init__(self) -> None:
        self._running: profile | None = None

    def start(self) -> None:
        """Begin.

        Raises:
            UserError: it runs already.
        """
        if self._running:
            raise UserError("a profile is running already: stop it first")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._running = profile(activities=activities)
        self._running.start()

    def stop(self, folder: Path) -> str:
        """End, and write a Chrome trace (chrome://tracing, Perfetto).

        Returns:
            The file's path.

        Raises:
            UserError: no profile runs, or the folder cannot be written; the profile is lost then.
        """
        if self._running is None:
            raise UserError("no profile is running: start one first")
        running, self._running = self._running, None
        running.stop()
        path = folder / f"tiercel-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 1000:03}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.touch()
        except OSError as error:
            raise UserError(f"cannot write the profile to {folder}: {error.strerror}") from error
        running.export_chrome_trace(str(path))
        return str(path)
