"""Fleet questions: changed fleets, and the part of a fleet whose steps cost least."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from click.testing import CliRunner

from shardwright import Fleet, InputError, shortage, synthesize, what_if
from shardwright.cli import main
from shardwright.fleet_questions import changed
from shardwright.ir.trace import trace
from shardwright.memory.remedies import halved, with_memory
from shardwright.money import price_per_hour


def kind(name: str, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "flops": f"{speed} MFLOP/s",
        "memory_bandwidth": f"{2 * speed} MB/s",
        "memory": "1 GB",
    } | more


LINK = {"bandwidth": "1 GB/s", "latency": "1 us"}


def fleet(fast: float = 1.0, slow: float = 0.1) -> Fleet:
    return Fleet.from_dict(
        {
            "name": "two",
            "nodes": [
                {"devices": {"type": kind("fast", 400), "count": 2, "price_per_hour": fast}, "link": LINK},
                {"devices": {"type": kind("slow", 100, price_per_hour=slow), "count": 2}, "link": LINK},
            ],
            "network": {"bandwidth": "100 MB/s", "latency": "5 us"},
        }
    )


def step(w: Any, x: Any) -> Any:
    return w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


ARGS = (jax.ShapeDtypeStruct((64, 64), "float32"), jax.ShapeDtypeStruct((256, 64), "float32"))


def names(fleet: Fleet) -> list[str]:
    return [device.type.name for device in fleet.devices]


def test_devices_are_added_and_dropped_by_name() -> None:
    whole = fleet()
    assert names(changed(whole, "drop=n0")) == ["slow", "slow"]
    assert names(changed(whole, "drop=n0.d1,drop=1xslow")) == ["fast", "slow"]
    assert names(changed(whole, "drop=1xslow,drop=1xslow")) == ["fast", "fast"]
    assert names(changed(whole, "drop=n1.d1,drop=1xslow,drop=1xfast")) == ["fast"]
    assert names(changed(whole, "add=2xT4,drop=fast")) == ["slow", "slow", "T4", "T4"]
    assert names(changed(whole, "add=fast@n1")) == ["fast", "fast", "slow", "slow", "fast"]
    assert len(changed(whole, "add=3xfast").nodes) == 3
    one = changed(whole, "drop=n1")
    assert len(changed(one, "add=fast").nodes) == 1


def test_devices_that_are_added_have_links_to_the_host_as_others_have() -> None:
    """As those of their type, or else as the first that has one."""
    slow, quick = LINK | {"bandwidth": "10 MB/s"}, LINK | {"bandwidth": "20 MB/s"}
    nodes = [
        {"devices": {"type": kind("fast", 400), "count": 1}, "link": LINK},
        {"devices": {"type": kind("slow", 100), "count": 1}, "link": LINK, "host_link": slow},
        {"devices": {"type": kind("quick", 200), "count": 1}, "link": LINK, "host_link": quick},
    ]
    whole = Fleet.from_dict({"name": "three", "nodes": nodes, "network": LINK})

    def rates(changes: str) -> list[float | None]:
        links = [device.host_link for device in changed(whole, changes).devices[3:]]
        return [None if link is None else link.bandwidth_byte_per_s for link in links]

    assert rates("add=2xquick") == [20e6, 20e6]
    assert rates("add=slow") == [10e6]
    assert rates("add=T4") == [10e6]
    into = changed(whole, "add=quick@n1,add=T4@n0").nodes
    assert [[link and link.bandwidth_byte_per_s for _, link in node.equipped] for node in into] == [
        [None, 10e6],
        [10e6, 20e6],
        [20e6],
    ]
    assert all(device.host_link is None for device in changed(fleet(), "add=fast").devices)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("more=T4", "is neither add= nor drop="),
        ("drop=n7", "there is no n7"),
        ("drop=5xslow", r"there are 2 slow\."),
        ("drop=1xslow,drop=2xslow", "there are 1 slow left"),
        ("drop=n1,drop=1xslow", "there are 0 slow left"),
        ("add=0xT4", "adds no device"),
        ("add=99999xT4", "beyond 4096 devices. Plan for at most 4096 devices"),
        ("add=4096xT4@n0", "beyond 4096 devices"),
        (f"add={'9' * 5000}xT4", "beyond 4096 devices"),
        (f"drop={'9' * 5000}xslow", "there are 2 slow"),
        ("add=T4@n9", "there is no node n9"),
        ("drop=fast,drop=slow", "leaves no device"),
        ("add=T44", "T44"),
        ("add=T4:free", "'free' is no price per hour"),
        ("add=T4:-1", "'-1' is no price per hour"),
        ("add=T4:0", "'0' is no price per hour. Write a number above 0"),
        ("add=T4:1e-400", "'1e-400' is no price per hour"),
        ("add=T4:", "'' is no price per hour"),
        ("add=T4@", "names no node after @"),
    ],
)
def test_changes_that_cannot_be_made_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        changed(fleet(), text)


def test_what_a_change_would_bring_is_a_plan_for_that_fleet() -> None:
    now = synthesize(step, *ARGS, fleet=fleet())
    found = what_if(step, *ARGS, fleet=fleet(), changes="add=2xfast@n0")
    assert found.now.iteration_s == now.iteration_s
    direct = synthesize(step, *ARGS, fleet=changed(fleet(), "add=2xfast@n0"))
    assert found.then.iteration_s == direct.iteration_s
    assert found.change == pytest.approx(direct.iteration_s / now.iteration_s - 1)
    assert "price per hour" in found.text()
    assert found.to_dict()["then"]["devices"] == len(direct.used)


def test_the_cheapest_part_of_a_fleet_depends_on_its_prices() -> None:
    def chosen(fast: float, slow: float) -> set[str]:
        made = synthesize(step, *ARGS, fleet=fleet(fast, slow))
        plan = synthesize(step, *ARGS, fleet=fleet(fast, slow), objective="cost")
        hourly, before = price_per_hour(plan), price_per_hour(made)
        assert hourly is not None and before is not None
        assert hourly * plan.iteration_s <= before * made.iteration_s * (1 + 1e-9)
        assert len(plan.ratios) == len(plan.memory_bytes) == 4
        return {plan.fleet.devices[d].type.name for d in plan.used}

    assert chosen(1.0, 100.0) == {"fast"}
    assert chosen(100.0, 1.0) == {"slow"}
    again = Fleet.from_dict(fleet(2.0, 3.0).to_dict())
    assert [device.type.price_per_hour for device in again.devices] == [2.0, 2.0, 3.0, 3.0]
    with pytest.raises(InputError, match="no price of T4"):
        synthesize(step, *ARGS, fleet=changed(fleet(), "add=T4"), objective="cost")
    with pytest.raises(InputError, match=r"no price of T4.*add=T4:1\.20"):
        what_if(step, *ARGS, fleet=fleet(), changes="add=T4@n0", objective="cost")
    priced = changed(fleet(), "add=2xT4:0.35@n0,add=fast:3").devices
    assert [device.type.price_per_hour for device in priced] == [1.0, 1.0, 0.35, 0.35, 0.1, 0.1, 3.0]


def test_questions_are_about_steps_planned_in_the_same_way() -> None:
    found = what_if(
        step, *ARGS, fleet=fleet(), changes="add=fast@n0", objective="cost", axes=1, microbatches=2
    )
    for plan in (found.now, found.then):
        assert plan.axes == 1
        assert plan.rewriting.microbatches == 2
        assert any("cost least" in line for line in plan.assumptions)


def test_a_smaller_batch_is_that_of_every_argument_that_has_its_rows() -> None:
    """State may be many tensors, whatever their rows; a rate, and a table that is no batch, stay whole."""

    def several(params: Any, rate: Any, table: Any, x: Any, y: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] @ table - y) ** 2)

        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss_of)(params))

    params = {"a": jnp.ones((24, 8)), "b": jnp.ones((8, 4))}
    args = (params, 0.5, jnp.ones((4, 2)), jnp.ones((24, 24)), jnp.ones((24, 2)))
    less = halved(args, trace(several, *args).graph, 2)
    assert less is not None
    batch, smaller = less
    assert batch == 12
    assert [jnp.shape(leaf) for leaf in jax.tree.leaves(smaller)] == [
        (24, 8), (8, 4), (), (4, 2), (12, 24), (12, 2)
    ]  # fmt: skip
    assert halved(args, trace(several, *args).graph, 5) is None


@pytest.mark.full
def test_as_much_memory_as_is_needed_is_enough() -> None:
    has = fleet().devices[0].type.memory_bytes
    for needs in range(has + 1, has + 10**7, 9_973):
        assert with_memory(fleet(), needs / has).devices[0].type.memory_bytes == needs
    assert with_memory(fleet(), 1.5 / has).devices[0].type.memory_bytes == 1


def test_where_nothing_fits_the_answer_says_what_would() -> None:
    pair = changed(fleet(), "drop=n1")
    tight = with_memory(pair, 3e-5)
    plan = synthesize(step, *ARGS, fleet=tight, recompute="off")
    assert not plan.fits
    found = shortage(plan, step, *ARGS, recompute="off")
    assert found is not None
    assert found.needs_bytes > found.has_bytes
    assert 1 <= found.tried < found.factor
    assert synthesize(step, *ARGS, fleet=with_memory(tight, found.factor), recompute="off").fits
    assert sum(each.nbytes for each in found.held) <= found.needs_bytes
    assert [r.price for r in found.remedies] == sorted(r.price for r in found.remedies)
    assert any("a batch of" in remedy.what for remedy in found.remedies)
    assert "does not fit" in found.text() and found.to_dict()["device"] in found.text()
    assert shortage(synthesize(step, *ARGS, fleet=pair), step, *ARGS) is None


def driven_to_pieces() -> tuple[Any, tuple[Any, ...], Fleet]:
    """A step and a fleet into whose memory it does not fit in any number of pieces."""

    def deep(params: Any, x: Any, y: Any) -> Any:
        def loss_of(params: Any) -> Any:
            hidden = jax.nn.relu(x @ params["a"] + params["c"])
            return jnp.mean((hidden @ params["b"] + params["d"] - y) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    sizes = {"a": (16, 64), "c": (64,), "b": (64, 8), "d": (8,)}
    params = {name: jax.ShapeDtypeStruct(size, "float32") for name, size in sizes.items()}
    args = params, jax.ShapeDtypeStruct((64, 16), "float32"), jax.ShapeDtypeStruct((64, 8), "float32")
    link = {"bandwidth": "20 GB/s", "latency": "100 ns"}
    type_ = {"name": "mid", "flops": "20 GFLOP/s", "memory_bandwidth": "20 GB/s", "memory": "1 GB"}
    pair = Fleet.from_dict(
        {"name": "pair", "nodes": [{"devices": {"type": type_, "count": 2}, "link": link}]}
    )
    free = synthesize(deep, *args, fleet=pair)
    return deep, args, with_memory(pair, 0.3 * max(free.memory_bytes) / 1e9)


def test_remedies_need_not_keep_what_was_done_because_nothing_fits() -> None:
    """With more memory a step that was cut in vain is planned as it is, unless pieces were asked for."""
    deep, args, tight = driven_to_pieces()
    plan = synthesize(deep, *args, fleet=tight)
    assert not plan.fits and plan.rewriting.microbatches > 1
    found = shortage(plan, deep, *args)
    assert found is not None
    (more,) = [remedy for remedy in found.remedies if remedy.what.startswith("4 times the memory")]
    assert more.price == pytest.approx(0, abs=0.01)
    asked = shortage(plan, deep, *args, recompute=plan.rewriting)
    assert asked is not None
    (kept,) = [remedy for remedy in asked.remedies if remedy.what == more.what]
    assert kept.iteration_s > 2 * more.iteration_s
    for each in (found, asked):
        named = [held.what for held in each.held]
        assert any(" for " in what for what in named) and not any("rewrites" in what for what in named)
    with pytest.raises(InputError, match="Leave it out"):
        shortage(plan, deep, *args, recompute=plan.rewriting, microbatches=3)


@pytest.mark.full
def test_the_memory_that_would_do_was_planned_for() -> None:
    """What is said of it is what a plan with so much takes, however dear the plan that does not fit is."""
    sizes = {"a": (32, 128), "c": (128,), "b": (128, 16), "d": (16,)}
    params = {name: jax.ShapeDtypeStruct(size, "float32") for name, size in sizes.items()}
    args = params, jax.ShapeDtypeStruct((100, 32), "float32"), jax.ShapeDtypeStruct((100, 16), "float32")

    def aside(params: Any, x: Any, y: Any) -> Any:
        def loss_of(params: Any) -> Any:
            out = jax.nn.relu(x @ params["a"] + params["c"]) @ params["b"] + params["d"]
            return jnp.mean((out - y) ** 2), (jnp.max(out), out)

        loss, gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    kinds = [
        {"name": name, "flops": f"{speed} GFLOP/s", "memory_bandwidth": f"{rate} GB/s", "memory": "35430 B"}
        for name, speed, rate in (("fast", 40, 10), ("slow", 10, 5))
    ]
    devices = [{"type": kind, "count": count} for kind, count in zip(kinds, (1, 3), strict=True)]
    link = {"bandwidth": "2 GB/s", "latency": "20 us"}
    tight = Fleet.from_dict({"name": "f", "nodes": [{"devices": devices, "link": link}]})
    plan = synthesize(aside, *args, fleet=tight)
    found = shortage(plan, aside, *args)
    assert found is not None and not plan.fits
    (remedy,) = [each for each in found.remedies if "on every device" in each.what]
    roomy = with_memory(tight, found.factor)
    how: Any = {"axes": plan.axes, "devices": "all", "recompute": plan.rewriting}
    there = synthesize(aside, *args, fleet=roomy, **how)
    assert there.fits and remedy.iteration_s <= there.iteration_s * (1 + 1e-6)
    assert remedy.iteration_s <= plan.iteration_s * (1 + 1e-6)


def test_a_plan_that_does_not_fit_says_so_before_all_else() -> None:
    plan = synthesize(step, *ARGS, fleet=with_memory(fleet(), 2e-5), time_limit_s=0)
    assert not plan.fits
    first, second, third, *_ = str(plan).splitlines()
    assert first.startswith("plan for two")
    assert (
        second.startswith("  DOES NOT FIT    n") and "would need" in second and "and has 19.5 KiB" in second
    )
    assert "--remedies" in third


def test_the_command_answers_in_words_and_as_json(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        "import jax\nimport jax.numpy as jnp\n\n\ndef make():\n"
        "    args = (jax.ShapeDtypeStruct((16, 16), 'float32'), jax.ShapeDtypeStruct((32, 16), 'float32'))\n"
        "    return (lambda w, x: w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)), args\n"
    )
    (tmp_path / "fleet.json").write_text(json.dumps(fleet().to_dict()))

    def run(*more: str) -> Any:
        arguments = ["plan", f"{tmp_path}/small.py:make", "--fleet", f"{tmp_path}/fleet.json", *more]
        return CliRunner().invoke(main, arguments)

    result = run("--what-if", "drop=n1", "--objective", "cost", "--json")
    assert result.exit_code == 0, result.output
    data = json.loads(result.output)
    assert data["what_if"]["changes"] == "drop=n1"
    assert any("cost least" in line for line in data["assumptions"])
    text = run("--what-if", "drop=n1")
    assert "what if drop=n1" in text.output and "price per hour" in text.output
    refused = run("--what-if", "drop=n9")
    assert refused.exit_code == 2 and "there is no n9" in refused.output


def test_a_script_can_tell_that_nothing_fits(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(
        "import jax\nimport jax.numpy as jnp\n\n\ndef make():\n"
        "    args = (jax.ShapeDtypeStruct((16, 16), 'float32'), jax.ShapeDtypeStruct((32, 16), 'float32'))\n"
        "    return (lambda w, x: w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)), args\n"
    )
    (tmp_path / "fleet.json").write_text(json.dumps(with_memory(changed(fleet(), "drop=n1"), 1e-6).to_dict()))

    def run(*more: str) -> Any:
        arguments = ["plan", f"{tmp_path}/small.py:make", "--fleet", f"{tmp_path}/fleet.json", *more]
        return CliRunner().invoke(main, arguments)

    told = run("-o", f"{tmp_path}/plan.json")
    assert told.exit_code == 3, told.output
    assert "DOES NOT FIT" in told.output and "times the memory on every device" in told.output
    assert json.loads((tmp_path / "plan.json").read_text())["fits"] is False
    brief = run("--no-remedies", "--json")
    assert brief.exit_code == 3
    data = json.loads(brief.output)
    assert data["fits"] is False and "shortage" not in data
    assert "shortage" not in json.loads(run("--time-limit", "0", "--json").output)
    assert json.loads(run("--json").output)["shortage"]["factor"] > 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"memory": "0 GB"}, "memory"),
        ({"memory": "-1 GB"}, "memory"),
        ({"memory": 16}, "memory"),
        ({"reserve": "2 GB"}, "leaves nothing of a memory"),
        ({"price_per_hour": -1}, "price_per_hour"),
    ],
)
def test_budgets_that_are_none_are_refused(more: dict[str, Any], reason: str) -> None:
    data = {"name": "f", "nodes": [{"devices": {"type": kind("x", 1) | more}}]}
    with pytest.raises(InputError, match=reason):
        Fleet.from_dict(data)


def test_a_reserve_is_no_memory_and_a_host_link_needs_a_bandwidth() -> None:
    def of(**more: Any) -> Fleet:
        devices = {"type": kind("x", 1, reserve="100 MB")} | more
        return Fleet.from_dict({"name": "f", "nodes": [{"devices": devices}]})

    assert of().devices[0].type.memory_bytes == 900_000_000
    with pytest.raises(InputError, match="lacks the key 'bandwidth'"):
        of(host_link={"latency": "1 us"})
