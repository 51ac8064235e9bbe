"""Waits for a stop signal in each of the ways in which scripts do, and says what it saw."""

import os
import signal
import subprocess
import sys
import time

how, number = sys.argv[1], getattr(signal, f"SIG{sys.argv[2]}")
seen: list[int] = []
if how != "default":
    signal.signal(number, signal.SIG_IGN if how == "ignores" else lambda *_: seen.append(number))
child = subprocess.Popen(["sleep", "60"])  # as a loader process: it would die of the signal
open(f"ready-{os.environ['RANK']}", "w").close()
while not seen:
    time.sleep(0.05)
print(f"signalled; my child {'runs' if child.poll() is None else 'is dead'}", flush=True)
child.kill()
sys.exit(int(sys.argv[3]))
