"""The documentation site: its pages are listed, and it builds without a warning."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent


class _Loader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name Python functions."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def listed(entries: list[Any]) -> list[str]:
    """Pages of the navigation, sections opened."""
    found: list[str] = []
    for entry in entries:
        if isinstance(entry, str):
            found.append(entry)
        else:
            for inner in entry.values():
                found += listed(inner) if isinstance(inner, list) else [inner]
    return found


def test_every_page_is_in_the_navigation() -> None:
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    pages = listed(settings["nav"])
    assert sorted(pages) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Links and anchors are checked; the reference finds every name."""
    for name in ("mkdocs", "material", "mkdocstrings_handlers"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reference = (tmp_path / "reference.html").read_text()
    for name in ("shardwright.api.synthesize", "shardwright.plan.Plan", "shardwright.cost.fleet.Fleet.load"):
        assert f'id="{name}"' in reference, name
    for page in tmp_path.rglob("*.html"):
        assert 'src="http' not in page.read_text(), "pages load nothing from elsewhere"
