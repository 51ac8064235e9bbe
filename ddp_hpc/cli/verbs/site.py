"""Show the site profile that runs here get their defaults from, list those that can be named, or propose one.

ddp-hpc site show                   which profile counts here, why, and what it says
ddp-hpc site show slingshot         the same of one by name
ddp-hpc site list                   all that can be named
ddp-hpc site init                   print a draft, made from what Slurm and this host tell
ddp-hpc site init mycluster --write into ~/.config/ddp_hpc/sites/mycluster.yaml
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hpc.cli.formatting import as_json, or_dash, table
from ddp_hpc.errors import ConfigError

if TYPE_CHECKING:
    from ddp_hpc.config.site import Profile
    from ddp_hpc.config.sources import Setting


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("action", choices=("show", "list", "init"), nargs="?", default="show", help="default: show")
    parser.add_argument("site", metavar="SITE", nargs="?", help="a profile's name or file; with `init`, the new name")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print a JSON object")
    how.add_argument("--write", action="store_true", help="with `init`: keep the draft, unless there is one already")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    """Show, list or propose."""
    actions = {"show": _show, "list": _list, "init": _init}
    if args.write and args.action != "init":
        raise ConfigError("`--write` goes with `ddp-hpc site init`.")
    if args.json and args.action == "init":
        raise ConfigError("`ddp-hpc site init` prints YAML; leave out `--json`.")
    actions[args.action](args, environment)
    return 0


def _show(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    from ddp_hpc.config.site import find_profile, profile_dirs

    profile = find_profile(environment, args.site, fill=False)
    if args.json:
        print(as_json(None if profile is None else _as_object(profile)))
    elif profile is None:
        places = ", ".join(map(str, profile_dirs(environment)))
        print(f"No site profile counts here: none in {places} is for this host. `ddp-hpc site init` proposes one.")
    else:
        print(_as_text(profile))


def _shown(setting: Setting) -> Any:
    """Return a setting's value, or what stands for it where it may be a secret."""
    from ddp_hpc.config import HIDDEN
    from ddp_hpc.discretion import is_key_shown

    return setting.value if is_key_shown(setting.key, setting.value) else HIDDEN


def _as_object(profile: Profile) -> dict[str, Any]:
    return {
        "site": vars(profile.site),
        "path": str(profile.path),
        "why": profile.why,
        "settings": {setting.key: _shown(setting) for setting in profile.settings},
        "partitions": {
            name: {setting.key: _shown(setting) for setting in settings}
            for name, settings in profile.partitions.items()
        },
    }


def _as_text(profile: Profile) -> str:
    from ddp_hpc.config.yaml_text import dump_value

    site = profile.site
    told = [
        ("site", site.name),
        ("", site.about),
        ("profile", f"{profile.path} ({profile.why})"),
        ("hosts", ", ".join(site.hosts)),
        ("scratch", or_dash(site.scratch)),
        ("no runs in", ", ".join(site.no_write)),
    ]
    lines = [table(("", ""), [row for row in told if row[1]]).lstrip("\n")]
    rows = [("", setting.key, dump_value(_shown(setting)), setting.origin.line) for setting in profile.settings]
    for name, settings in profile.partitions.items():
        rows += [(name, setting.key, dump_value(_shown(setting)), setting.origin.line) for setting in settings]
    if rows:
        cells = [(or_dash(partition), key, value, str(line)) for partition, key, value, line in rows]
        lines += ["", table(("PARTITION", "KEY", "DEFAULT", "LINE"), cells)]
    return "\n".join(lines)


def _list(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    from ddp_hpc.config.site import examples_dir, find_profile, known_profiles, read_profile

    chosen = find_profile(environment, fill=False)
    known = {name: read_profile(path, "", None) for name, path in known_profiles(environment).items()}
    here = [name for name, one in known.items() if chosen is not None and chosen.path == one.path]
    examples = [name for name, one in known.items() if one.path.parent == examples_dir()]
    if args.json:
        rows = [
            {
                "name": name,
                "counts_here": name in here,
                "is_example": name in examples,
                "about": one.site.about,
                "path": str(one.path),
            }
            for name, one in known.items()
        ]
        print(as_json(rows))
        return
    words = {**dict.fromkeys(examples, "example"), **dict.fromkeys(here, "counts here")}
    cells = [(name, words.get(name, ""), one.site.about, str(one.path)) for name, one in sorted(known.items())]
    print(table(("NAME", "", "ABOUT", "FILE"), cells))


def _init(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    from ddp_hpc.config.site import PLAIN_NAME, profile_dirs
    from ddp_hpc.diagnose.site_draft import propose, proposed_name, survey
    from ddp_hpc.durable import replace_text

    if args.site is not None and not PLAIN_NAME.fullmatch(args.site):
        raise ConfigError(f"{args.site!r} cannot name a site: use letters, digits, `.`, `_` and `-`.")
    found = survey(environment)
    text = propose(found, name=args.site)
    if not args.write:
        print(text, end="")
        return
    path = profile_dirs(environment)[0] / f"{args.site or proposed_name(found)}.yaml"
    if path.exists():
        raise ConfigError(f"{path} exists already. Remove it first, or give the draft another name.")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
    print(f"{path}\nLook through it; then: ddp-hpc site show {Path(path).stem}")
