"""A small Debian with its Python, from where this machine gets its own: what an image can be built on without a registry."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.slurm.lab.packages import apt_install
from tests.slurm.lab.tools import sh

MIRROR = ("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages", "Origin: Debian", "Label: Debian")
CERTIFICATES = "etc/ssl/certs/here.pem"


def make_debian(tree: Path) -> None:
    """Make its tree; a pip inside gets packages from where this machine's does."""
    if shutil.which("mmdebstrap") is None:
        apt_install(["mmdebstrap"])
    site = sh(*MIRROR).splitlines()[0]
    packages = "--include=python3,python3-venv,ca-certificates"
    sh("mmdebstrap", "--quiet", "--variant=minbase", "--mode=root", packages, "bookworm", tree, site)
    settings = pip_settings()
    certificates = settings.get("global", "cert", fallback=os.environ.get("SSL_CERT_FILE", ""))
    if certificates:  # of a proxy, say
        shutil.copy(certificates, tree / CERTIFICATES)
        settings.set("global", "cert", f"/{CERTIFICATES}")
    with (tree / "etc/pip.conf").open("w") as file:
        settings.write(file)


def pip_settings() -> configparser.ConfigParser:
    """Return where this machine's pip takes packages from, as a file for the pip inside; its own disk is out of reach."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = configparser.ConfigParser(interpolation=None)
    settings.add_section("global")
    for line in told.stdout.splitlines():
        key, _, value = line.partition("=")
        value = " ".join(word for word in value.strip("'").split() if not word.startswith("file:"))
        if key.startswith("global.") and not key.endswith("find-links") and value:
            settings.set("global", key.partition(".")[2], value)
    return settings
