"""The `tmc` command. A command's module is imported when the command runs, so that a health check stays cheap.

This module, and all that runs before a command starts, needs only the standard library: `tmc` works with just the
client installed, and a command that needs more says which extra to install.
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, NoReturn

from tmc_common.extras import extra_of
from tmc_common.printable import escaped, without_secrets


class Command(NamedTuple):
    """target: module:name of a callable (args=..., prog_name=...).  extra: what to install for it; "": nothing more."""

    target: str
    extra: str
    help: str


_SERVER = "tmc-center[server]"
COMMANDS = {
    "serve": Command("tmc_cli.serving:serve_app", _SERVER, "Run a server. Prepare its database first with init."),
    "dev": Command("tmc_cli.serving:dev_app", _SERVER, "Run a complete center in one process, for development."),
    "init": Command("tmc_cli.databases:init_app", _SERVER, "Create or upgrade the tables; safe to repeat."),
    "move-shard": Command("tmc_cli.databases:move_app", _SERVER, "Move shards to another database while servers run."),
    "doctor": Command(
        "tmc_cli.databases:doctor_app",
        _SERVER,
        "Check databases, brokers, certificate, and all else that is configured.",
    ),
    "consume": Command("tmc_cli.consuming:run", "", "Run a consumer."),
    "outbox": Command(
        "tmc_cli.outbox:run", "tmc-client[outbox]", "Send what is in an outbox; see and repair what is not sent."
    ),
    "health": Command("tmc_cli.health:run", "", "Check whether a server is serving."),
    "size": Command("tmc_cli.size:run", "", "Say which servers, databases, brokers and disks a load needs."),
    "admin": Command("tmc_cli.admin:app", _SERVER, "Register apps, topics and subscriptions; inspect messages."),
    "console": Command("tmc_cli.console:app", "tmc-center[console]", "Run the web console for operators."),
    "storm": Command(
        "tmc_cli.storm:app", "tmc-center[storm]", "Break everything around a center of its own, and compare the books."
    ),
    "completion": Command("tmc_cli.completion:run", _SERVER, "Print a script that completes commands in a shell."),
    "pipeline": Command(
        "tmc_pipeline.cli:app", "tmc-center[pipeline]", "Archive, restore, reconcile and report; runs on Spark."
    ),
}
_OURS = ("tmc_common", "tmc_client", "tmc_console", "tmc_server", "tmc_pipeline", "tmc_cli", "tmc_storm")


def main() -> None:
    """The console script."""
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in COMMANDS:
        _run(name, arguments)
    elif name in ("--help", "-h", "help"):
        sys.stdout.write(_help())
    elif name in ("--version", "-V"):
        from importlib.metadata import version  # slow to import and needed only here

        sys.stdout.write(f"tmc {version('tmc-client')}\n")
    elif not name:
        sys.stderr.write(_help())
        raise SystemExit(2)
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        fail(f"There is no command {name!r}: {f'did you mean {near[0]!r}?' if near else 'see tmc --help.'}")


def fail(text: object, code: int = 2) -> NoReturn:
    """End the command with a message on standard error. code: 2, wrong usage; 1, a negative answer."""
    say(text)
    raise SystemExit(code)


def say(text: object) -> None:
    """Write a message to standard error, without secrets and with terminal control characters escaped."""
    sys.stderr.write(escaped(without_secrets(str(text)), keep="\n") + "\n")


def _run(name: str, arguments: Sequence[str]) -> None:
    target, extra, _ = COMMANDS[name]
    module, _, attribute = target.partition(":")
    try:
        try:
            command = getattr(import_module(module), attribute)
        except ModuleNotFoundError as exc:
            if not extra or _is_broken(exc):
                raise
            needed = exc.name if _has_center() or not extra.startswith("tmc-center") else "the center"
            fail(f"tmc {name} needs {needed}, which is not installed: pip install '{extra}'.")
        command(args=list(arguments), prog_name=f"tmc {name}")
    except ModuleNotFoundError as exc:
        needed = extra_of(exc)
        if needed is None:
            raise
        fail(f"This configuration needs {exc.name}, which is not installed: pip install '{needed}'.")
    except BrokenPipeError:
        # The reader of our output has exited, as `head` does; the interpreter's flush at exit must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def _has_center() -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec("tmc_server") is not None
    return False


def _is_broken(exc: ModuleNotFoundError) -> bool:
    """Return whether a package of ours is there without one of its modules: nothing to install would mend that."""
    name = exc.name or ""
    return name.partition(".")[0] in _OURS and "." in name


def _help() -> str:
    rows = "".join(f"  {name:<12}{command.help}\n" for name, command in COMMANDS.items())
    return (
        f"Usage: tmc COMMAND ...\n\nTransaction message center.\n\nCommands:\n{rows}\n"
        "Run `tmc COMMAND --help` for its options, `tmc --version` for the version.\n"
    )
