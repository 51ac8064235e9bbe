"""Record commands on a terminal of its own as an animated SVG: what they print, when they print it.

python docs/tools/record.py OUT.svg COMMAND ...: bash runs every COMMAND, one after the other, in the working directory.

The picture shows the screen each time it has changed, at the speed of the recording; readers who ask for reduced motion see the
last screen. The commands run for real: nothing is shown that was not printed.
"""

from __future__ import annotations

import argparse
import html
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

import pyte

COLUMNS, ROWS = 100, 20
CELL_W, CELL_H, MARGIN = 8.4, 19, 14
FRAME_S = 0.1
"""Screens closer together than this are one."""
TYPING_S, REST_S, END_S = 0.03, 0.8, 4.0
"""How long a typed character, the pause after a command, and the last screen are shown."""
STYLE = """
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace; white-space: pre; fill: #1f2328 }
.page { fill: #f6f8fa } .bold { font-weight: 600 } .done { fill: #0a7d33 } .left { fill: #8c959f } .prompt { fill: #0550ae }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .page { fill: #161b22 } .done { fill: #3fb950 } .left { fill: #6e7681 } .prompt { fill: #79c0ff }
}
"""
CLASSES = {
    "green": "done",
    "brightgreen": "done",
    "black": "left",
    "brightblack": "left",
    "3a3a3a": "left",
    "blue": "prompt",
}
"""Colours of a terminal, by what a run's progress bar and the prompt use them for; all others look like plain text."""


@dataclass(frozen=True)
class Frame:
    """The screen, from some moment on."""

    at_s: float
    rows: tuple[str, ...]
    """Each as SVG."""


class Recorder:
    """A terminal's screen, and how it looked when."""

    def __init__(self, prompt: str) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        self.prompt = prompt
        self.frames: list[Frame] = []
        self.now_s = 0.0

    def type(self, command: str) -> None:
        """Show a command being typed after the prompt."""
        self.stream.feed(f"\x1b[34m{self.prompt}\x1b[0m ".encode())
        for character in command:
            self.stream.feed(character.encode())
            self.now_s += TYPING_S
            self._take()
        self.now_s += REST_S
        self.stream.feed(b"\r\n")

    def run(self, command: str) -> None:
        """Run a command on this terminal until it ends."""
        ours, theirs = pty.openpty()
        ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        began, before = time.monotonic(), self.now_s
        with subprocess.Popen(["bash", "-c", command], stdin=theirs, stdout=theirs, stderr=theirs) as process:
            os.close(theirs)
            more = True
            while more:
                more = self._fed(ours)
                self.now_s = before + time.monotonic() - began
                self._take()
        os.close(ours)
        if process.returncode:
            raise SystemExit(f"`{command}` ended with {process.returncode}:\n" + "\n".join(self.screen.display))
        self.now_s += REST_S

    def _fed(self, ours: int) -> bool:
        """Feed the screen with what has been printed; return whether there may be more."""
        try:
            while True:
                data = os.read(ours, 65536)
                self.stream.feed(data)
                if not data or not select.select([ours], [], [], FRAME_S / 2)[0]:
                    return bool(data)
        except OSError:  # Linux answers with EIO when the last process has closed the terminal
            return False

    def _take(self) -> None:
        rows = tuple(self._row(number) for number in range(ROWS))
        if self.frames and self.frames[-1].rows == rows:
            return
        if self.frames and self.now_s - self.frames[-1].at_s < FRAME_S:
            self.frames[-1] = Frame(self.frames[-1].at_s, rows)
        else:
            self.frames.append(Frame(self.now_s, rows))

    def _row(self, number: int) -> str:
        line, parts = self.screen.buffer[number], []
        column = 0
        while column < COLUMNS:
            look = (line[column].fg, line[column].bold)
            end = column
            while end < COLUMNS and (line[end].fg, line[end].bold) == look:
                end += 1
            text = "".join(line[each].data for each in range(column, end))
            classes = " ".join(filter(None, [CLASSES.get(look[0], ""), "bold" if look[1] else ""]))
            if text.strip():
                attribute = f' class="{classes}"' if classes else ""
                parts.append(f'<tspan x="{MARGIN + column * CELL_W:g}"{attribute}>{html.escape(text.rstrip())}</tspan>')
            column = end
        return "".join(parts)


def svg(frames: Sequence[Frame], title: str) -> str:
    """Return the frames as one picture: each is a group that CSS shows for its time."""
    total = frames[-1].at_s + END_S
    width, height = COLUMNS * CELL_W + 2 * MARGIN, ROWS * CELL_H + 2 * MARGIN
    rules, groups = [], []
    for number, frame in enumerate(frames):
        end = frames[number + 1].at_s if number + 1 < len(frames) else total
        first, last = 100 * frame.at_s / total, 100 * end / total
        shown = f"{first:.3f}%, {last:.3f}% {{ visibility: visible }}"
        if number:
            shown = f"0%, {first - 0.001:.3f}% {{ visibility: hidden }} {shown}"
        if number + 1 < len(frames):
            shown += f" {last + 0.001:.3f}%, 100% {{ visibility: hidden }}"
        rules.append(
            f"@keyframes f{number} {{ {shown} }} #f{number} {{ animation: f{number} {total:.2f}s step-end infinite }}"
        )
        rows = [
            f'<text y="{MARGIN + (row + 0.8) * CELL_H:g}">{text}</text>' for row, text in enumerate(frame.rows) if text
        ]
        groups.append(f'<g id="f{number}" class="frame">{"".join(rows)}</g>')
    still = (
        ".frame { visibility: hidden } .frame:last-of-type { visibility: visible }\n"
        "@media (prefers-reduced-motion: reduce) { .frame { animation: none !important } }"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" xml:space="preserve" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}">'
    page = f'<rect class="page" width="{width:g}" height="{height:g}" rx="8"/>'
    style = f"<style>{STYLE}{still}\n" + "\n".join(rules) + "\n</style>"
    return "\n".join([head, f"<title>{html.escape(title)}</title>", style, page, *groups, "</svg>\n"])


def main() -> None:
    """Type and run each command, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("commands", nargs="+", metavar="COMMAND")
    parser.add_argument("--prompt", default="$")
    args = parser.parse_args()
    recorder = Recorder(args.prompt)
    for command in args.commands:
        recorder.type(command)
        recorder.run(command)
    args.out.write_text(svg(recorder.frames, "Recorded from: " + "; ".join(args.commands)), encoding="utf-8")
    print(f"{args.out}: {len(recorder.frames)} screens in {recorder.now_s:.0f} s")


if __name__ == "__main__":
    main()
