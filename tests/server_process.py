"""A server of a test's own, which the test may stop, kill and start again."""

import os
import signal
import subprocess


class ServerProcess:
    """What starts it sets `_process`."""

    _process: "subprocess.Popen[bytes] | None" = None

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None
