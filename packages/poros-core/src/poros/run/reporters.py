"""From the names in ``report_to`` to reporters."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from poros.errors import ConfigError, PluginError, PorosError, explain
from poros.plugins import PLUGINS_VARIABLE, Registered, Registry
from poros.run.events import Reporter

__all__ = ["make_reporters"]


def make_reporters(
    names: Sequence[str], registry: Registry, output: Path
) -> tuple[Registered[Reporter], ...]:
    """Make the named reporters of a run, in order; for `Trainer`, which says their distribution if they fail.

    Args:
        names: registered names.
        registry: the loaded plugins.
        output: folder of the run; nothing is written to it yet.

    Raises:
        ConfigError: a name twice, or one that no plugin registers.
        PluginError: a class is not a `Reporter` or listens to an event that does not exist.
        PorosError: whatever the reporter itself refuses, such as a package that is missing.
    """
    if not names:
        return ()
    known = registry.reporters()
    if doubled := sorted({name for name in names if list(names).count(name) > 1}):
        raise ConfigError(explain("Bad setting `report_to`", expected="each name once", got=doubled))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            limited = f", or add it to `{PLUGINS_VARIABLE}`" if PLUGINS_VARIABLE in os.environ else ""
            raise ConfigError(
                explain(
                    "Bad setting `report_to`",
                    expected=f"names among {', '.join(sorted(known)) or 'none: no loaded plugin has a reporter'}",
                    got=f"`{name}`",
                    next_step=f"Did you mean `{near[0]}`?"
                    if near
                    else f"Install the plugin that brings it{limited}",
                )
            )
    return tuple(_make(known[name], output) for name in names)


def _make(registered: Registered[type[Reporter]], output: Path) -> Registered[Reporter]:
    kind = registered.value
    _check(kind, registered.distribution)
    try:
        reporter = kind(output)  # type: ignore[call-arg]  # the base class, which keeps nothing, takes nothing
    except PorosError:
        raise
    except Exception as error:  # a plugin may fail in any way
        raise PluginError(
            f"The reporter `{kind.name}` of distribution `{registered.distribution}` cannot be made: "
            f"{type(error).__name__}: {error}. Leave it out of `report_to`, or leave its plugin out with "
            f"`{PLUGINS_VARIABLE}=...`."
        ) from error
    return Registered(reporter, registered.distribution)


def _check(kind: type[Reporter], distribution: str) -> None:
    """Refuse a method that would never be called, and names that reach outside the output folder."""
    events = [name for name in vars(Reporter) if name.startswith("on_")]
    for name in dir(kind):
        if name.startswith("on_") and name not in events:
            near = difflib.get_close_matches(name, events, n=1) or ["none"]
            raise PluginError(
                f"The reporter `{kind.name}` of distribution `{distribution}` has a method `{name}`, which nothing "
                f"calls: expected {', '.join(events)}. The nearest is `{near[0]}`."
            )
    for entry in kind.owned:
        if Path(entry).name != entry or entry in ("", ".."):
            raise PluginError(
                f"The reporter `{kind.name}` of distribution `{distribution}` owns `{entry}`: expected the name of an "
                "entry of the output folder."
            )
