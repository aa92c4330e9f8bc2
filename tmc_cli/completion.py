"""`tmc completion`: a script with which a shell completes commands and options."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from string import Template
from typing import Any

import typer

from tmc_cli import COMMANDS, fail

_BASH = Template("""\
declare -gA _TMC_WORDS=(
$words
)
_tmc() {
    local so_far=tmc word words
    for word in "$${COMP_WORDS[@]:1:$$((COMP_CWORD-1))}"; do
        words=" $${_TMC_WORDS[$$so_far]} "
        case "$$word" in -*) continue ;; esac
        case "$$words" in *" $$word "*) so_far="$$so_far $$word" ;; esac
    done
    COMPREPLY=($$(compgen -W "$${_TMC_WORDS[$$so_far]}" -- "$${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _tmc tmc
""")
_ZSH = "autoload -U +X bashcompinit && bashcompinit\n"
_USAGE = "Usage: tmc completion bash|zsh\n\nWrite it to a file that ~/.bashrc or ~/.zshrc sources."


def run(args: Sequence[str], prog_name: str) -> None:
    """Print the script. args: the shell."""
    del prog_name
    if list(args) == ["--help"]:
        typer.echo(_USAGE)
        return
    if list(args) not in (["bash"], ["zsh"]):
        fail(_USAGE)
    words = "\n".join(f"    ['{path}']='{' '.join(found)}'" for path, found in _words())
    script = _BASH.substitute(words=words)
    typer.echo(_ZSH + script.replace("declare -gA", "typeset -gA") if args[0] == "zsh" else script, nl=False)


def _words() -> Iterator[tuple[str, Sequence[str]]]:
    """Yield what can follow each command."""
    yield "tmc", sorted(COMMANDS)
    yield "tmc completion", ("bash", "zsh")
    for name, command in COMMANDS.items():
        module, _, attribute = command.target.partition(":")
        try:
            app = getattr(import_module(module), attribute)
        except ModuleNotFoundError:  # its extra is not installed
            continue
        if isinstance(app, typer.Typer):
            yield from _below(f"tmc {name}", typer.main.get_command(app))


def _below(path: str, command: Any) -> Iterator[tuple[str, Sequence[str]]]:
    commands = getattr(command, "commands", {})
    params = [name for each in command.params for name in (*each.opts, *each.secondary_opts)]
    options = [name for name in params if name.startswith("--")]
    yield path, [*commands, *options, "--help"]
    for name, inner in commands.items():
        yield from _below(f"{path} {name}", inner)
