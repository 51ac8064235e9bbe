"""The documents: their links lead somewhere, all stand in the site's navigation, and pictures belong to their sources."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_hpc.cli import VERBS

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("envs/*.md")})
FENCE = re.compile(r"^ *(`{3,}).*?^ *\1", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?:\]\(|^\[[^\]]+\]: +)([^)\s#]*)(?:#([^)\s]*))?", re.MULTILINE)
"""A link in place, or a reference's definition; a title may follow."""
PICTURES = ROOT / "docs" / "pictures"


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub and the site give to a page's headings."""
    headings = re.findall(r"^#{1,6} +(.*?) *$", FENCE.sub("", text), flags=re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    slugs = Counter(re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in plain)
    return {slug for slug, count in slugs.items() if count == 1}  # GitHub and the site number the others differently


def broken_links(page: Path) -> list[str]:
    """Return a page's links that lead nowhere: relative paths, and anchors of Markdown files."""
    broken = []
    for path, anchor in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if ":" in path:  # another host's
            continue
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(f"{path}#{anchor}" if anchor else path)
    return broken


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_and_anchors_of_the_documents_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_link_to_a_page_or_heading_that_is_not_there_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text(
        "# Once\n\n## Two `words`, here\n\n## Twice\n\n## Twice\n\n```\n# no heading\n```\n"
    )
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [b](other.md#two-words-here) [c](gone.md) [d](other.md#gone) [e](#gone) [f](other.md#twice)\n"
        "[g](other.md#no-heading) [h](https://example.org/gone)\n\n```\n[i](gone.md)\n```\n"
        '![j](gone.svg "a title") [k]\n\n[k]: gone2.md\n'
    )

    lost = ["gone.md", "other.md#gone", "#gone", "other.md#twice", "other.md#no-heading", "gone.svg", "gone2.md"]
    assert broken_links(page) == lost


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.parent == ROOT / "docs" or page.name == "README.md"], ids=name_of
)
def test_the_documents_avoid_what_readers_stumbled_over(page: Path) -> None:
    """Name who does what, in the present tense: `Slurm signals the steps`, not `they are told`."""
    text = FENCE.sub("", page.read_text(encoding="utf-8")).lower()

    found = re.findall(
        r"\b(?:told|foretold|stands? still|lets? in again|is let in|what cannot be|input cannot be|its way back|words we print"
        r"|died of|out of luck|1 cpus|1 nodes|1 tasks|get on may fail|without a word|comes? back by itself|begin anew)\b",
        text,
    )
    assert found == []


def test_every_page_of_the_documents_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]

    listed = list(_leaves(nav))

    assert sorted(path.removeprefix("docs/") for path in listed if (ROOT / "docs" / path).is_file()) == sorted(
        path.name for path in ROOT.glob("docs/*.md")
    )
    assert {path for path in listed if not (ROOT / "docs" / path).is_file()} == {
        "index.md",
        "architecture.md",
        "changelog.md",
        "adr",
    }


def test_each_page_that_a_message_of_the_package_names_exists() -> None:
    texts = [path.read_text() for path in ROOT.glob("ddp_hpc/**/*.py")]

    named = {name for text in texts for name in re.findall(r"(?<![/\w])docs/[\w-]+\.md", text)}

    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_there_are_at_most_twenty_pages_beside_results_and_decisions() -> None:
    assert len(list(ROOT.glob("docs/*.md"))) <= 20


def test_each_command_has_one_row_that_says_how_stable_it_is() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()

    rows = re.findall(r"^\| `([a-z]+)` \| (?:stable|new|trial)(?:;| \|)", page, flags=re.MULTILINE)

    assert sorted(rows) == sorted(VERBS)


def _leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    below = nav.values() if isinstance(nav, dict) else nav
    return [leaf for each in below for leaf in _leaves(each)]


@pytest.mark.parametrize("source", sorted(PICTURES.glob("*.d2")), ids=lambda path: path.name)
def test_a_picture_was_drawn_from_its_source_as_it_is(source: Path) -> None:
    """Else: `make pictures`."""
    first = source.with_suffix(".svg").read_text().splitlines()[0]

    assert first == f"<!-- {source.name}, SHA-256 {hashlib.sha256(source.read_bytes()).hexdigest()} -->"


@pytest.mark.parametrize("picture", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_serves_light_and_dark_pages_loads_nothing_and_names_no_machine(picture: Path) -> None:
    text = picture.read_text()

    assert "prefers-color-scheme:" in text
    assert not re.findall(r"""(?:href|src)=["']?http|url\(["']?http|@import""", text)
    assert set(re.findall(r"/(?:home|root|work|tmp|mnt)/\w+", text)) <= {"/home/ada"}


def paths_of_a_machine(text: str) -> list[str]:
    """Return the absolute paths in a measured result that say where its author's checkout or home was."""
    return re.findall(r"(?:/home|/root|/work|/workspace|/Users|/mnt)/[^\s\"',]+|/[^\s\"',]*\.slurm-lab[^\s\"',]*", text)


@pytest.mark.parametrize("result", sorted((ROOT / "docs" / "results").iterdir()), ids=lambda path: path.name)
def test_a_measured_result_names_no_path_of_the_machine_it_was_measured_on(result: Path) -> None:
    assert paths_of_a_machine(result.read_text(encoding="utf-8")) == []


def test_a_path_of_a_machine_in_a_result_is_found() -> None:
    found = paths_of_a_machine(
        '{"log": "/home/ann/ddp_hpc/runs/a.log", "lab": "/srv/x/.slurm-lab/y", "tmp": "/tmp/runs"}'
    )
    assert found == ["/home/ann/ddp_hpc/runs/a.log", "/srv/x/.slurm-lab/y"]


def test_the_recording_shows_a_run_to_its_end() -> None:
    last = (PICTURES / "follow.svg").read_text().split("<g ")[-1]

    shown = re.sub(r"<[^>]*>", "", last)

    assert "ddp-hpc submit digits.yaml train.epochs=20 --follow" in shown
    assert "digits finished: step 300 of 300" in shown


@pytest.fixture(scope="session")
def docs_bin() -> Path:
    """Return the directory of the documents' tools, installed once by `make docs`' own rule."""
    with (ROOT / "envs" / "docs.txt").open() as pins:
        fcntl.flock(pins, fcntl.LOCK_EX)  # under `-n` two processes would install at once
        done = subprocess.run(["make", ".venv-docs/.tools"], cwd=ROOT, check=False, capture_output=True, text=True)
    if done.returncode and not os.environ.get("DDP_HPC_REQUIRE_SLURM"):  # as CI sets it, which has a network
        pytest.skip(f"pip cannot install what the site needs: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / ".venv-docs" / "bin"


def _copy(folder: Path) -> None:
    """Copy what the site is made from."""
    for name in ("docs", "envs", "examples", "benchmarks", "containers", "ddp_hpc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in [*ROOT.glob("*.md"), ROOT / "mkdocs.yml", ROOT / "NOTICE", ROOT / "LICENSE"]:
        shutil.copy(path, folder)


def _build(docs_bin: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a copy as `make docs` does, whose warnings must be errors."""
    argv = ["make", "docs", f"DOCS_BIN={docs_bin}", f"ARGS=--config-file {folder / 'mkdocs.yml'}"]
    return subprocess.run(argv, cwd=ROOT, check=False, capture_output=True, text=True)


@pytest.mark.long
def test_the_site_is_built_loads_nothing_from_elsewhere_and_refuses_broken_links(
    docs_bin: Path, tmp_path: Path
) -> None:
    _copy(tmp_path)

    built = _build(docs_bin, tmp_path)

    assert built.returncode == 0, built.stdout + built.stderr
    pages = {page: page.read_text() for page in (tmp_path / "site").rglob("*.html")}
    assert {"index.html", "tutorial.html", "architecture.html"} <= {page.name for page in pages}
    loaded = re.compile(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(?:https?:)?//")
    assert [str(page) for page, text in pages.items() if loaded.search(text)] == []
    unread = re.compile(r"<p>[^<]*```|^```|<p>- ", re.MULTILINE)  # Markdown that GitHub reads and MkDocs does not
    assert [str(page) for page, text in pages.items() if unread.search(text)] == []

    (tmp_path / "docs" / "lost.md").write_text("# In no navigation\n")
    with (tmp_path / "README.md").open("a") as readme:
        readme.write("\n[a](docs/tutorial.md#gone) [b](docs/gone.md) [c](ddp_hpc/gone.py)\n")

    broken = _build(docs_bin, tmp_path)

    assert broken.returncode != 0
    assert "does not contain an anchor '#gone'" in broken.stderr
    assert "docs/gone.md" in broken.stderr
    assert "ddp_hpc/gone.py" in broken.stderr
    assert "lost.md" in broken.stderr


@pytest.mark.long
def test_pictures_are_what_their_tools_make(docs_bin: Path, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "docs/pictures/architecture.svg").unlink()
    record = [str(docs_bin / "python"), "docs/tools/record.py", str(tmp_path / "out.svg"), "echo one '<two>'"]

    subprocess.run([tmp_path / "docs/tools/draw", docs_bin], check=True)
    recorded = subprocess.run(record, cwd=tmp_path, check=False, capture_output=True, text=True)
    refused = subprocess.run([*record, "exit 3"], cwd=tmp_path, check=False, capture_output=True, text=True)

    assert (tmp_path / "docs/pictures/architecture.svg").read_bytes() == (PICTURES / "architecture.svg").read_bytes()
    assert recorded.returncode == 0, recorded.stderr
    assert ">one &lt;two&gt;</tspan>" in (tmp_path / "out.svg").read_text()
    assert refused.returncode != 0
