"""Show the site profile of this host, list all site profiles, or draft one. A site profile is a file of a cluster's defaults.

ddp-hpc site show                   show the profile used on this host, why it is used, and its settings
ddp-hpc site show slingshot         show another profile
ddp-hpc site list                   list all profiles
ddp-hpc site init                   print a draft for this cluster, from what Slurm and this host report
ddp-hpc site init mycluster --write write the draft to ~/.config/ddp_hpc/sites/mycluster.yaml
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_hpc.base.discretion import value_or_hidden
from ddp_hpc.base.errors import ConfigError
from ddp_hpc.cli.formatting import as_json, or_dash, table

if TYPE_CHECKING:
    from ddp_hpc.run.config.site import Profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "action", choices=("show", "list", "init"), nargs="?", default="show", help="what to do; default: show"
    )
    parser.add_argument(
        "site", metavar="SITE", nargs="?", help="the name or file of a profile; with `init`, the name of the new one"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print a JSON object")
    how.add_argument("--write", action="store_true", help="with `init`: write the draft to a file; overwrite nothing")


def run(args: argparse.Namespace, environment: Mapping[str, str]) -> int:
    actions = {"show": _show_profile, "list": _list_profiles, "init": _draft_profile}
    if args.write and args.action != "init":
        raise ConfigError("`--write` works only with `ddp-hpc site init`. Leave it out.")
    if args.json and args.action == "init":
        raise ConfigError("`ddp-hpc site init` prints YAML, not JSON. Leave out `--json`.")
    actions[args.action](args, environment)
    return 0


def _show_profile(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    from ddp_hpc.run.config.site import find_profile, profile_dirs

    profile = find_profile(environment, args.site, fill=False)
    if args.json:
        print(as_json(None if profile is None else _as_object(profile)))
    elif profile is None:
        places = ", ".join(map(str, profile_dirs(environment)))
        print(
            f"This host uses no site profile: none in {places} is for it, so runs use the built-in defaults. To draft one, run `ddp-hpc site init`."
        )
    else:
        print(_as_text(profile))


def _as_object(profile: Profile) -> dict[str, Any]:
    return {
        "site": vars(profile.site),
        "path": str(profile.path),
        "why": profile.why,
        "settings": {one.key: value_or_hidden(one.key, one.value) for one in profile.settings},
        "partitions": {
            name: {one.key: value_or_hidden(one.key, one.value) for one in settings}
            for name, settings in profile.partitions.items()
        },
    }


def _as_text(profile: Profile) -> str:
    from ddp_hpc.run.config.yaml_text import dump_value

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
    rows = [
        (or_dash(partition), one.key, dump_value(value_or_hidden(one.key, one.value)), str(one.origin.line))
        for partition, settings in {"": profile.settings, **profile.partitions}.items()
        for one in settings
    ]
    if rows:
        lines += ["", table(("PARTITION", "KEY", "DEFAULT", "LINE"), rows)]
    return "\n".join(lines)


def _list_profiles(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    from ddp_hpc.run.config.site import examples_dir, find_profile, known_profiles, read_profile

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
    words = {**dict.fromkeys(examples, "example"), **dict.fromkeys(here, "used here")}
    cells = [(name, words.get(name, ""), one.site.about, str(one.path)) for name, one in sorted(known.items())]
    print(table(("NAME", "", "ABOUT", "FILE"), cells))


def _draft_profile(args: argparse.Namespace, environment: Mapping[str, str]) -> None:
    from ddp_hpc.base.durable import replace_text
    from ddp_hpc.run.config.site import SITE_NAME_PATTERN, profile_dirs
    from ddp_hpc.watch.diagnose.site_draft import propose, proposed_name, survey

    if args.site is not None and not SITE_NAME_PATTERN.fullmatch(args.site):
        raise ConfigError(
            f"A site profile cannot have the name {args.site!r}. Use only letters, digits, `.`, `_` and `-`."
        )
    found = survey(environment)
    text = propose(found, name=args.site)
    if not args.write:
        print(text, end="")
        return
    path = profile_dirs(environment)[0] / f"{args.site or proposed_name(found)}.yaml"
    if path.exists():
        raise ConfigError(
            f"{path} exists already. Remove it first, or give the draft another name: `ddp-hpc site init NAME --write`."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_text(path, text)
    print(f"{path}\nThis file has the draft. Check it and correct it, then run: ddp-hpc site show {Path(path).stem}")
