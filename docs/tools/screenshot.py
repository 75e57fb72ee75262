"""Draws docs/report.png: the report on GPT-2 small for one A100 and three T4, on a desk and on a phone.

Run it from the repository: python docs/tools/screenshot.py. It needs Chromium, playwright and Pillow.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

import shardwright
from shardwright.api import on_the_whole_fleet

ROOT = Path(__file__).resolve().parent.parent.parent
HEIGHT, WIDE, PHONE, GAP = 1180, 1120, 400, 24


def main() -> None:
    """Plan, write the page, photograph it twice, put both side by side."""
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt2

    step, args = gpt2.small(32)
    fleet = shardwright.Fleet.load(ROOT / "examples/fleets/a100_t4.yaml")
    plan = shardwright.synthesize(step, *args, fleet=fleet)
    assert plan.traced is not None
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "plan.html"
        beside = on_the_whole_fleet(plan.traced, fleet)
        plan.save_report(page, title="GPT-2 small, 32 sequences of 1024 tokens", baselines=beside)
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        shots: list[Path] = []
        for width, scheme, section in ((WIDE, "light", ""), (PHONE, "dark", "timeline")):
            context = browser.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
            shown = context.new_page()
            shown.goto(page.as_uri())
            if section:
                script = "name => document.getElementById(name).scrollIntoView({behavior: 'instant'})"
                shown.evaluate(script, section)
            shots.append(Path(folder) / f"{scheme}.png")
            shown.screenshot(path=shots[-1])
        browser.close()
        canvas = Image.new("RGB", (WIDE + PHONE + GAP, HEIGHT), "white")
        canvas.paste(Image.open(shots[0]), (0, 0))
        canvas.paste(Image.open(shots[1]), (WIDE + GAP, 0))
        canvas.quantize(256).save(ROOT / "docs/report.png", optimize=True)


if __name__ == "__main__":
    main()
