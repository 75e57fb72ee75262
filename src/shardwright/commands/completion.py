"""`shardwright completion`: what a shell reads to complete commands and options."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from shardwright.console import say_json


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def completion(shell: str, as_json: bool) -> None:
    """Print what makes SHELL complete this command.

    Bash, in ~/.bashrc: eval "$(shardwright completion bash)". Zsh the same in ~/.zshrc. Fish: shardwright
    completion fish > ~/.config/fish/completions/shardwright.fish
    """
    root = click.get_current_context().find_root().command
    made = get_completion_class(shell)
    assert made is not None, "click knows these shells"
    source = made(root, {}, "shardwright", "_SHARDWRIGHT_COMPLETE").source()
    if as_json:
        say_json({"shell": shell, "script": source})
    else:
        click.echo(source)
