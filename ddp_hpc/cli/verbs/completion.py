"""Print a shell script for tab completion of commands, options, keys, their values, and names of runs.

eval "$(ddp-hpc completion bash)"                                     add this line to ~/.bashrc
eval "$(ddp-hpc completion zsh)"                                      add this line to ~/.zshrc, after compinit
ddp-hpc completion fish > ~/.config/fish/completions/ddp-hpc.fish     run this once
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping

_ASK_COMMAND = "ddp-hpc completion words 2>/dev/null"
"""Reads the words up to the cursor, a line each."""
_SCRIPTS = {
    "bash": f"""\
_ddp_hpc() {{
  local IFS=$'\\n'
  COMPREPLY=($(printf '%s\\n' "${{COMP_WORDS[@]:1:COMP_CWORD}}" | {_ASK_COMMAND}))
  if [[ ${{#COMPREPLY[@]}} -eq 1 && ${{COMPREPLY[0]}} == *= ]]; then compopt -o nospace; fi
}}
complete -o default -F _ddp_hpc ddp-hpc
""",
    "zsh": f"""\
_ddp_hpc() {{
  local -a found
  found=("${{(@f)$(printf '%s\\n' "${{(@)words[2,CURRENT]}}" | {_ASK_COMMAND})}}")
  if [[ -n "$found" ]]; then
    compadd -S ' ' -- ${{found:#*=}}
    compadd -S '' -- ${{(M)found:#*=}}
  else
    _files
  fi
}}
compdef _ddp_hpc ddp-hpc
""",
    "fish": f"""\
complete -c ddp-hpc -a '(begin; set -l typed (commandline -opc) (commandline -ct); printf "%s\\n" $typed[2..-1]; end | {_ASK_COMMAND})'
""",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    shells = ", ".join(_SCRIPTS)
    told = f"{shells}: print the script for this shell; words: used by the scripts, prints what may follow the words on standard input"
    parser.add_argument("shell", choices=(*_SCRIPTS, "words"), help=told)


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    if args.shell != "words":
        print(_SCRIPTS[args.shell], end="")
        return 0
    from ddp_hpc.cli.tab_completion import completions

    found = completions(sys.stdin.read().removesuffix("\n").split("\n"), environment)
    print("".join(f"{one}\n" for one in found), end="")
    return 0
