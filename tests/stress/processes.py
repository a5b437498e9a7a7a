"""Commands that stress tests run in other processes, and what their messages may be."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

LONGEST = 2000
"""The most characters of an error message."""


def run_until(command, log, seconds=None):
    """Run a command; after some seconds it and all its processes are killed.

    Returns:
        Whether it came to its end before.
    """
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            env=ENVIRONMENT,
            cwd=log.parent,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return False
    assert process.returncode == 0, log.read_text()
    return True
