"""The report page: what it says, that it needs nothing beside it, and how a browser shows it."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner
from page_cases import Reader, shape

from shardwright import Plan, ReplicatedWarning, api
from shardwright.cli import main
from shardwright.cost.fleet import Fleet
from shardwright.cost.quantity import size
from shardwright.fleets.summary import summary
from shardwright.ir.errors import PlanError
from shardwright.reports.facts import COLUMNS, Facts, facts
from shardwright.reports.page import area, page
from shardwright.reports.units import duration

ROOT = Path(__file__).resolve().parent.parent
SECTIONS = [
    "shares",
    "time",
    "timeline",
    "memory",
    "baselines",
    "program",
    "certificate",
    "assumptions",
    "fleet",
]
STEP = """
import jax, jax.numpy as jnp

def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)

def small():
    return step, (jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((16, 64), "float32"))
"""


def step(params: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss_of(params: Any) -> jax.Array:
        found = x
        for layer in params["layers"]:
            found = jnp.tanh(found @ layer["w"] + layer["b"])
        side = found[0, :8]
        solved = jax.lax.linalg.tridiagonal_solve(side, side + 8, side, found[:8, :8])
        return jnp.mean((solved.sum() + found - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss


@pytest.fixture(scope="module")
def planned() -> Plan:
    """Three layers on three of five devices; something is replicated, something assumed."""
    params = {"layers": [{"w": shape(512, 512), "b": shape(512)} for _ in range(3)]}
    devices = [
        {"type": {"name": "big <1>", "flops": "4 TFLOP/s", "memory_bandwidth": "400 GB/s", "memory": "8 GB"}},
        {
            "type": {"name": "small", "flops": "1 TFLOP/s", "memory_bandwidth": "100 GB/s", "memory": "2 GB"},
            "count": 2,
        },
    ]
    link = {"bandwidth": "40 GB/s", "latency": "1 us"}
    far = {"bandwidth": "1 kB/s", "latency": "1 s"}
    fleet = Fleet.from_dict(
        {
            "name": "lab & more",
            "nodes": [
                {"devices": devices, "link": link},
                {"devices": {"type": devices[1]["type"], "count": 2}, "link": link},
            ],
            "network": far,
        }
    )
    with pytest.warns(ReplicatedWarning):
        return api.synthesize(step, params, shape(4096, 512), shape(4096, 512), fleet=fleet, axes=1)


@pytest.fixture(scope="module")
def found(planned: Plan) -> Facts:
    assert planned.traced is not None
    beside = api.on_the_whole_fleet(planned.traced, planned.fleet)
    return facts(planned, planned.traced, "three layers", beside)


@pytest.fixture(scope="module")
def html(planned: Plan, found: Facts) -> str:
    assert planned.traced is not None
    beside = api.on_the_whole_fleet(planned.traced, planned.fleet)
    return page(planned, planned.traced, "three <layers>", beside)


@pytest.fixture(scope="module")
def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_it_needs_nothing_beside_it(html: str, read: Reader) -> None:
    assert html.startswith("<!doctype html>")
    assert "<script" not in html and "@import" not in html and "url(" not in html
    ids = [value for _, name, value in read.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    for tag, name, value in read.attributes:
        if name in ("href", "src", "action", "srcset", "data"):
            assert (tag, value[:1]) == ("a", "#") and value[1:] in ids, f"{tag} {name}={value}"
        assert not name.startswith("on"), f"{tag} {name}"


def test_sections_are_there_and_linked(read: Reader) -> None:
    ids = [value for tag, name, value in read.attributes if (tag, name) == ("section", "id")]
    assert ids == SECTIONS
    assert [v[1:] for tag, name, v in read.attributes if (tag, name) == ("a", "href")] == SECTIONS
    assert ("html", "lang", "en") in read.attributes


def test_what_it_is_about(planned: Plan, read: Reader) -> None:
    head = read.said("header")
    assert "three <layers>" in head and "lab & more" in head and "big <1>" in head, "names are escaped"
    assert f"Predicted step {duration(planned.iteration_s)}" in head
    assert "Devices used 3 of 5" in head


def test_shares_and_memory_of_every_device(planned: Plan, read: Reader) -> None:
    shares, memory = read.said("shares"), read.said("memory")
    for device in planned.used:
        assert f"{100 * planned.ratios[device]:.2f}%" in shares
        assert (
            f"{size(planned.memory_bytes[device])} of {size(planned.fleet.devices[device].type.memory_bytes)}"
            in memory
        )
    assert "n0.d1, n0.d2" in shares
    assert f"n1.d0, n1.d1: {planned.unused[0].why}" in shares
    assert "whole on every device" in shares and "cut along dimension" in shares
    assert "params continues as output[0]" in shares


def test_time_and_exchanges(planned: Plan, read: Reader) -> None:
    time = read.said("time")
    assert "dot_general" in time
    for exchange in planned.exchanges:
        assert f"{exchange.name} {exchange.count:g} {duration(exchange.seconds)}" in time


def test_costs_add_up(planned: Plan, found: Facts) -> None:
    assert sum(kind.seconds for kind in found.kinds) == pytest.approx(planned.cost_s)
    assert sum(layer.seconds for layer in found.layers) == pytest.approx(planned.cost_s)
    exchanged = sum(sum(layer.exchange_s.values()) for layer in found.layers)
    assert exchanged == pytest.approx(sum(e.seconds for e in planned.exchanges))


def test_lanes_show_the_timeline(planned: Plan, found: Facts) -> None:
    for lane in found.lanes:
        for part, expected in (
            ("compute", lane.group.spent.compute_s),
            ("exchange", lane.group.spent.exchange_s),
        ):
            shown = sum(run.columns * getattr(run, part) for run in lane.runs) / COLUMNS
            assert shown * planned.iteration_s == pytest.approx(expected, abs=0.03 * planned.iteration_s)
        assert all(0 < run.compute + run.exchange <= 1 for run in lane.runs)
        covered = [c for run in lane.runs for c in range(run.start, run.start + run.columns)]
        assert covered == sorted(set(covered)) and covered[-1] < COLUMNS
        assert area(lane.runs, upper=False).count("M") == sum(1 for run in lane.runs if run.compute)
    assert sum(band.columns for band in found.bands) == COLUMNS
    phases = [band.phase for band in found.bands]
    assert phases.index("forward") < phases.index("backward") and "backward" in found.phase_words


def test_baselines_beside_the_plan(planned: Plan, found: Facts, read: Reader) -> None:
    said = read.said("baselines")
    assert found.baselines and found.left_out
    for baseline in found.baselines:
        assert f"{duration(baseline.cost_s)} {baseline.cost_s / planned.cost_s:.2f} ×" in said
        assert baseline.name in said
    for name, why in found.left_out.items():
        assert f"{name}: {why}" in said


def test_the_program_by_layer(found: Facts, read: Reader) -> None:
    said = read.said("program")
    names = [name for layer in found.layers for name in layer.layers]
    assert names[:3] == ["layers[0]", "layers[1]", "layers[2]"]
    for layer in found.layers:
        assert layer.title in said
        for exchange in layer.exchanges:
            assert f"{exchange.name} {exchange.phase} {exchange.before} → {exchange.after}" in said
    first = found.layers[0].tensors
    assert [tensor.name for tensor in first] == ["['b']", "['w']"]
    assert "float32[512,512]" in said and all(tensor.words in said for tensor in first)


def test_certificate_assumptions_and_fleet(planned: Plan, found: Facts, read: Reader) -> None:
    said = read.said("certificate")
    assert f"This plan costs {duration(planned.cost_s)} ." in said
    assert f"No plan of its space costs less than {duration(planned.bound_s)} ," in said
    assert f"at most {100 * planned.gap:.1f}% is left" in said
    notes = read.said("assumptions")
    assert "replicated: tridiagonal_solve" in notes
    assert all(" ".join(note.split()) in notes for note in planned.assumptions)
    fleet = read.said("fleet")
    assert "big <1> 1 4 TFLOP/s" in fleet and "small 4 1 TFLOP/s" in fleet
    assert "The narrowest link is the network between the nodes: 1 kB/s, 1 s." in fleet


def test_a_plan_from_a_file_needs_its_step(planned: Plan, tmp_path: Path) -> None:
    planned.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="without its step"):
        loaded.save_report(tmp_path / "plan.html")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    loaded.save_report(tmp_path / "plan.html", traced=planned.traced, title="again")
    text = (tmp_path / "plan.html").read_text()
    assert "<h1>again</h1>" in text and 'id="baselines"' not in text


def test_twelve_layers_on_sixty_four_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 small, all devices used: under a megabyte."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    gpt2 = import_module("gpt2")
    train_step, args = gpt2.small()
    fleet = Fleet.load(ROOT / "examples/fleets/hap_testbed.yaml")
    plan = api.synthesize(train_step, *args, fleet=fleet, devices="all", axes=1)
    plan.save_report(tmp_path / "plan.html", title="GPT-2 small")
    text = (tmp_path / "plan.html").read_text()
    assert len(text.encode()) < 1_000_000
    assert "64 of 64" in text and "blocks[0] … blocks[11]" in text
    for name in ("gpt2", "_layers"):
        sys.modules.pop(name, None)


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "page_step.py").write_text(STEP)
    where = tmp_path / "plan.html"
    arguments = ["plan", f"{tmp_path}/page_step.py:small", "--report", str(where), "--json"]
    result = CliRunner().invoke(main, [*arguments, "--fleet", f"{ROOT}/examples/fleets/laptop.yaml"])
    sys.modules.pop("page_step", None)
    assert (result.exit_code, result.stderr) == (0, "")
    text = where.read_text()
    assert "page_step.py:small" in text and "proportional data parallelism" in text
    assert f"<h1>{tmp_path}/page_step.py:small</h1>" in text


def test_a_page_that_cannot_be_written_is_found_before_planning(tmp_path: Path) -> None:
    arguments = ["plan", "none.py:none", "--fleet", f"{ROOT}/examples/fleets/laptop.yaml"]
    result = CliRunner().invoke(main, [*arguments, "--report", str(tmp_path)])
    assert result.exit_code == 2 and "is a folder. Name a file with --report" in result.stderr


def test_fleets_are_added_up() -> None:
    testbed = summary(Fleet.load(ROOT / "examples/fleets/hap_testbed.yaml"))
    assert [(t.type.name, t.count) for t in testbed.types] == [("V100-SXM2-16GB", 16), ("P100-PCIE-16GB", 48)]
    assert testbed.float32_flop_per_s == pytest.approx(16 * 15.7e12 + 48 * 9.3e12)
    assert testbed.memory_bytes == 64 * 16 * 10**9
    assert [(run.names[0], len(run.names)) for run in testbed.nodes] == [("n0", 2), ("n2", 6)]
    assert testbed.narrowest is not None
    assert testbed.narrowest.where == "the network between the nodes"
    assert testbed.narrowest.bandwidth_byte_per_s == pytest.approx(1.3e9)
    alone = Fleet.from_dict({"name": "one", "nodes": [{"devices": {"type": "T4"}}]})
    assert summary(alone).narrowest is None


# ---------------------------------------------------------------------------------------------------
# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium is installed")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_in_a_browser(browser: Any, html: str, tmp_path: Path, width: int, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    where = tmp_path / "plan.html"
    where.write_text(html)
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    try:
        shown = context.new_page()
        said: list[str] = []
        asked: list[str] = []
        shown.on("console", lambda message: said.append(message.text))
        shown.on("pageerror", lambda error: said.append(str(error)))
        shown.on("request", lambda request: asked.append(request.url))
        shown.goto(where.as_uri())
        shown.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
        assert said == [] and asked == [where.as_uri()]
        for section in SECTIONS:
            box = shown.locator(f"#{section}").bounding_box()
            assert box is not None and box["height"] > 60 and box["width"] > 300
        assert shown.evaluate("document.documentElement.scrollWidth") <= width, "nothing sticks out sideways"
        colour = shown.evaluate("getComputedStyle(document.body).backgroundColor")
        light = sum(map(int, re.findall(r"\d+", colour)[:3])) > 3 * 128
        assert light == (scheme == "light")
        violations = Axe().run(shown).response["violations"]
        bad = [v["id"] for v in violations if v["impact"] in ("serious", "critical")]
        assert bad == []
    finally:
        context.close()
