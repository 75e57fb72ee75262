"""The command line: which commands there are. Each is imported when it is used.

Exit codes: 0 done, 1 a check failed, 2 bad input, 3 a plan that does not fit, 130 interrupted,
141 nobody reads on, 143 ended by SIGTERM, with the ranks that it started.
"""

from __future__ import annotations

import click

from shardwright.commands.lazy import Commands, LazyCommand, with_voice

_EPILOG = (
    "Exit codes: 0 done; 1 a check failed (verify), or a bug of ours; 2 bad input, one line on standard "
    "error says where, why and what to do; 3 no plan was found that fits into memory (plan); 130 interrupted."
)


@click.group(
    "shardwright",
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=_EPILOG,
)
@click.version_option(package_name="shardwright")
def main() -> None:
    """Plan, verify and run a single-device JAX training step on a fleet of unequal devices."""


with_voice(main)

# Name, where it is, and the first line of its help, which a test holds to what is there.
for _name, _where, _help in (
    ("plan", "plan:plan", "Plan the step that FACTORY() returns, as (train_step, args), for a fleet."),
    ("baselines", "plan:baselines", "Price what people do without a planner, beside the plan."),
    ("verify", "verify:verify", "Run a plan on the reference backend and compare it with one device."),
    ("run", "run:run", "Run the step on a fleet."),
    ("emit", "emit:emit", "Write what every rank of a plan exchanges in a step, as JSON."),
    ("explain", "explain:explain", "Say why a plan is as it is, and what would let another one win."),
    ("diff", "diff:diff", "Say what changed from one plan to another, and why it is cheaper or dearer."),
    ("compare", "compare:compare", "Compare the strategies of COLLECTIVE on a fleet."),
    ("fleet", "fleet:fleet", "Find devices, show a fleet file, list device types."),
    ("calibrate", "calibrate:calibrate_command", "Measure devices and links, and write a fleet file."),
    (
        "profile",
        "profile:profile_command",
        "Profile the step that FACTORY() returns; nothing is executed.",
    ),
    ("completion", "completion:completion", "Print what makes SHELL complete this command."),
):
    main.add_command(LazyCommand(_name, f"shardwright.commands.{_where}", _help))
